"""From the choice of a batch to this rank's micro-batches: share, fetch, check, advantages, packing.

Invariant: all ranks derive the same shares from the same choice, every group belongs to exactly one data-parallel rank,
and a group that cannot be trained is named, never skipped silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from broker.errors import BrokerError, BrokerUnavailable, CorruptPayload
from broker.types import Delivery, Group, InvalidTrajectory, all_equal, check_group
from trainer.advantages import Rewards, batch_deviation, group_advantages, sums
from trainer.batch import MicroBatch, RouteShape, Sample, balance, check_traces, pack, plan
from trainer.losses.catalogue import LossSettings
from trainer.ports import Ranks, TrainerBroker


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of a batch. indexes: positions in the choice. groups: None where `problems` says why."""

    indexes: tuple[int, ...]
    groups: tuple[Group | None, ...]
    problems: dict[int, str]


def fetch_share(
    broker: TrainerBroker,
    deliveries: Sequence[Delivery],
    ranks: Ranks,
    route_shape: RouteShape | None,
    vocabulary: int | None = None,
) -> Share:
    """Fetch and check the groups of this data-parallel rank, balanced over ranks by tokens.

    vocabulary: of the model; a token id outside it would end the trainer, and again after each restart.
    """
    own = balance([d.total_tokens for d in deliveries], ranks.data_size)[ranks.data_rank]
    ids = [deliveries[i].group_id for i in own]
    groups: list[Group | None] = []
    problems: dict[int, str] = {}
    try:
        groups.extend(broker.fetch(ids))
    except BrokerUnavailable:
        raise
    except BrokerError:
        groups = [_fetch_one(broker, group_id, problems) for group_id in ids]
    for index, group in enumerate(groups):
        problem = None if group is None else _problem(group, route_shape, vocabulary)
        if group is not None and problem:
            problems[group.group_id] = problem
            groups[index] = None
    return Share(tuple(own), tuple(groups), problems)


def _fetch_one(broker: TrainerBroker, group_id: int, problems: dict[int, str]) -> Group | None:
    try:
        return broker.fetch([group_id])[0]
    except BrokerUnavailable:
        raise
    except CorruptPayload as error:
        problems[group_id] = error.why
    except BrokerError as error:
        problems[group_id] = str(error)
    return None


def _problem(group: Group, route_shape: RouteShape | None, vocabulary: int | None) -> str | None:
    try:
        check_group(group)
        ids = np.concatenate([part for t in group.trajectories for part in (t.prompt_ids, t.response_ids)])
        if vocabulary is not None and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
            return f"a token id is outside 0 .. {vocabulary - 1}"
        traces = [t.routes for t in group.trajectories if t.routes is not None]
        if route_shape is not None and traces:
            check_traces(traces, route_shape)
    except (InvalidTrajectory, ValueError) as error:
        return str(error)
    return None


def lacks_routes(groups: Sequence[Group]) -> bool:
    """Whether any trajectory comes without a routing trace."""
    return any(t.routes is None for group in groups for t in group.trajectories)


def is_filtered(group: Group) -> bool:
    """Whether the group has no gradient: equal rewards, a single sample, or no trainable token."""
    return all_equal([t.reward for t in group.trajectories]) or group.response_tokens == 0


def samples_of(groups: Sequence[Group], settings: LossSettings, ranks: Ranks) -> list[Sample]:
    """Each trajectory with its advantage, as the loss wants it. Collective if the advantage is normalised by batch.

    DAPO drops groups without a gradient; the others keep them, with advantage zero, in their means.
    """
    advantages: list[Rewards] = [
        group_advantages([t.reward for t in g.trajectories], settings.advantage) for g in groups
    ]
    if settings.advantage == "reinforce++":
        totals = ranks.sum_over_data(torch.from_numpy(sums(advantages))).tolist()
        deviation = batch_deviation(*totals)
        advantages = [a / deviation for a in advantages]
    return [
        Sample(t, np.full(len(t.response_ids), value, np.float32))
        for group, values in zip(groups, advantages, strict=True)
        if not (settings.name == "dapo" and is_filtered(group))
        for t, value in zip(group.trajectories, values, strict=True)
    ]


def micro_batches(
    samples: Sequence[Sample], budget: int, route_shape: RouteShape | None, pad_multiple: int, ranks: Ranks
) -> list[MicroBatch]:
    """Pack this rank's samples; every rank gets the same number of micro-batches. Collective."""
    parts = plan(samples, budget, most_over_ranks(ranks))
    return [
        pack([samples[i] for i in part], route_shape=route_shape, pad_multiple=pad_multiple, numbers=part)
        for part in parts
    ]


def most_over_ranks(ranks: Ranks) -> Callable[[int], int]:
    """The largest of one number per data-parallel rank, by a sum of one-hot rows."""

    def most(own: int) -> int:
        row = torch.zeros(ranks.data_size, dtype=torch.int64)
        row[ranks.data_rank] = own
        return int(ranks.sum_over_data(row).max())

    return most


def tokens_by_version(groups: Iterable[Group]) -> dict[int, int]:
    """Trainable tokens by the version that sampled them."""
    out: Counter[int] = Counter()
    for group in groups:
        for t in group.trajectories:
            for run in t.versions:
                out[run.version] += int(np.count_nonzero(t.loss_mask[run.start : run.start + run.length]))
    return out


def tokens_by_lag(groups: Sequence[Group], version: int, size: int) -> torch.Tensor:
    """int64 [size]: trainable tokens of groups with a gradient by lag; lags beyond count in the last."""
    out = torch.zeros(size, dtype=torch.int64)
    for sampled, tokens in tokens_by_version(g for g in groups if not is_filtered(g)).items():
        out[min(max(version - sampled, 0), size - 1)] += tokens
    return out


def tokens_beyond(groups: Sequence[Group], version: int, max_lag: int) -> int:
    """Trainable tokens that invariant 1 forbids to train: lag above the bound, or sampled by a version yet to come."""
    found = tokens_by_version(groups)
    return sum(tokens for sampled, tokens in found.items() if not 0 <= version - sampled <= max_lag)


def reward_sums(groups: Sequence[Group]) -> torch.Tensor:
    """float64 [4]: samples, rewards, squared rewards, response tokens (trainable or not)."""
    rewards = np.array([t.reward for g in groups for t in g.trajectories], np.float64)
    lengths = sum(len(t.response_ids) for g in groups for t in g.trajectories)
    return torch.tensor([len(rewards), rewards.sum(), (rewards**2).sum(), lengths], dtype=torch.float64)
