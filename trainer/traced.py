"""A step's spans in the traces of the groups that it trained.

Invariant: all ranks learn the groups' contexts together or none does (traces.endpoint is the same for all); the main
rank writes the spans, after the step is recorded, of what was measured anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from broker.traces import Traces
from broker.traces.port import TRACEPARENT_BYTES, Value
from broker.types import Group
from trainer.chooser import Choice
from trainer.data import Share
from trainer.quantile import SumCounts


@dataclass(frozen=True, slots=True)
class Step:
    """What was done. version: that it made. published: that version if it goes to the engines, else -1. seconds: by
    part, as in the step's record. fetched_ns, ended_ns: since the epoch."""

    step: int
    version: int
    published: int
    epoch: int
    seconds: Mapping[str, float]
    fetched_ns: int
    ended_ns: int


def contexts_of(choice: Choice, share: Share, groups: Sequence[Group], sum_over: SumCounts) -> list[str]:
    """The traceparent of each group of the batch, "" where there is none. Collective over data-parallel ranks."""
    rows = torch.zeros(len(choice.deliveries), TRACEPARENT_BYTES, dtype=torch.int64)
    for index, group in zip(share.indexes, groups, strict=True):
        if len(group.trace) == TRACEPARENT_BYTES and group.trace.isascii():
            rows[index] = torch.tensor(list(group.trace.encode()))
    return [bytes(row).decode().rstrip("\0") for row in sum_over(rows).tolist()]


def write_spans(traces: Traces, contexts: Sequence[str], choice: Choice, filtered: Sequence[bool], step: Step) -> None:
    """Spans `queue` (on the clock of Redis), `fetch` and `step` below each group's own."""
    pulled_ns = step.fetched_ns - int(1e9 * step.seconds["fetch_s"])
    facts: dict[str, Value] = {"step": step.step, "version": step.version, "epoch": step.epoch}
    facts |= {"published": step.published, **step.seconds}
    for context, delivery, alike in zip(contexts, choice.deliveries, filtered, strict=True):
        if not context:
            continue
        waited = traces.resume(context, "queue", began_ns=delivery.submitted_ms * 1_000_000)
        waited.end(ended_ns=choice.now_ms * 1_000_000)
        traces.resume(context, "fetch", began_ns=pulled_ns, bytes=delivery.payload_bytes).end(ended_ns=step.fetched_ns)
        lag = step.version - 1 - delivery.oldest_version
        trained = traces.resume(context, "step", began_ns=step.fetched_ns, lag=lag, filtered=alike, **facts)
        trained.end(ended_ns=step.ended_ns)
