"""Packed micro-batches: trajectories become flat token rows.

Invariant: position t of a packed row predicts `labels[t]`, the next token of the same sequence, and everything that
belongs to a response token (its behaviour log-prob, advantage, version and mask) lies at the position that predicts it:
response token j of a prompt of p tokens lies at p + j - 1. No sequence is cut, every rank gets the same number of
micro-batches, and padding never carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broker.types import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One packed row of T tokens, S segments (the last may be padding).

    token_ids: int64 [T]. position_ids: int64 [T], from 0 in each segment. sequence_starts: int32 [S + 1], first and one
    past the last token of each segment; covers all T tokens, padding is a segment of its own. labels: int64 [T], the
    token that follows; 0 at a sequence's last position and in padding. loss_mask: bool [T], position t predicts a
    trainable response token. behaviour_log_probs: float32 [T], the engine's log-prob of labels[t]; 0 outside
    responses. advantages: float32 [T]. versions: int32 [T], the version that sampled labels[t]; -1 outside responses.
    sequence_index: int64 [T], from 0 in this micro-batch; -1 for padding. routes: int32 [T, layers, top_k] expert ids,
    or None. routes_valid: bool [T], rows that the engine reported; rows of last tokens and padding are spread.
    """

    token_ids: Tensor
    position_ids: Tensor
    sequence_starts: Tensor
    labels: Tensor
    loss_mask: Tensor
    behaviour_log_probs: Tensor
    advantages: Tensor
    versions: Tensor
    sequence_index: Tensor
    routes: Tensor | None
    routes_valid: Tensor

    @property
    def tokens(self) -> int:
        """T, padding included."""
        return int(self.token_ids.shape[0])

    @property
    def sequences(self) -> int:
        """Sequences in the row, padding not counted."""
        return int(self.sequence_index.max().item()) + 1 if self.tokens else 0

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same row with all tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device) for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trajectory with the advantage of each of its response tokens (float32 [response])."""

    trajectory: Trajectory
    advantages: np.ndarray[Any, np.dtype[np.float32]]


def balance(weights: Sequence[int], bins: int) -> list[list[int]]:
    """Split items over `bins` so that the largest bin is small: longest processing time first (Graham 1969).

    weights: cost of each item. Returns the item indexes of each bin, ascending; ties go to the lower index, so that the
    answer is the same on every rank. Within 4/3 of the best possible largest bin.
    """
    loads = [0] * bins
    members: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        target = min(range(bins), key=lambda b: (loads[b], len(members[b]), b))
        loads[target] += weights[item]
        members[target].append(item)
    return [sorted(m) for m in members]


def first_fit(weights: Sequence[int], budget: int) -> list[list[int]]:
    """Fewest bins of at most `budget` by first-fit decreasing; an item above the budget gets a bin of its own."""
    loads: list[int] = []
    members: list[list[int]] = []
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        fitting = (b for b, load in enumerate(loads) if load + weights[item] <= budget)
        target = next(fitting, len(loads))
        if target == len(loads):
            loads.append(0)
            members.append([])
        loads[target] += weights[item]
        members[target].append(item)
    return [sorted(m) for m in members]


def plan(
    samples: Sequence[Sample], budget: int, at_least: Callable[[int], int] = lambda count: count
) -> list[list[int]]:
    """Which samples share a micro-batch on this rank.

    budget: tokens of one micro-batch; a longer sample gets one of its own. at_least: takes this rank's number of
    micro-batches and returns the largest over all ranks (an all-reduce); the identity on one rank. Samples with and
    without a routing trace never share a micro-batch. Some of the lists may be empty. Balanced within the budget.
    """
    routed = [i for i, s in enumerate(samples) if s.trajectory.routes is not None]
    bare = [i for i, s in enumerate(samples) if s.trajectory.routes is None]
    bins: list[list[int]] = []
    for kind in (routed, bare):
        weights = [samples[i].trajectory.tokens for i in kind]
        fitted = first_fit(weights, budget)
        even = balance(weights, len(fitted)) if fitted else []
        fits = all(sum(weights[i] for i in b) <= budget or len(b) == 1 for b in even)
        bins.extend([kind[i] for i in b] for b in (even if fits else fitted))
    bins.extend([] for _ in range(max(1, at_least(len(bins))) - len(bins)))
    return bins


def pack(samples: Sequence[Sample], *, pad_multiple: int = 1, route_shape: tuple[int, int, int] | None) -> MicroBatch:
    """Lay samples one after another in a row.

    pad_multiple: T is rounded up to a multiple of it (tensor-parallel size under sequence parallelism); an empty list
    gives one of `pad_multiple` padding tokens. route_shape: (layers, top_k, experts) of the model; None when no routes
    are replayed. Raises ValueError if a trace does not fit the model or names an expert twice or beyond the last.
    """
    total = sum(s.trajectory.tokens for s in samples)
    padded = max(-(-total // pad_multiple), 1) * pad_multiple
    token_ids = np.zeros(padded, np.int64)
    position_ids = np.zeros(padded, np.int64)
    labels = np.zeros(padded, np.int64)
    loss_mask = np.zeros(padded, np.bool_)
    behaviour = np.zeros(padded, np.float32)
    advantages = np.zeros(padded, np.float32)
    versions = np.full(padded, -1, np.int32)
    sequence_index = np.full(padded, -1, np.int64)
    routes_valid = np.zeros(padded, np.bool_)
    replay = route_shape is not None and all(s.trajectory.routes is not None for s in samples)
    routes = spread_routes(padded, route_shape) if replay and route_shape is not None else None
    starts, at = [0], 0
    for index, sample in enumerate(samples):
        t = sample.trajectory
        prompt, end = len(t.prompt_ids), at + t.tokens
        token_ids[at : at + prompt] = t.prompt_ids
        token_ids[at + prompt : end] = t.response_ids
        position_ids[at:end] = np.arange(t.tokens)
        labels[at : end - 1] = token_ids[at + 1 : end]
        predicts = slice(at + prompt - 1, end - 1)
        loss_mask[predicts] = t.loss_mask
        behaviour[predicts] = t.log_probs
        advantages[predicts] = sample.advantages
        versions[predicts] = t.token_versions()
        sequence_index[at:end] = index
        if routes is not None and route_shape is not None:
            assert t.routes is not None
            check_routes(t.routes, route_shape)
            routes[at : end - 1] = t.routes
            routes_valid[at : end - 1] = True
        starts.append(end)
        at = end
    if at < padded:
        position_ids[at:] = np.arange(padded - at)
        starts.append(padded)
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(position_ids),
        sequence_starts=torch.tensor(starts, dtype=torch.int32),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        behaviour_log_probs=torch.from_numpy(behaviour),
        advantages=torch.from_numpy(advantages),
        versions=torch.from_numpy(versions),
        sequence_index=torch.from_numpy(sequence_index),
        routes=None if routes is None else torch.from_numpy(routes),
        routes_valid=torch.from_numpy(routes_valid),
    )


def spread_routes(rows: int, shape: tuple[int, int, int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 [rows, layers, top_k]: distinct experts in each row, consecutive rows on different ones.

    shape: (layers, top_k, experts). For rows that no engine routed: all on one expert would unbalance the dispatcher.
    """
    layers, top_k, experts = shape
    row = np.arange(rows, dtype=np.int32)[:, None] * top_k + np.arange(top_k, dtype=np.int32)[None, :]
    return np.repeat((row % experts)[:, None, :], layers, axis=1).astype(np.int32)


def check_routes(routes: np.ndarray[Any, Any], shape: tuple[int, int, int]) -> None:
    """Raise ValueError unless routes [rows, layers, top_k] fit (layers, top_k, experts) with distinct experts a row."""
    layers, top_k, experts = shape
    if routes.shape[1:] != (layers, top_k):
        raise ValueError(f"routes are {list(routes.shape)}, the model has {layers} layers and {top_k} experts a token")
    if routes.size and int(routes.max()) >= experts:
        raise ValueError(f"routes name expert {int(routes.max())}, the model has {experts}")
    ordered = np.sort(routes, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("routes name the same expert twice for one token")


def padding_share(micro_batches: Sequence[MicroBatch]) -> float:
    """Share of all positions that are padding, in [0, 1]."""
    total = sum(m.tokens for m in micro_batches)
    padding = sum(int((m.sequence_index < 0).sum()) for m in micro_batches)
    return padding / total if total else 0.0
