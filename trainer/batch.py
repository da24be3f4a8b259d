"""Packed micro-batches: trajectories become flat token rows.

Invariant: position t of a packed row predicts `labels[t]`, the next token of the same sequence, and everything that
belongs to a response token (its behaviour log-prob, advantage, version and mask) lies at the position that predicts it:
response token j of a prompt of p tokens lies at p + j - 1. No sequence is cut, every rank gets the same number of
micro-batches, and padding never carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from broker.types import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some sequences, one after the other, in T rows.

    token_ids: int64 [T]. position_ids: int64 [T], from 0 in each sequence. sequence_starts: int32 [S + 1]; sequence s
    is rows [sequence_starts[s], sequence_starts[s + 1]); rows from sequence_starts[S] on are padding. labels: int64
    [T], the next token of the sequence, 0 where there is none. loss_mask: bool [T], True where labels[t] is a trainable
    response token. behaviour_log_probs: float32 [T], the engine's log-prob of labels[t], 0 elsewhere. advantages:
    float32 [T]. versions: int32 [T], the version that sampled labels[t], -1 elsewhere. sequence_index: int64 [T],
    numbers sequences over this rank's step; -1 for padding. routes: uint8 (int16 from 257 experts) [T, layers, top_k],
    or None; routes_valid: bool [T], rows of `routes` that hold a trace (None exactly when routes is None).
    reference_log_probs: float32 [T], the reference model's log-prob of labels[t]; None where no loss asks for it. T may
    be 0.
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
    routes: Tensor | None = None
    routes_valid: Tensor | None = None
    reference_log_probs: Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, the number of rows, padding included."""
        return int(self.token_ids.shape[0])

    @property
    def sequences(self) -> int:
        """S, the number of sequences."""
        return int(self.sequence_starts.shape[0]) - 1

    def segments(self) -> Tensor:
        """int64 [T]: index of each row's sequence within this micro-batch; S for padding."""
        starts = self.sequence_starts.to(torch.int64)
        lengths = torch.cat([starts[1:] - starts[:-1], (self.tokens - starts[-1:])])
        ids = torch.arange(self.sequences + 1, device=starts.device)
        return torch.repeat_interleave(ids, lengths, output_size=self.tokens)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same rows with all tensors on `device`."""
        moved: dict[str, Any] = {f.name: v.to(device) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return replace(self, **moved)


class RouteShape(NamedTuple):
    """What a routing trace must fit. layers: of the model. moe: which of them route tokens; empty: all do.

    A trace comes with all layers, of which the dense ones hold anything, or with the routing ones alone.
    """

    layers: int
    top_k: int
    experts: int
    moe: tuple[bool, ...] = ()

    @property
    def routing(self) -> list[int]:
        """The layers that route tokens."""
        return [i for i in range(self.layers) if not self.moe or self.moe[i]]


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
    micro-batches and returns the largest over all ranks (an all-reduce); the identity on one rank. Some of the lists
    may be empty: every rank gets the same number, at least one.
    """
    weights = [s.trajectory.tokens for s in samples]
    fitted = first_fit(weights, budget)
    even = balance(weights, len(fitted)) if fitted else []
    bins = even if all(sum(weights[i] for i in b) <= budget or len(b) == 1 for b in even) else fitted
    return bins + [[] for _ in range(max(1, at_least(len(bins))) - len(bins))]


