"""One verdict in words on how the run goes, with the figures it comes from and what to change.

Pure: a snapshot, an earlier one and the last step records go in. The first finding that applies is the verdict, in the
order of `Verdict`: what endangers learning comes before what only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from pydantic import BaseModel, Field

from broker.types import EngineState, Snapshot
from services.monitor.figures import (
    HELD_BACK,
    Side,
    admission_wait_share,
    capacity,
    dropped_share,
    failed_share,
    filtered_share,
    in_flight,
    living_workers,
    mean,
    number,
    restart_stale_share,
    settled,
    slow_side,
    stale_share,
    unrewarded,
    unrewarded_share,
    wait_share,
)

Records = Sequence[Mapping[str, object]]
RECENT_STEPS = 20
ENOUGH_STEPS = 10
"""With fewer steps since the trainer's first (figures.settled), its waits say nothing of who is the slow side."""
ENOUGH_S = 10.0
"""Over less, the workers' waits say nothing of it."""


class Verdict(StrEnum):
    """What the run suffers from."""

    UNSTABLE = "unstable"
    FAILING = "failing"
    UNREWARDED = "unrewarded"
    NO_GRADIENT = "no-gradient"
    SYNC_BOUND = "sync-bound"
    STALE = "stale"
    STARVED = "starved"
    SATURATED = "saturated"
    HEALTHY = "healthy"
    NOT_RUNNING = "not-running"


class Bands(BaseModel):
    """Where a figure stops being normal. Shares lie between 0 and 1."""

    wait_share: float = 0.25
    blocked_share: float = 0.5
    engine_wait_share: float = 0.5
    stale_share: float = 0.05
    failed_share: float = 0.5
    unrewarded_share: float = 0.05
    filtered_share: float = 0.9
    behind_published_intervals: float = 2.0
    update_seconds: float = 10.0
    gate_rate: float = 0.5
    log_ratio_abs_mean: float = 0.5
    ess: float = 0.3
    entropy: float = 1e-5


class Finding(BaseModel):
    """One thing that is out of its band."""

    verdict: Verdict
    because: str = Field(examples=["the trainer waits 61 % of its time for groups"])
    change: str = Field(examples=["use about twice as many engines"])


class Diagnosis(BaseModel):
    """The verdict, all findings, and the figures that were looked at (null: not known yet)."""

    verdict: Verdict
    headline: str = Field(
        examples=["starved: the trainer waits 61 % of its time for groups; use about twice as many engines"]
    )
    findings: list[Finding]
    figures: dict[str, float | None]
    bands: Bands


def diagnose(now: Snapshot, before: Snapshot | None, records: Records, bands: Bands | None = None) -> Diagnosis:
    """Diagnose a run. before: a snapshot of about a minute ago, or None. records: of the last steps, newest first; the
    last RECENT_STEPS count."""
    bands = bands or Bands()
    figures = figures_of(now, before, records)
    tests: tuple[Callable[[Snapshot, Mapping[str, float | None], Bands], Finding | None], ...] = (
        _unstable,
        _failing,
        _unrewarded,
        _no_gradient,
        _sync_bound,
        _stale,
        _starved,
        _saturated,
    )
    findings = [finding for test in tests if (finding := test(now, figures, bands)) is not None]
    stands_still = why_no_step_comes(now)
    if stands_still is not None:
        verdict, headline = Verdict.NOT_RUNNING, stands_still
    elif findings:
        verdict = findings[0].verdict
        headline = f"{verdict}: {findings[0].because}; {findings[0].change}"
    else:
        verdict, headline = Verdict.HEALTHY, "healthy: every figure is inside its band"
        if (left := ENOUGH_STEPS - int(figures["steps_settled"] or 0)) > 0:
            headline = f"healthy so far: who waits for whom is told in {left} step{'s' if left > 1 else ''}"
    return Diagnosis(verdict=verdict, headline=headline, findings=findings, figures=figures, bands=bands)


def why_no_step_comes(now: Snapshot) -> str | None:
    """What a run lacks to go on at all, whatever its figures of the last steps say; None: nothing."""
    left_ms = now.counters.get("trainer_lease_left_ms", 0.0)
    ends = in_flight(now) < now.groups_per_step
    lacks = (
        (now.status != "running", f"the run is {now.status}"),
        (left_ms < 0, f"no trainer: its lease ended {-left_ms / 1000:.0f} s ago; its log says why it ended or hangs"),
        (
            all(engine.state is EngineState.GONE for engine in now.engines),
            "the run waits for an engine: a large model takes minutes to load; the engine's log says how far it is",
        ),
        (ends and now.admission_paused, "admission is paused: the events say by whom; POST /v1/resume ends it"),
        (
            ends and not living_workers(now),
            "no rollout worker: none has said for 30 s that it lives; its log says why it ended",
        ),
    )
    return next((words for applies, words in lacks if applies), None)


