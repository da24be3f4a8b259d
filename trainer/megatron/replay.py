"""Routing replay: each trained token goes to the experts that the engine sent it to.

Invariants: a trace reaches megatron only after it was checked (its dispatchers accept wrong experts silently); the
backward pass, and layers recomputed in it, use the experts of their own micro-batch's forward pass under any schedule;
nothing of one step is left for the next.

megatron's router asks `router.router_replay.get_replay_topk` for the experts (moe_utils.py:831). Its own RouterReplay
keeps a process-wide list of routers and replays all rows or none; `LayerReplay` takes its place at that one seam and
adds rows that keep their own routing. The phases are the same: forward, then backward for everything that is recomputed
until the next forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainer.batch import MicroBatch


class InvalidRoutes(ValueError):
    """A routing trace that does not fit the model or the micro-batch; the message names row, layer and value."""


class Source(Enum):
    """Where the experts of a row come from."""

    OWN = 0  # the live router
    TRACE = 1  # the engine's trace
    SPREAD = 2  # evenly spread: nothing that is trained depends on the row


@dataclass(frozen=True, slots=True, eq=False)
class RoutePlan:
    """What each row of a micro-batch does.

    experts: int64 [T, moe layers, top_k]. source: int64 [T], values of `Source`.
    """

    experts: Tensor
    source: Tensor


def plan_routes(
    batch: MicroBatch,
    rows: int,
    *,
    experts: int,
    top_k: int,
    moe_layers: Sequence[bool],
    mode: str,
    device: torch.device | str = "cpu",
) -> RoutePlan:
    """Check a micro-batch's trace and lay it out on `device` for `rows`, at least T (the rest is padding).

    batch: on the CPU. mode: "required" (a row that needs a trace and has none is an error), "available" (it keeps its
    own routing) or "off" (all do). The last token of a traced sequence has no trace and needs none: no later token
    attends to it and its own output is not trained; it and padding are spread. Raises InvalidRoutes.
    """
    layers = sum(moe_layers)
    spread = torch.arange(rows, device=device)[:, None] * top_k + torch.arange(top_k, device=device)
    plan = (spread % experts)[:, None].repeat(1, layers, 1)
    source = torch.full((rows,), Source.SPREAD.value, dtype=torch.int64)
    starts = batch.sequence_starts.tolist()
    if mode == "off" or batch.routes is None or batch.routes_valid is None:
        source[: starts[-1]] = Source.OWN.value
        if mode == "required" and starts[-1]:
            raise InvalidRoutes("the micro-batch has no routing trace, and trainer.routing_replay is required")
        return RoutePlan(plan, source.to(device))
    trace = _moe_part(batch.routes, moe_layers)
    valid = batch.routes_valid
    if trace.shape[0] != batch.tokens or valid.shape[0] != batch.tokens or trace.shape[2] != top_k:
        raise InvalidRoutes(
            f"routes are {list(batch.routes.shape)} for {batch.tokens} tokens and a top_k of {top_k}; "
            f"routes_valid is {list(valid.shape)}"
        )
    used = torch.zeros(rows, dtype=torch.bool)
    used[: starts[-1]] = valid[: starts[-1]]
    given = used.to(device)
    plan[given] = trace.to(device)[given[: batch.tokens]].to(torch.int64)
    _check(plan, given, experts)
    source[used] = Source.TRACE.value
    needs = torch.zeros(rows, dtype=torch.bool)
    needs[: starts[-1]] = ~valid[: starts[-1]]
    for start, end in pairwise(starts):
        if end - start and (end - start == 1 or bool(used[start : end - 1].all())):
            needs[end - 1] = False
    if mode == "required" and bool(needs.any()):
        raise InvalidRoutes(
            f"row {int(needs.nonzero()[0])} has no routing trace, and trainer.routing_replay is required"
        )
    source[needs] = Source.OWN.value
    return RoutePlan(plan, source.to(device))


def _moe_part(routes: Tensor, moe_layers: Sequence[bool]) -> Tensor:
    if routes.ndim == 3 and routes.shape[1] == len(moe_layers):
        return routes[:, [i for i, moe in enumerate(moe_layers) if moe]] if not all(moe_layers) else routes
    if routes.ndim == 3 and routes.shape[1] == sum(moe_layers):
        return routes
    raise InvalidRoutes(f"routes are {list(routes.shape)}: expected [tokens, {len(moe_layers)} layers, top_k]")


def _check(plan: Tensor, used: Tensor, experts: int) -> None:
    wrong = ((plan < 0) | (plan >= experts)) & used[:, None, None]
    if bool(wrong.any()):
        row, layer, slot = wrong.nonzero()[0].tolist()
        raise InvalidRoutes(f"row {row}, layer {layer}: expert {int(plan[row, layer, slot])} of {experts}")
    ordered = plan.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & used[:, None]
    if bool(twice.any()):
        row, layer = twice.nonzero()[0].tolist()
        raise InvalidRoutes(f"row {row}, layer {layer}: experts {plan[row, layer].tolist()} are not distinct")


class LayerReplay:
    """Stands in for megatron's RouterReplay in one router."""

    def __init__(self) -> None:
        self.target: Tensor | None = None  # int64 [rows, top_k]
        self.own: Tensor | None = None  # bool [rows, 1]; None: no row keeps its own routing
        self.keep = False  # remember the experts for a recomputation
        self.measured: Tensor | None = None  # bool [rows]: rows that count for the overlap; None: do not measure
        self.agreed: Tensor | None = None  # float64 scalar: sum over measured rows of the share of the live top-k
        self.kept: deque[Tensor] = deque()
        self.backward = False

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores of the experts [rows, top_k], experts int64 [rows, top_k]); scores: [rows, experts]."""
        if default_compute_topk is None:
            raise TypeError("megatron's router gave no top-k function")
        if self.backward:
            chosen = self.kept.popleft()
            return scores.gather(1, chosen), chosen
        if self.target is None:
            live_scores, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
            if self.keep:
                self.kept.append(chosen)
            return live_scores, chosen
        if self.target.shape[0] != scores.shape[0]:
            raise InvalidRoutes(f"{self.target.shape[0]} rows of routes for {scores.shape[0]} rows in the router")
        chosen = self.target
        if self.own is not None or self.measured is not None:
            with torch.no_grad():
                live = default_compute_topk(scores, topk, num_groups, group_topk)[1]
                if self.measured is not None:
                    same = (live[:, :, None] == chosen[:, None, :]).any(-1).float().mean(-1)
                    agreed = (same * self.measured).sum(dtype=torch.float64)
                    self.agreed = agreed if self.agreed is None else self.agreed + agreed
                if self.own is not None:
                    chosen = torch.where(self.own, live, chosen)
        if self.keep:
            self.kept.append(chosen)
        return scores.gather(1, chosen), chosen


class RoutingReplay:
    """Replay over the MoE layers of this rank's part of the model.

    routers: megatron's TopKRouter of each MoE layer here, in order, with its place among all MoE layers of the model.
    shard, shards: tensor-parallel rank and size; rows are cut into that many equal parts (sequence parallelism).
    recompute: layers run again in the backward pass.
    """

    def __init__(self, routers: Sequence[tuple[Any, int]], *, shard: int, shards: int, recompute: bool) -> None:
        self._layers = [(LayerReplay(), place) for _, place in routers]
        for (router, _), (layer, _) in zip(routers, self._layers, strict=True):
            router.router_replay = layer
        self._shard, self._shards, self._recompute = shard, shards, recompute
        self.rows = dict.fromkeys(Source, 0)

    def forward(self, plan: RoutePlan, *, training: bool) -> None:
        """The next forward pass is of this plan's micro-batch; training: count it, and expect a backward pass."""
        experts = plan.experts.chunk(self._shards)[self._shard]
        source = plan.source.chunk(self._shards)[self._shard]
        own = source == Source.OWN.value
        traced = source == Source.TRACE.value
        any_own, any_traced = bool(own.any()), bool(traced.any())
        for layer, place in self._layers:
            layer.target = experts[:, place] if any_traced or not bool(own.all()) else None
            layer.own = own[:, None] if any_own else None
            layer.measured = traced if training and any_traced else None
            layer.keep, layer.backward = training and self._recompute, False
        if training:
            for kind in Source:
                self.rows[kind] += int((source == kind.value).sum()) * len(self._layers)

    def forward_done(self) -> None:
        """Any router that runs before the next `forward` is a recomputation."""
        for layer, _ in self._layers:
            layer.backward = self._recompute
            layer.target = layer.own = layer.measured = None

    def finish(self, *, training: bool) -> Tensor:
        """End of a pass over micro-batches: forget all; float64 [4]: rows by Source, and the summed overlap.

        Raises RuntimeError if a kept routing was not used by the backward pass.
        """
        left = sum(len(layer.kept) for layer, _ in self._layers)
        agreed = sum(float(layer.agreed) for layer, _ in self._layers if layer.agreed is not None)
        counts = [float(self.rows[kind]) for kind in Source]
        for layer, _ in self._layers:
            layer.kept.clear()
            layer.backward = layer.keep = False
            layer.agreed = None
        self.rows = dict.fromkeys(Source, 0)
        if training and left:
            raise RuntimeError(f"{left} routings of the forward pass were not replayed in the backward pass")
        return torch.tensor([*counts, agreed], dtype=torch.float64)