def pack(
    samples: Sequence[Sample],
    *,
    route_shape: RouteShape | None,
    pad_multiple: int = 1,
    numbers: Sequence[int] | None = None,
) -> MicroBatch:
    """Lay samples one after another.

    route_shape: of the model; None when no routes are replayed. pad_multiple: T is rounded up
    to a multiple of it. numbers: sequence_index of each sample; default 0, 1, ... Raises ValueError if a trace does not
    fit the model, or names an expert twice for a token or beyond the last.
    """
    trajectories = [s.trajectory for s in samples]
    lengths = np.array([t.tokens for t in trajectories], np.int64)
    responses = np.array([len(t.response_ids) for t in trajectories], np.int64)
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    padded = -(-total // pad_multiple) * pad_multiple
    # Response token j of a sequence that ends at e lies at e - response + j, and is predicted one row before.
    predicts = np.repeat(ends - np.cumsum(responses) - 1, responses) + np.arange(responses.sum())

    def laid(rows: Any, parts: Sequence[np.ndarray[Any, Any]], fill: float, dtype: type[np.generic]) -> Tensor:
        out = np.full(padded, fill, dtype)
        if parts:
            out[rows] = np.concatenate(parts)
        return torch.from_numpy(out)

    token_ids = laid(slice(total), [part for t in trajectories for part in (t.prompt_ids, t.response_ids)], 0, np.int64)
    labels = torch.zeros_like(token_ids)
    labels[: max(total - 1, 0)] = token_ids[1:total]
    labels[ends - 1] = 0
    routes, routes_valid = _lay_routes(trajectories, ends, padded, route_shape)
    return MicroBatch(
        token_ids=token_ids,
        position_ids=torch.from_numpy(
            np.arange(padded) - np.repeat([*(ends - lengths), total], [*lengths, padded - total])
        ),
        sequence_starts=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        labels=labels,
        loss_mask=laid(predicts, [t.loss_mask for t in trajectories], False, np.bool_),
        behaviour_log_probs=laid(predicts, [t.log_probs for t in trajectories], 0, np.float32),
        advantages=laid(predicts, [s.advantages for s in samples], 0, np.float32),
        versions=laid(predicts, [t.token_versions() for t in trajectories], -1, np.int32),
        sequence_index=laid(
            slice(total), [np.repeat(np.arange(len(samples)) if numbers is None else numbers, lengths)], -1, np.int64
        ),
        routes=routes,
        routes_valid=routes_valid,
    )


def _lay_routes(
    trajectories: Sequence[Trajectory], ends: np.ndarray[Any, Any], rows: int, shape: RouteShape | None
) -> tuple[Tensor | None, Tensor | None]:
    """`routes` and `routes_valid` of a micro-batch: each trace on the rows of all tokens but its sequence's last."""
    traced = [(t, int(end)) for t, end in zip(trajectories, ends, strict=True) if t.routes is not None]
    if shape is None or not traced:
        return None, None
    valid = np.zeros(rows, np.bool_)
    for t, end in traced:
        valid[end - t.tokens : end - 1] = True
    routes = spread_routes(rows, shape)
    routes[valid.nonzero()[0][:, None], shape.routing] = check_traces([t.routes for t, _ in traced], shape)
    return torch.from_numpy(routes), torch.from_numpy(valid)


def spread_routes(rows: int, shape: RouteShape) -> np.ndarray[Any, np.dtype[Any]]:
    """uint8, or int16 from 257 experts, [rows, layers, top_k]: distinct experts in each row, consecutive rows on
    different ones.

    For rows that no engine routed: all on one expert would unbalance the dispatcher. The routes of a step are the
    largest part of it in memory, so they take no more bytes than they need.
    """
    row = np.arange(rows, dtype=np.int32)[:, None] * shape.top_k + np.arange(shape.top_k, dtype=np.int32)[None, :]
    small = (row % shape.experts).astype(np.uint8 if shape.experts <= 256 else np.int16)
    return np.repeat(small[:, None, :], shape.layers, axis=1)


def check_routes(routes: np.ndarray[Any, Any], shape: RouteShape) -> np.ndarray[Any, Any]:
    """The part of a trace [rows, layers, top_k] that belongs to routing layers, [rows, routing layers, top_k].

    Raises ValueError unless it fits the shape and names distinct experts for each token; dense layers hold anything.
    """
    routing = shape.routing
    if routes.ndim != 3 or routes.shape[1] not in (shape.layers, len(routing)) or routes.shape[2] != shape.top_k:
        raise ValueError(
            f"routes are {list(routes.shape)}, the model has {shape.layers} layers ({len(routing)} with experts) and "
            f"{shape.top_k} experts a token"
        )
    part = routes if routes.shape[1] == len(routing) else routes[:, routing]
    if part.size and (int(part.max()) >= shape.experts or int(part.min()) < 0):
        wrong = int(part.max()) if int(part.max()) >= shape.experts else int(part.min())
        raise ValueError(f"routes name expert {wrong}, the model has {shape.experts}")
    ordered = np.sort(part, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("routes name the same expert twice for one token")
    return part


def check_traces(traces: Sequence[Any], shape: RouteShape) -> np.ndarray[Any, Any]:
    """`check_routes` of several traces, whose rows follow one another; all at once where they have one form."""
    if len({trace.shape[1:] for trace in traces}) == 1:
        return check_routes(np.concatenate(traces), shape)
    return np.concatenate([check_routes(trace, shape) for trace in traces])