def figures_of(now: Snapshot, before: Snapshot | None, records: Records) -> dict[str, float | None]:
    """All figures that the verdict looks at; null where nothing is known yet. The trainer's waits are counted from its
    first step on, as in the report."""
    steady = settled(records)[-RECENT_STEPS:]
    records = records[:RECENT_STEPS]
    routable = [engine for engine in now.engines if engine.routable]
    known = {
        key: mean(number(r, key) for r in records)
        for key in ("gate_rate", "log_ratio_abs_mean", "ess", "entropy", "reward_mean")
    }
    nonfinite = [value for r in records if (value := number(r, "nonfinite_fraction")) is not None]
    return {
        "trainer_wait_share": wait_share(steady),
        "steps_settled": float(len(steady)),
        "seconds_watched": (now.time_ms - before.time_ms) / 1000 if before is not None else None,
        "admission_blocked_share": admission_wait_share(now, before, HELD_BACK),
        "bound_wait_share": admission_wait_share(now, before, ["bound"]),
        "memory_wait_share": admission_wait_share(now, before, ["memory"]),
        "engine_wait_share": admission_wait_share(now, before if _served(before) else None, ["engine"]),
        "stale_share": stale_share(now, before),
        "restart_stale_share": restart_stale_share(now, before),
        "failed_share": failed_share(now, before),
        "unrewarded_share": unrewarded_share(now, before),
        "filtered_share": filtered_share(records),
        "dropped_share": dropped_share(now, before),
        "engine_behind_published_max": float(max(now.published - e.version for e in routable)) if routable else None,
        "engines": float(len([e for e in now.engines if e.state is not EngineState.GONE])),
        "engines_routable": float(len(routable)),
        "workers": float(living_workers(now)),
        "groups_in_flight": float(in_flight(now)),
        "groups_in_flight_limit": float(capacity(now)),
        "nonfinite_fraction_max": max(nonfinite, default=None),
        **known,
    }


def _served(before: Snapshot | None) -> bool:
    """Whether an engine had a version by then: the wait for a run's first engine says nothing about updates."""
    return before is not None and any(engine.version >= 0 for engine in before.engines)


def _unstable(_now: Snapshot, f: Mapping[str, float | None], bands: Bands) -> Finding | None:
    out = [
        (_above(f["nonfinite_fraction_max"], 0.0), "some log-ratios are not finite", "look at the saved batch"),
        (
            _above(f["log_ratio_abs_mean"], bands.log_ratio_abs_mean),
            f"mean |log-ratio| is {_short(f['log_ratio_abs_mean'])}",
            "lower trainer.optimizer.learning_rate or lag.max",
        ),
        (
            _above(f["gate_rate"], bands.gate_rate),
            f"SAT gates {_percent(f['gate_rate'])} of the tokens",
            "lower trainer.optimizer.learning_rate or lag.max",
        ),
        (
            _above(bands.ess, f["ess"]),
            f"the effective sample size is {_percent(f['ess'])} of the tokens",
            "lower trainer.optimizer.learning_rate or lag.max",
        ),
        (
            _above(bands.entropy, f["entropy"]),
            f"the policy's entropy is {_short(f['entropy'])}",
            "set trainer.loss.entropy_coefficient",
        ),
    ]
    because, change = [b for hit, b, _ in out if hit], dict.fromkeys(c for hit, _, c in out if hit)
    if not because:
        return None
    return Finding(verdict=Verdict.UNSTABLE, because=", ".join(because), change="; ".join(change))


def _failing(now: Snapshot, f: Mapping[str, float | None], bands: Bands) -> Finding | None:
    if not _above(f["failed_share"], bands.failed_share):
        return None
    because = f"{_percent(f['failed_share'])} of the finished groups failed"
    rewards = _unrewarded(now, f, bands)
    if rewards is not None and _above(f["unrewarded_share"], bands.failed_share):  # which is why
        return Finding(verdict=Verdict.FAILING, because=f"{because}: {rewards.because}", change=rewards.change)
    return Finding(
        verdict=Verdict.FAILING,
        because=because,
        change="`lagrange groups list RUN --state dead` has the reasons, the workers' logs more of them",
    )


def _unrewarded(now: Snapshot, f: Mapping[str, float | None], bands: Bands) -> Finding | None:
    share = f["unrewarded_share"]
    if not _above(share, bands.unrewarded_share):
        return None
    newest = unrewarded(now.workers).newest
    return Finding(
        verdict=Verdict.UNREWARDED,
        because=f"{_percent(share)} of the samples got no reward and are left out (the newest failure: {newest})",
        change="the shown reward is that of the others: let the task's reward return 0 for such answers, or mend it",
    )


