"""The terminal view, as a function of made-up runs."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from broker.types import NO_SERVER, EngineRecord, EngineState, Snapshot, Tally
from services.local.live import (
    NEWS_S,
    Beginning,
    ProcessFacts,
    condensed,
    plain_line,
    remaining_s,
    screen,
    since,
    sparkline,
    view_of,
)
from services.local.processes import last_words
from services.local.report import page
from services.local.starting import LONG_S, USUAL, StartLog, start_log, start_words
from tests.services_local.made_up import CONFIG, RAISED, REWARDED, WITHOUT, record, snapshot

FACTS = ProcessFacts(61.0, "http://127.0.0.1:8020", StartLog("logs/sglang-0.log", "Loading weights"))
STARTING = f"starting, log: logs/sglang-0.log ({USUAL})"


def shown(view_snapshot: Snapshot | None, facts: ProcessFacts = FACTS) -> str:
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(screen(view_of(view_snapshot, [0.1, 0.5, 0.9], facts, [40.0, 0.5, 0.5, 0.5, 0.5])))
        return console.export_text()


def test_the_terminal_shows_step_lag_bound_queue_engine_ledger_and_monitor() -> None:
    text = shown(snapshot(step=5, status="running", metrics=record(5)))
    for part in ("5 / 10", "0.250", "0 / 0.50 / 2", "bound 4", "10 groups ready", "serving v10", "closes", "8020"):
        assert part in text
    assert "0:02 left" in text  # 0.5 s a step, 5 to go; the 40 s of the engine's start are no pace


def test_the_time_left_follows_the_pace_of_late_and_not_the_start_of_the_engine() -> None:
    assert remaining_s([50.0, 1.0], 100) is None
    assert remaining_s([50.0, 1.0, 1.0], 100) == pytest.approx(100)
    assert remaining_s([1.0] * 30 + [45.0] + [2.0] * 15, 10) == pytest.approx(20)
    assert remaining_s([1.0] * 9, 0) is None


@given(st.lists(st.floats(0.9, 1.1), min_size=11, max_size=20), st.lists(st.floats(0.0, 1e6), max_size=5))
def test_the_time_left_stays_where_it_is_when_single_steps_are_slow_or_quick(
    steady: list[float], odd: list[float]
) -> None:
    assert remaining_s([*steady, *odd], 10) == pytest.approx(10, rel=0.1)


def test_the_terminal_view_exists_before_redis_answers() -> None:
    assert "no step yet" in shown(None)
    assert "starting" in plain_line(view_of(None, [], FACTS))


def test_a_start_that_takes_long_is_called_so_with_the_last_line_of_the_log_in_every_view() -> None:
    first = snapshot(status="starting", step=0, durable_step=0, version=-1, metrics={}, engines=())
    for seconds, long in ((LONG_S - 1, False), (483.0, True)):
        facts = replace(FACTS, elapsed_s=seconds)
        words = start_words(seconds, facts.log)
        for part, there in (("which is long", long), ("ends: Loading weights", long), (USUAL, not long)):
            assert (part in words) is there
        assert words in plain_line(view_of(first, [], facts))
        assert words in " ".join(shown(first, facts).replace("│", " ").split())
    assert start_words(483.0, None) == "starting for 8:03, which is long for a small model"
    assert start_words(None, None) == f"starting ({USUAL})"


def test_before_the_first_version_none_is_named() -> None:
    text = shown(snapshot(status="starting", step=0, version=-1, metrics={}, engines=()))
    assert "version -1" not in text
    assert "no version yet" in text


def test_the_log_that_is_named_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    assert start_log(tmp_path) is None
    logs = tmp_path / "logs"
    logs.mkdir()
    supervisor, server = logs / "engine-0.log", logs / "sglang-0.log"
    server.write_text("of the session before\n")
    supervisor.write_text('{"level": "error", "event": "the engine ended", "problem": "no memory"}\n')
    os.utime(server, (1, 1))
    assert start_log(tmp_path) == StartLog("logs/engine-0.log", "the engine ended: no memory")
    server.write_text("one\nLoading\r 50%\n\n")
    os.utime(supervisor, (1, 1))
    assert start_log(tmp_path) == StartLog("logs/sglang-0.log", "50%")
    server.write_text("")
    assert start_log(tmp_path) == StartLog("logs/sglang-0.log", "")


def test_news_is_told_while_it_is_new_and_not_for_the_rest_of_the_run() -> None:
    told = replace(FACTS, news="worker-1 ended")
    for facts, there in ((told, True), (replace(told, news_age_s=NEWS_S), False)):
        assert ("worker-1 ended" in shown(snapshot(), facts)) is there
        assert ("worker-1 ended" in plain_line(view_of(snapshot(), [0.5], facts))) is there


def test_the_plain_line_holds_the_same_facts_and_the_news() -> None:
    line = plain_line(view_of(snapshot(), [0.5], replace(FACTS, news="worker-1 ended")))
    for part in (
        "step 10/10",
        "reward 0.500",
        "lag 0/0.50/2 of 4",
        "trainer waits 40%",
        "v10 serving",
        "worker-1 ended",
    ):
        assert part in line
    assert "\n" not in line


def test_dead_letters_are_shown_when_there_are_any_also_before_the_first_step() -> None:
    stuck = snapshot(dead_letters=74, metrics={}, status="running")
    assert "74 dead letters" in plain_line(view_of(stuck, [], FACTS))
    assert "74 dead letters" in plain_line(view_of(snapshot(dead_letters=74), [0.5], FACTS))
    assert "74: `lagrange groups list RUN --state dead`" in shown(stuck)
    assert "dead" not in plain_line(view_of(snapshot(), [0.5], FACTS)) + shown(snapshot())


def test_samples_without_a_reward_are_shown_when_there_are_any_with_what_was_raised() -> None:
    assert "100 of 500 samples (20%) got no reward" in plain_line(view_of(snapshot(workers=WITHOUT), [0.5], FACTS))
    text = " ".join(shown(snapshot(workers=WITHOUT)).replace("│", " ").split())
    assert "100 of 500 samples (20%)" in text
    assert RAISED in text
    for workers in ({}, REWARDED):
        calm = snapshot(workers=workers)
        assert "reward " in shown(calm)
        assert "without reward" not in shown(calm)
        assert "no reward" not in plain_line(view_of(calm, [0.5], FACTS))


def test_failures_of_the_session_before_are_not_shown_in_a_start() -> None:
    begun_again = replace(
        JOINING, workers={"w0": {"reward_failures": 7, "heartbeat_ms": 99}, "w1": {"heartbeat_ms": 150}}
    )
    assert set(since(begun(LEFT), begun_again).workers) == {"w1"}


def engine(state: EngineState, version: int, since_ms: int) -> EngineRecord:
    return EngineRecord("engine-0", "http://127.0.0.1:30000", state, version, since_ms=since_ms)


def begun(first: Snapshot) -> Beginning:
    return Beginning(first.time_ms, first.metrics)


# What a session killed at step 5 of 10 left in Redis, its checkpoint being of step 4.
LEFT = snapshot(
    time_ms=100, step=5, durable_step=4, status="starting", metrics=record(5),
    engines=(engine(EngineState.SERVING, 5, since_ms=50),),
)  # fmt: skip


JOINING = replace(LEFT, status="running", step=4, engines=(engine(EngineState.JOINING, -1, since_ms=150),))


@pytest.mark.parametrize(
    "now",
    [
        LEFT,
        replace(LEFT, status="running", step=4),
        replace(LEFT, engines=(engine(EngineState.GONE, -1, since_ms=150),)),
    ],
)
def test_until_an_engine_serves_a_resumed_run_shows_nothing_of_the_session_before(now: Snapshot) -> None:
    line = plain_line(view_of(since(begun(LEFT), now), [0.1] * 5, FACTS, [0.5] * 5))
    assert line == f"1:01 resuming from step 4  |  engines {STARTING}"
    text = shown(since(begun(LEFT), now))
    for part in ("resuming from step 4", "4 / 10", "no step yet", "waits for an engine", "log: logs/sglang-0.log"):
        assert part in text
    for part in (" left", "0.250", "0 / 0.50 / 2", "groups ready", "gone", "serving"):
        assert part not in text


def test_a_first_start_says_starting_until_an_engine_serves() -> None:
    first = snapshot(status="starting", step=0, durable_step=0, metrics={}, engines=())
    line = plain_line(view_of(since(begun(first), replace(first, status="running")), [], FACTS))
    assert line == f"1:01 starting  |  engines {STARTING}"


def test_an_engine_that_does_not_start_is_shown_with_the_reason() -> None:
    why = "another process took port 41503 [Errno 98]"
    failed = EngineRecord(
        "engine-0", "u", EngineState.GONE, -1, detail=why, pid=NO_SERVER, since_ms=50, heartbeat_ms=150
    )
    now = since(begun(LEFT), replace(LEFT, engines=(failed,)))
    assert f"engine-0 gone ({why})" in plain_line(view_of(now, [], FACTS))
    assert f"engine-0 gone ({why}), {STARTING}" in plain_line(view_of(now, [], FACTS))
    for part in (f"gone {why}", "waits for an engine"):
        assert part in shown(now)
    before = since(begun(LEFT), replace(LEFT, engines=(replace(failed, heartbeat_ms=90),)))  # of the session before
    assert not before.engines


def test_a_resumed_run_shows_its_engines_as_they_come_and_its_figures_from_its_first_step_on() -> None:
    assert "resuming from step 4  |  engines engine-0 joining" in plain_line(
        view_of(since(begun(LEFT), JOINING), [], FACTS)
    )
    serving = replace(JOINING, engines=(engine(EngineState.SERVING, 6, since_ms=200),))
    line = plain_line(view_of(since(begun(LEFT), serving), [0.1] * 4, FACTS, [0.5] * 4))
    assert line == "1:01 running  |  engines engine-0 serving"
    stepped = replace(serving, step=5, metrics={**record(5), "time_s": 9.0})
    assert since(begun(LEFT), stepped) is stepped


def test_a_resumed_run_that_had_nothing_left_to_do_shows_its_last_step() -> None:
    over = replace(LEFT, status="finished")
    assert since(begun(LEFT), over) is over


def test_the_last_frame_does_not_say_how_to_stop() -> None:
    assert "Ctrl-C" in shown(snapshot())
    assert "finished, 1:01 ─" in shown(snapshot(), replace(FACTS, hint=""))


def test_an_open_ledger_is_not_shown_as_closed() -> None:
    broken = snapshot(tokens=Tally(issued=5, trained=4))
    assert "does not close" in shown(broken)
    assert "LEDGER OPEN" in plain_line(view_of(broken, [], FACTS))


def test_a_sparkline_rises_from_the_lowest_to_the_highest_block() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([]) == ""
    assert math.isclose(sum(condensed([1.0, 3.0, 5.0, 7.0], 2)), 8.0)
    assert len(condensed(list(range(100)), 40)) == 40


def test_a_paused_run_is_called_so_and_has_no_time_left() -> None:
    pace = [1.0] * 5
    for paused, words in ((False, "running"), (True, "paused")):
        view = view_of(snapshot(status="running", step=5, admission_paused=paused), [0.5], FACTS, pace)
        assert (view.status, view.eta_s is None) == (words, paused)
    assert view_of(snapshot(status="starting", admission_paused=True), [], FACTS).status == "starting"


def test_a_lag_above_a_bound_that_was_lowered_is_said_to_be_of_a_step_before() -> None:
    for bound, there in ((0, True), (2, False)):
        lowered = snapshot(max_lag=bound)
        words = "0 (lowered since)"
        assert (words in plain_line(view_of(lowered, [0.5], FACTS))) is there
        assert (words in shown(lowered)) is there


def test_groups_that_workers_gave_back_are_not_called_failed() -> None:
    groups = Tally(issued=208, trained=160, filtered=5, failed=43)
    ended = view_of(snapshot(groups=groups, counters={"groups_released": 42.0}), [0.5], FACTS)
    assert "+ 1 failed + 42 given back + 0 in flight" in ended.ledger
    assert "given back" not in view_of(snapshot(groups=groups), [0.5], FACTS).ledger
    assert "Of the failed groups, 42 were given back" in page(CONFIG, [], {"counters": {"groups_released": 42.0}})
    assert "given back" not in page(CONFIG, [], {"counters": {}})


def test_warnings_of_python_are_not_the_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "sglang-0.log"
    log.write_text(
        "[2026-11-30 02:40:41] Load weight begin.\n"
        "/x/gguf.py:76: UserWarning: Only CUDA, MUSA and NPU support GGUF quantization currently.\n"
        '  warnings.warn(f"Only CUDA, MUSA and NPU support GGUF quantization currently.")\n'
    )
    assert last_words(log) == "[2026-11-30 02:40:41] Load weight begin."
