"""Small builders for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from broker.types import Group, Trajectory, VersionRun, check_group
from configs.schema import LossSection
from trainer.batch import MicroBatch, Sample, pack
from trainer.losses.catalogue import LossSettings, resolve
from trainer.losses.step import loss_function, prepare


def given(*arguments: SearchStrategy[Any], **named: SearchStrategy[Any]) -> Callable[[Any], Any]:
    """hypothesis.given with few examples and no deadline: the machines that run this are small and busy."""

    def decorate(test: Any) -> Any:
        return hypothesis.settings(max_examples=40, deadline=None)(hypothesis.given(*arguments, **named)(test))

    return decorate


def trajectory(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    log_probs: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
    versions: Sequence[tuple[int, int, int]] | None = None,
    reward: float = 0.0,
    routes: np.ndarray | None = None,
) -> Trajectory:
    n = len(response)
    return Trajectory(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        log_probs=np.array([-1.0] * n if log_probs is None else log_probs, np.float32),
        loss_mask=np.array([True] * n if mask is None else mask, np.bool_),
        versions=tuple(VersionRun(*v) for v in (versions or [(0, n, 0)])),
        reward=reward,
        finish="stop",
        routes=routes,
    )


def group(group_id: int, trajectories: Sequence[Trajectory], *, run: str = "r") -> Group:
    made = Group(
        run=run,
        group_id=group_id,
        prompt_index=group_id,
        attempt=0,
        task="t",
        worker="w",
        engine="e",
        samples_wanted=len(trajectories),
        generation_seconds=0.1,
        trajectories=tuple(trajectories),
    )
    check_group(made)
    return made


def sample(t: Trajectory, advantage: float | Sequence[float] = 0.0) -> Sample:
    return Sample(
        t,
        np.full(len(t.response_ids), advantage, np.float32)
        if np.isscalar(advantage)
        else np.array(advantage, np.float32),
    )


def flat_batch(
    behaviour: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    mask: Sequence[Sequence[bool]] | None = None,
    *,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
) -> MicroBatch:
    """Rows given directly: one list per sequence, every position predicts a response token."""
    lengths = [len(b) for b in behaviour]
    total = sum(lengths) + padding
    flat_mask = [m for row in (mask or [[True] * n for n in lengths]) for m in row] + [False] * padding
    index = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    return MicroBatch(
        token_ids=torch.zeros(total, dtype=torch.int64),
        position_ids=torch.zeros(total, dtype=torch.int64),
        sequence_starts=torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32),
        labels=torch.zeros(total, dtype=torch.int64),
        loss_mask=torch.tensor(flat_mask, dtype=torch.bool),
        behaviour_log_probs=torch.tensor([x for row in behaviour for x in row] + [0.0] * padding, dtype=dtype),
        advantages=torch.tensor([x for row in advantages for x in row] + [0.0] * padding, dtype=dtype),
        versions=torch.zeros(total, dtype=torch.int32),
        sequence_index=torch.tensor(index, dtype=torch.int64),
    )


def settings(name: str, **values: object) -> LossSettings:
    return resolve(LossSection(name=name, **values), max_new_tokens=10)


def packed(samples: Sequence[Sample], **options: Any) -> MicroBatch:
    return pack(samples, **{"route_shape": None, **options})


def step_loss(
    chosen: LossSettings, batches: Sequence[MicroBatch], log_probs: Sequence[Tensor], **options: Any
) -> tuple[float, list[Tensor], list[dict[str, Tensor]]]:
    """Loss of a whole step, gradient by log-prob of each micro-batch, and the reports."""
    leaves = [x.detach().clone().requires_grad_() for x in log_probs]
    context = prepare(chosen, batches, [x.detach() for x in leaves] if chosen.needs_log_prob_pass else None, **options)
    evaluate = loss_function(chosen, context)
    gradients, reports, total = [], [], 0.0
    for batch, leaf in zip(batches, leaves, strict=True):
        loss, report = evaluate(batch, leaf, torch.ones(batch.tokens))
        loss.backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        total += float(loss.detach())
        reports.append(report)
    return total, gradients, reports


@dataclass(frozen=True, slots=True)
class OneRank:
    """`Ranks` of a trainer that is one process."""

    rank: int = 0
    data_rank: int = 0
    data_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_main: bool = True

    def sum_over_data(self, values: Tensor) -> Tensor:
        """`values`, unchanged."""
        return values

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """`payload`, which must be given."""
        assert payload is not None
        return payload

    def barrier(self) -> None:
        """Returns at once."""


def padding_share(micro_batches: Sequence[MicroBatch]) -> float:
    """Share of all positions that are padding, in [0, 1]."""
    total = sum(m.tokens for m in micro_batches)
    padding = sum(int((m.sequence_index < 0).sum()) for m in micro_batches)
    return padding / total if total else 0.0