def _no_gradient(_now: Snapshot, f: Mapping[str, float | None], bands: Bands) -> Finding | None:
    filtered, dropped = f["filtered_share"], f["dropped_share"]
    if _above(filtered, bands.filtered_share):
        because = f"{_percent(filtered)} of the trained groups have no gradient: their rewards are all equal"
    elif _above(dropped, bands.filtered_share):
        because = f"workers drop {_percent(dropped)} of their groups: their rewards are all equal"
    else:
        return None
    return Finding(
        verdict=Verdict.NO_GRADIENT,
        because=f"{because}, {_short(f['reward_mean'])} on average",
        change="take prompts that some samples solve (task.curriculum), a reward in more steps, or raise "
        "rollout.samples_per_prompt",
    )


LESS_SYNC = "raise weights.publish_interval, or set weights.pause: abort if drains take long"


def _sync_bound(now: Snapshot, f: Mapping[str, float | None], bands: Bands) -> Finding | None:
    out_for_s = [(now.time_ms - e.since_ms) / 1000 for e in now.engines if e.state is not EngineState.GONE]
    if now.published >= 0 and out_for_s and not f["engines_routable"] and min(out_for_s) > bands.update_seconds:
        states = ", ".join(sorted({str(e.state) for e in now.engines}))
        return Finding(
            verdict=Verdict.SYNC_BOUND,
            because=f"no engine is routable ({states})",
            change="the reason is at each engine: `Why` on the page, `detail` in GET /v1/engines",
        )
    behind, allowed = f["engine_behind_published_max"], bands.behind_published_intervals * now.publish_interval
    if behind is not None and behind >= allowed:
        return Finding(
            verdict=Verdict.SYNC_BOUND,
            because=f"an engine is {behind:.0f} versions behind the published one",
            change=LESS_SYNC,
        )
    if _above(f["engine_wait_share"], bands.engine_wait_share):
        return Finding(
            verdict=Verdict.SYNC_BOUND,
            because=f"workers wait {_percent(f['engine_wait_share'])} of their time for an engine that serves",
            change=LESS_SYNC,
        )
    return None


def _stale(now: Snapshot, f: Mapping[str, float | None], bands: Bands) -> Finding | None:
    share = f["stale_share"]
    if not _above(share, bands.stale_share):
        return None
    because = f"{_percent(share)} of the sampled tokens went past the bound of {now.max_lag}"
    change = "raise lag.max, or shorten rollouts (rollout.max_new_tokens) or use fewer engines"
    restart = f["restart_stale_share"] or 0.0
    if restart:
        part = "all" if restart == 1 else _percent(restart)
        because += f", {part} of them as the trainer started again and its versions go on from the highest"
    if not _above((share or 0.0) * (1 - restart), bands.stale_share):
        change = "its log says why it ended; with a lower trainer.checkpoint.interval_steps it costs less"
    return Finding(verdict=Verdict.STALE, because=because, change=change)


def _starved(now: Snapshot, f: Mapping[str, float | None], bands: Bands) -> Finding | None:
    share, held = _settled_wait(f), f["bound_wait_share"]
    if share is None or share <= bands.wait_share:
        return None
    if _above(f["memory_wait_share"], bands.wait_share):
        change = "raise redis.max_memory_mb: memory holds back the next groups while these are sampled"
    elif held is None or _above(ENOUGH_S, f["seconds_watched"]):
        change = f"look again when workers were seen for {ENOUGH_S:.0f} s: what holds them back says what helps"
    elif slow_side(share, held, bands.wait_share) is Side.BOTH_WAIT:
        change = f"raise lag.max above {now.max_lag}: the bound holds back the next groups while these are sampled"
    else:
        change = (
            f"use {more_engines(share)} if there are GPUs or idle cores for them, else raise "
            "rollout.concurrent_groups or shorten responses (rollout.max_new_tokens)"
        )
    because = f"the trainer waits {_percent(share)} of its time for groups"
    return Finding(verdict=Verdict.STARVED, because=because, change=change)


def _settled_wait(f: Mapping[str, float | None]) -> float | None:
    """The trainer's share of waiting; None with fewer than ENOUGH_STEPS."""
    return f["trainer_wait_share"] if (f["steps_settled"] or 0) >= ENOUGH_STEPS else None


def more_engines(share: float) -> str:
    """How many engines to use in place of those that cover 1 - share now, if sampling scales with them.

    The share is too rough for a number, and for more than doubling them before one looks again.
    """
    return f"about {'1.5 times' if share < 0.4 else 'twice'} as many engines"


def _saturated(now: Snapshot, f: Mapping[str, float | None], bands: Bands) -> Finding | None:
    share, wait = f["admission_blocked_share"], _settled_wait(f)
    if wait is None:
        return None
    blocked = _above(share, bands.blocked_share)
    full = now.groups.ready >= max(1, now.max_lag) * now.groups_per_step and in_flight(now) >= capacity(now)
    if not (blocked or full) or _above(wait, bands.wait_share):
        return None
    because = f"workers wait {_percent(share)} of their time for the trainer" if blocked else "the queue is full"
    return Finding(
        verdict=Verdict.SATURATED,
        because=because,
        change="use fewer engines, add trainer ranks, or raise lag.max if staleness allows",
    )


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}".replace("%", " %")


def _short(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2g}"
