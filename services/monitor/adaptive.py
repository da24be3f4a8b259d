"""Adaptive lag: moves max_lag so that a figure of staleness and the waste stay inside their budgets.

Invariant: the bound stays within [min, max] and moves by one at a time, at least `window_steps` steps apart; it moves
on figures of steps that were all trained after the last change; inside the band between the two edges of the budget
nothing moves (hysteresis). `decide` is pure and keeps no state of its own, so that any number of monitors may run it:
the change itself is compare-and-set in Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from broker.errors import BrokerError
from configs.schema import AdaptiveLagSection
from services.monitor.figures import mean, number, stale_share, wait_share
from services.monitor.source import Look
from services.monitor.steering import Steerable

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Situation:
    """max_lag: now. pressure: the figure, 1 at its budget. stale, wait: shares of tokens and time. None: unknown."""

    max_lag: int
    pressure: float | None
    stale: float | None
    wait: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The new bound, and why, for the event log."""

    max_lag: int
    why: str


def pressure(settings: AdaptiveLagSection, records: Sequence[Mapping[str, object]]) -> float | None:
    """Mean of the figure over the records in units of its budget; above 1 the policy is too stale.

    For ess, which falls as staleness grows, it is (1 - ess) / (1 - budget).
    """
    value = mean(number(record, settings.figure) for record in records)
    if value is None:
        return None
    return (1 - value) / (1 - settings.budget) if settings.figure == "ess" else value / settings.budget


def situation(settings: AdaptiveLagSection, look: Look) -> Situation | None:
    """What a decision is made on; None while too few steps were trained since the last change."""
    s = look.snapshot
    changed = s.detail.lag_changed_step if s.detail is not None else -1
    fresh = [r for r in look.records if (number(r, "step") or 0) > max(changed, 0)][: settings.window_steps]
    if s.status != "running" or len(fresh) < settings.window_steps:
        return None
    before = look.before if look.before is not None and look.before.step >= changed else s
    return Situation(s.max_lag, pressure(settings, fresh), stale_share(s, before), wait_share(fresh))


def decide(settings: AdaptiveLagSection, now: Situation) -> Decision | None:
    """What to change, or None. Learning comes first: too much pressure lowers the bound whatever that costs."""
    if not settings.min <= now.max_lag <= settings.max:
        nearest = min(max(now.max_lag, settings.min), settings.max)
        return Decision(nearest, f"max_lag {now.max_lag} is outside [{settings.min}, {settings.max}]")
    if now.pressure is None:
        return None
    said = f"{settings.figure} is at {now.pressure:.0%} of its budget"
    if now.pressure > 1 and now.max_lag > settings.min:
        return Decision(now.max_lag - 1, said)
    cost = _cost(settings, now)
    # Pressure grows about as the bound does: a version more that led out of the budget would be taken back, and so on.
    expected = now.pressure * (now.max_lag + 1) / max(now.max_lag, 1)
    room = now.pressure <= 1 - settings.hysteresis and expected <= 1 - settings.hysteresis / 3
    if room and cost and now.max_lag < settings.max:
        return Decision(now.max_lag + 1, f"{said}, {cost}")
    return None


def _cost(settings: AdaptiveLagSection, now: Situation) -> str:
    """What a higher bound would make better, in words; "" if nothing."""
    if now.stale is not None and now.stale > settings.stale_budget:
        return f"{now.stale:.0%} of the tokens go stale"
    if now.wait is not None and now.wait > settings.wait_budget:
        return f"the trainer waits {now.wait:.0%} of its time"
    return ""


async def keep(
    settings: AdaptiveLagSection, look: Callable[[], Look], broker: Steerable, *, every_s: float | None = None
) -> None:
    """Decide again and again until cancelled. Every decision is an event; Redis being away is waited out."""
    while True:
        await asyncio.sleep(settings.interval_s if every_s is None else every_s)
        try:
            await asyncio.to_thread(once, settings, look, broker)
        except BrokerError as error:
            log.warning("adaptive lag waits", problem=type(error).__name__)


def once(settings: AdaptiveLagSection, look: Callable[[], Look], broker: Steerable) -> Decision | None:
    """One round; the decision that was carried out, if any. Raises BrokerError."""
    seen = look()
    now = situation(settings, seen)
    decision = None if now is None else decide(settings, now)
    if now is None or decision is None:
        return None
    found = broker.steer("lag", decision.max_lag, why=f"by adaptive lag: {decision.why}", expected=now.max_lag)
    log.info("adaptive lag", done=found.done, detail=found.detail, why=decision.why)
    return decision if found.done else None
