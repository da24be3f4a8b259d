"""The life cycle of an engine, for every order of outcomes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.types import EngineRecord, EngineState
from services.weight_sync import lifecycle as lc

IDLE_STATES = (EngineState.JOINING, EngineState.SERVING, EngineState.QUARANTINED, EngineState.GONE)
POLICY = lc.Policy(tries=2, gone_after_s=5.0, join_patience_s=8.0)


@dataclass
class Engine:
    """A model of what an engine really has: weights and pause, changed by commands even when the answer is lost."""

    weights: str = "default"
    paused: bool = False
    alive: bool = True
    log: list[str] = field(default_factory=list)


def run_step(life: lc.Life, engine: Engine, outcome: str, at: lc.Moment) -> lc.Life:
    """One tick to its end. outcome: what happens to every command: ok, fail (nothing done), lost (done, no answer)."""
    life, command = lc.step(life, lc.Tick(), at)
    while command is not None:
        event = carry_out(command, engine, outcome)
        life, command = lc.step(life, event, at, command)
    return life


def carry_out(command: lc.Command, engine: Engine, outcome: str) -> lc.Event:
    done = engine.alive and outcome != "fail"
    engine.log.append(type(command).__name__)
    if isinstance(command, lc.Probe):
        return lc.Answered(engine.weights, engine.paused) if engine.alive else lc.Silent(refused=True)
    if done and isinstance(command, lc.Pause):
        engine.paused = True
    if done and isinstance(command, lc.Continue):
        engine.paused = False
    if done and isinstance(command, lc.Load):
        engine.weights = f"unverified-{command.version}"
    if isinstance(command, lc.Verify) and done:
        if engine.weights not in (str(command.version), f"unverified-{command.version}"):
            return lc.Failed("other weights")
        engine.weights = str(command.version)
    return lc.Succeeded("sum") if done and outcome != "lost" else lc.Failed(outcome)


HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["ok", "ok", "fail", "lost", "die", "restart", "rejoin"]),
        st.integers(0, 2),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(HAPPENINGS, st.booleans(), st.booleans())
def test_an_engine_is_routable_only_with_the_weights_that_were_confirmed_and_is_never_left_paused(
    happenings: list[tuple[str, int]], drain: bool, locked: bool
) -> None:
    policy = lc.Policy(drain=drain, locked=locked, tries=2, gone_after_s=5.0)
    life, engine, wanted, now = lc.Life(EngineState.JOINING), Engine(), 0, 0.0
    for happening, growth in happenings:
        wanted, now = wanted + growth, now + 1.0
        if happening in ("die", "restart"):
            engine.alive, engine.weights, engine.paused = happening == "restart", "default", False
        elif happening == "rejoin":
            life, _ = lc.step(life, lc.Rejoined(), lc.Moment(policy, now, wanted))
            assert life.version == -1
            assert life.state is EngineState.JOINING
        outcome = happening if happening in ("fail", "lost") else "ok"
        life = run_step(life, engine, outcome, lc.Moment(policy, now, wanted))
        if life.state is EngineState.SERVING:
            assert engine.weights == str(life.version)
            assert not engine.paused
        else:
            assert life.state in IDLE_STATES
        if engine.paused:
            assert life.maybe_paused
    engine.alive = True
    for _ in range(100):
        now += 31.0
        life = run_step(life, engine, "ok", lc.Moment(policy, now, wanted))
        if life.state is EngineState.SERVING and life.version == wanted:
            break
    assert life.version == wanted
    assert engine.weights == str(wanted)
    assert not engine.paused


@given(st.sampled_from(["fail", "lost"]), st.integers(0, 6))
def test_a_command_that_fails_at_any_place_quarantines_the_engine_and_continues_it(outcome: str, at: int) -> None:
    life = lc.Life(EngineState.SERVING, version=3, target=3)
    policy = lc.Policy(drain=False, locked=False)
    life, command = lc.step(life, lc.Tick(), lc.Moment(policy, 0.0, 4))
    seen: list[str] = []
    for index in range(20):
        if command is None:
            break
        seen.append(type(command).__name__)
        event: lc.Event = lc.Answered("3") if isinstance(command, lc.Probe) else lc.Succeeded()
        if index == at and not isinstance(command, lc.Probe):
            event = lc.Failed(outcome)
        life, command = lc.step(life, event, lc.Moment(policy, 0.0, 4), command)
    if seen.count("Pause"):
        assert "Continue" in seen[seen.index("Pause") :]
    if 0 < at <= 4:
        assert (life.state, life.version) == (EngineState.QUARANTINED, -1)
    else:
        assert (life.state, life.version) == (EngineState.SERVING, 4)


def test_ten_versions_behind_is_one_load() -> None:
    life, engine = lc.Life(EngineState.SERVING, version=3, target=3), Engine(weights="3")
    life = run_step(life, engine, "ok", lc.Moment(POLICY, 0.0, 13))
    assert (life.state, life.version) == (EngineState.SERVING, 13)
    assert engine.log == ["Probe", "Load", "Verify"]


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_is_paused_for_the_load_alone_and_serves_only_after_the_check(drain: bool) -> None:
    life, engine = lc.Life(EngineState.SERVING, version=3, target=3), Engine(weights="3")
    life = run_step(life, engine, "ok", lc.Moment(lc.Policy(drain=drain, locked=False), 0.0, 4))
    assert engine.log == ["Probe", "Pause", "Load", "Continue", "Verify"]
    assert life.state is EngineState.SERVING


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_that_loads_under_its_own_lock_is_never_paused_and_out_before_it_is_told_to(drain: bool) -> None:
    serving, at = lc.Life(EngineState.SERVING, version=3, target=3), lc.Moment(lc.Policy(drain=drain), 0.0, 4)
    life, command = lc.step(serving, lc.Newer(), at)
    assert (life.state, life.maybe_paused, command) == (EngineState.UPDATING, False, lc.Load(4, drain))
    engine = Engine(weights="3")
    life = run_step(serving, engine, "ok", at)
    assert (life.state, engine.log) == (EngineState.SERVING, ["Probe", "Load", "Verify"])


def test_a_newer_version_is_loaded_without_a_look_only_where_the_engine_is_known_to_serve() -> None:
    serving, at = lc.Life(EngineState.SERVING, version=3, target=3), lc.Moment(POLICY, 0.0, 4)
    assert lc.step(serving, lc.Newer(), at)[1] == lc.Load(4, drain=True)
    for state in (EngineState.JOINING, EngineState.QUARANTINED, EngineState.GONE):
        assert lc.step(lc.Life(state), lc.Newer(), at)[1] == lc.Probe()
    taken_over = lc.takeover(EngineRecord("e", "http://e", EngineState.SERVING, version=3), 0.0)
    assert lc.step(taken_over, lc.Newer(), at)[1] == lc.Probe()
    assert lc.step(serving, lc.Newer(), lc.Moment(POLICY, 0.0, 3))[1] == lc.Probe()


def test_an_engine_that_serves_other_weights_than_confirmed_is_loaded_again_at_once() -> None:
    life, engine = lc.Life(EngineState.SERVING, version=3, target=3), Engine(weights="default")
    life = run_step(life, engine, "ok", lc.Moment(POLICY, 0.0, 3))
    assert (life.state, life.version) == (EngineState.SERVING, 3)
    assert "Load" in engine.log


def test_a_failed_load_is_tried_at_once_until_the_tries_are_used_up_and_then_with_growing_waits() -> None:
    life, engine = lc.Life(EngineState.JOINING), Engine()
    loads: list[float] = []
    for tenth in range(600):
        before = engine.log.count("Load")
        life = run_step(life, engine, "fail", lc.Moment(POLICY, tenth / 10, 1))
        engine.log = [e for e in engine.log if e != "Probe"]
        life = (
            life
            if life.state is not EngineState.SERVING
            else lc._fail(life, "broken", lc.Moment(POLICY, tenth / 10, 1))[0]
        )
        if engine.log.count("Load") > len(loads):
            loads.append(tenth / 10)
        assert before <= engine.log.count("Load")
    gaps = [b - a for a, b in itertools.pairwise(loads)]
    assert gaps[0] == pytest.approx(0.1)
    assert gaps[1:5] == pytest.approx([1.0, 2.0, 4.0, 8.0], abs=0.11)
    assert max(gaps) <= POLICY.back_off_max_s + 0.11


def test_a_newer_version_ends_the_wait_of_a_quarantined_engine() -> None:
    life = lc.Life(EngineState.QUARANTINED, target=4, failures=6, retry_at=100.0)
    quarantined_at = 100.0 - lc._back_off(6, POLICY)
    assert lc.step(life, lc.Answered("?"), lc.Moment(POLICY, quarantined_at + 2, 4))[1] is None
    assert isinstance(lc.step(life, lc.Answered("?"), lc.Moment(POLICY, quarantined_at + 2, 5))[1], lc.Load)


def test_one_missed_probe_is_forgiven_and_a_refused_connection_is_not() -> None:
    serving = lc.Life(EngineState.SERVING, version=1)
    assert lc.step(serving, lc.Silent(), lc.Moment(POLICY, 0.0, 1))[0].state is EngineState.SERVING
    assert lc.step(serving, lc.Silent(refused=True), lc.Moment(POLICY, 0.0, 1))[0].state is EngineState.QUARANTINED


def test_a_silent_engine_is_quarantined_then_gone_and_joins_when_it_answers_again() -> None:
    life, states = lc.Life(EngineState.SERVING, version=1), []
    for second in range(12):
        life, _ = lc.step(life, lc.Silent(), lc.Moment(POLICY, float(second), 1))
        states.append(life.state)
    assert states[1:4] == [EngineState.SERVING, EngineState.QUARANTINED, EngineState.QUARANTINED]
    assert states[-1] is EngineState.GONE
    life, command = lc.step(life, lc.Answered("default"), lc.Moment(POLICY, 20.0, 1))
    assert isinstance(command, lc.Continue)
    life, command = lc.step(life, lc.Succeeded(), lc.Moment(POLICY, 20.0, 1), command)
    life, command = lc.step(life, lc.Answered("default"), lc.Moment(POLICY, 21.0, 1))
    assert life.state is EngineState.LOADING


def test_a_silent_engine_whose_supervisor_is_silent_too_is_gone_without_further_waiting() -> None:
    life, _ = lc.step(lc.Life(EngineState.SERVING, version=1), lc.Silent(True, True), lc.Moment(POLICY, 0.0, 1))
    assert life.state is EngineState.QUARANTINED
    assert lc.step(life, lc.Silent(True, False), lc.Moment(POLICY, 0.5, 1))[0].state is EngineState.QUARANTINED
    assert lc.step(life, lc.Silent(True, True), lc.Moment(POLICY, 0.5, 1))[0].state is EngineState.GONE


@pytest.mark.parametrize(
    "state", [EngineState.PAUSING, EngineState.UPDATING, EngineState.VERIFYING, EngineState.LOADING]
)
def test_an_engine_found_half_way_at_start_up_is_continued_and_then_fully_loaded(state: EngineState) -> None:
    life = lc.takeover(EngineRecord("e", "http://e", state, version=2), 0.0)
    engine = Engine(weights="3", paused=True)
    assert not EngineRecord("e", "", life.state, life.version).routable
    life = run_step(life, engine, "ok", lc.Moment(POLICY, 1.0, 3))
    assert not engine.paused
    life = run_step(life, engine, "ok", lc.Moment(POLICY, 2.0, 3))
    assert (life.state, life.version) == (EngineState.SERVING, 3)
    assert engine.log.index("Continue") < engine.log.index("Load")


def test_an_engine_found_serving_at_start_up_is_read_back_and_not_loaded_again() -> None:
    life = lc.takeover(EngineRecord("e", "http://e", EngineState.SERVING, version=2), 0.0)
    engine = Engine(weights="2")
    life = run_step(life, engine, "ok", lc.Moment(POLICY, 1.0, 2))
    assert engine.log == ["Probe", "Verify"]
    life = run_step(life, engine, "ok", lc.Moment(POLICY, 2.0, 2))
    assert (life.state, life.version, engine.log[2:]) == (EngineState.SERVING, 2, ["Probe"])


def test_nothing_is_loaded_before_a_version_is_published() -> None:
    life, engine = lc.Life(EngineState.JOINING), Engine()
    life = run_step(life, engine, "ok", lc.Moment(POLICY, 1.0, None))
    assert life.state is EngineState.JOINING
    assert engine.log == ["Probe"]
