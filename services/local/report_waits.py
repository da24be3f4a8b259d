"""Who waited in a run, by whose fault, and what restarts of its trainer cost: words and figures of the report.

Invariant: pure; what was waited for before the first step of a session, while its engines started, is in no figure, and
a share of the workers' time has that time below it: both come from the workers' own heartbeats.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from broker.types import Snapshot
from services.local.charts import share_bar
from services.local.metrics import Record
from services.monitor.diagnosis import Bands
from services.monitor.figures import Side, admission_waits, number, wait_share
from services.monitor.figures import slow_side as side_of

MUCH = Bands().wait_share
REASONS = {
    "bound": "at the lag bound, for the trainer",
    "memory": "payloads fill their limit",
    "engine": "for an engine that serves",
    "prompt": "after prompts that failed at once",
    "no-trainer": "for a version to sample with",
    "paused": "admission was paused",
    "unavailable": "for Redis",
}

SIDES = {
    Side.BOTH_WAIT: "Both sides wait: rollouts last longer than the bound allows for. A higher lag.max overlaps them.",
    Side.SAMPLING_IS_SLOW: "Sampling is the slow side: more engines would help, a higher lag.max would not.",
    Side.TRAINING_IS_SLOW: "The trainer is the slow side: a higher lag.max would only make the data older.",
    Side.NEITHER_WAITS: "Neither side waits much for the other.",
}


def waits_since(first: Snapshot | None, last: Snapshot) -> dict[str, Any]:
    """What ledger.json keeps of the waits between a session's first step and its end; {} if it had no step.

    since_step: the step of `first`. worker_s: time of all workers together, in seconds. by_reason: of it, the time
    that they waited for leave to start a group.
    """
    if first is None:
        return {}
    watched, waited = admission_waits(last, first)
    return {"since_step": first.step, "worker_s": watched, "by_reason": waited}


def table(records: Sequence[Record], waits: Mapping[str, Any]) -> str:
    """The rows: the trainer, and the workers by reason. waits: of waits_since, {} while a run goes on."""
    steps = after_first(records, waits)
    rows = [("trainer", "waits for groups", wait_share(steps) or 0.0, sum(number(r, "wait_s") or 0.0 for r in steps))]
    if whole := float(waits.get("worker_s", 0.0)):
        spent = {"bound": 0.0, **waits["by_reason"]}
        shown = (name for name in (*REASONS, *sorted(spent.keys() - REASONS.keys())) if name in spent)
        rows += [("workers", REASONS.get(name, name), spent[name] / whole, spent[name]) for name in shown]
    cells = "".join(
        f"<tr><th>{who}<small>{html.escape(what)}</small></th><td>{share_bar(share, who)}</td>"
        f"<td>{share:.0%}</td><td>{seconds:,.1f} s</td></tr>"
        for who, what, share, seconds in rows
    )
    return f'<table class="waits">{cells}</table>'


def after_first(records: Sequence[Record], waits: Mapping[str, Any]) -> Sequence[Record]:
    """The steps whose waits count: those after the first of the last session, or of the run if that is not known."""
    first = waits.get("since_step", records[0]["step"] if records else 0)
    return [record for record in records if record["step"] > first]


def slow_side(records: Sequence[Record], waits: Mapping[str, Any]) -> str:
    """Which side the other waits for, in a sentence. The lag bound's share of the workers' time alone says that it is
    the trainer: what they wait for engines or memory says nothing of it."""
    trainer = wait_share(after_first(records, waits))
    if trainer is None or not waits.get("worker_s"):
        return "How long workers waited is known once the run has ended."
    bound = waits["by_reason"].get("bound", 0.0) / waits["worker_s"]
    return SIDES[side_of(trainer, bound, MUCH)]


def restarts(counters: Mapping[str, float]) -> str:
    """How often the trainer started again, and what went stale and when that was found, in sentences."""
    count = {name: int(counters.get(name, 0)) for name in ("attachments", "groups_rolled_back")}
    again = max(0, count["attachments"] - 1)
    told = "The trainer was never started again."
    if again:
        times = "once" if again == 1 else f"{again} times"
        told = f"The trainer was started again {times} (attachments); groups it had to take back: "
        told += f"{count['groups_rolled_back']:,}."
    attach, pull, submit = (int(counters.get(f"stale_at_{when}", 0)) for when in ("attach", "pull", "submit"))
    if attach or pull or submit:
        told += f" Groups that were past the bound: {attach:,} when it started again, {pull:,} when it pulled, "
        told += f"{submit:,} when they were submitted."
    return told
