"""The adaptive lag: single decisions, a simulated run that it holds inside its budgets, and a round on a real Redis."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import AdaptiveLagSection
from services.monitor.adaptive import Situation, decide, once, pressure
from services.monitor.source import Source
from tests.monitor.conftest import Run

SETTINGS = AdaptiveLagSection(min=1, max=8, budget=0.1, hysteresis=0.3, window_steps=2)


def after(lag: int, pressure: float | None, stale: float = 0.0, wait: float = 0.0) -> int:
    found = decide(SETTINGS, Situation(lag, pressure, stale, wait))
    return lag if found is None else found.max_lag


def test_above_the_budget_the_bound_falls_whatever_it_costs() -> None:
    assert after(4, 1.2, stale=0.5, wait=0.9) == 3


def test_at_the_lower_limit_it_stays() -> None:
    assert after(1, 3.0) == 1


@pytest.mark.parametrize("cost", [{"stale": 0.1}, {"wait": 0.5}])
def test_below_the_band_it_rises_only_if_that_mends_something(cost: dict[str, float]) -> None:
    assert after(4, 0.3, **cost) == 5
    assert after(4, 0.3) == 4
    assert after(8, 0.3, **cost) == 8


def test_inside_the_band_nothing_moves() -> None:
    assert after(4, 0.71, stale=0.5, wait=0.9) == 4
    assert after(4, 1.0, stale=0.5, wait=0.9) == 4


def test_nothing_is_decided_on_nothing() -> None:
    assert after(4, None, stale=0.5, wait=0.9) == 4


def test_a_bound_outside_its_limits_is_brought_back() -> None:
    assert (after(20, 0.5), after(0, 0.5)) == (8, 1)


def test_a_falling_effective_sample_size_is_rising_pressure() -> None:
    by_ess = AdaptiveLagSection(figure="ess", budget=0.8)
    assert pressure(by_ess, [{"ess": 0.9}]) == pytest.approx(0.5)
    assert pressure(by_ess, [{"ess": 0.6}]) == pytest.approx(2.0)
    assert pressure(by_ess, [{"ess": None}]) is None


@given(st.integers(0, 30), st.none() | st.floats(0, 10), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_it_moves_by_one_and_never_out_of_its_limits(
    lag: int, pressed: float | None, stale: float, wait: float
) -> None:
    new = after(lag, pressed, stale, wait)
    if SETTINGS.min <= lag <= SETTINGS.max:
        assert abs(new - lag) <= 1
    assert SETTINGS.min <= new <= SETTINGS.max or new == lag


@given(st.integers(0, 2**16), st.integers(1, 8), st.floats(0.008, 0.05), st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_a_simulated_run_comes_to_rest_inside_its_budget(
    seed: int, start: int, per_version: float, needed: int
) -> None:
    """Pressure grows with the bound (noise of 5 %), the trainer waits while the bound is below what it needs."""
    noise, lag, moves = random.Random(seed), start, []
    for _ in range(60):
        figure = per_version * lag * (1 + noise.uniform(-0.05, 0.05))
        new = after(lag, figure / SETTINGS.budget, wait=0.5 if lag < needed else 0.0)
        moves.append(new - lag)
        lag = new
    assert sum(map(abs, moves[-20:])) <= 1, "it does not come to rest"
    assert per_version * lag * 0.95 <= SETTINGS.budget or lag == SETTINGS.min  # inside the budget
    turns = sum(a * b < 0 for a, b in zip([m for m in moves if m], [m for m in moves if m][1:], strict=False))
    assert turns <= 2, "it swings"


def test_a_change_happens_in_redis_once_and_is_an_event_and_needs_a_full_window_before_the_next(run: Run) -> None:
    source = Source(run.broker, fresh_s=0.0)
    wild = SETTINGS.model_copy(update={"figure": "gate_rate", "budget": 0.2})
    assert once(wild, source.look, run.broker) is None  # no record has the figure
    for record in run.broker.metrics_history():
        run.broker._connection.client.lpush(
            run.broker._keys.named("metrics"), f'{{"step": {record["step"]}, "gate_rate": 0.9}}'
        )
    fresh = Source(run.broker, fresh_s=0.0)
    found = once(wild, fresh.look, run.broker)
    assert found is not None
    assert run.broker.snapshot().max_lag == 3
    assert "by adaptive lag: gate_rate is at 450%" in run.broker.events(1)[0]["text"]
    assert once(wild, fresh.look, run.broker) is None  # no step since
    assert run.broker.snapshot().max_lag == 3
