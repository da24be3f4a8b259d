"""The report and the terminal view, as functions of made-up runs."""

from __future__ import annotations

import html
import json
import math
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from broker.types import NEWEST, NO_SERVER, EngineRecord, EngineState, LagCount, Snapshot, Tally
from configs import ConfigError, load_config
from services.local.charts import Bar, Series, bar_chart, line_chart, moving_average, nice_ticks
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
from services.local.metrics import MetricsTail, parse, read_metrics
from services.local.processes import last_words
from services.local.report import by_lag, draw_report, page, sat_verdict, write_report
from services.local.starting import LONG_S, USUAL, StartLog, start_log, start_words

LOCAL = Path(__file__).parents[2] / "configs" / "local.yaml"
CONFIG = load_config(LOCAL, {"lag.max": 4, "run.id": "r"})
FACTS = ProcessFacts(61.0, "http://127.0.0.1:8020", StartLog("logs/sglang-0.log", "Loading weights"))
STARTING = f"starting, log: logs/sglang-0.log ({USUAL})"


def record(step: int, clipped: float = 0.01) -> dict[str, object]:
    lags = {
        "0": {"tokens": 300, "groups": 10, "log_ratio_abs": 0.01, "gate_rate": 0.05},
        "2": {"tokens": 100, "groups": 6, "log_ratio_abs": 0.09, "gate_rate": 0.25},
    }
    return {
        "step": step, "version": step, "time_s": 0.5 * step, "reward_mean": step / 20, "by_lag": lags, "wait_s": 0.2,
        "step_s": 0.5, "tokens_per_s": 800.0, "queue_wait_ms_mean": 300.0, "lag_min": 0, "lag_mean": 0.5, "lag_max": 2,
        "sat": {"new_clip_fraction": clipped},
    }  # fmt: skip


def snapshot(**changes: object) -> Snapshot:
    base = Snapshot(
        time_ms=1, run="r", status="finished", max_lag=4, groups_per_step=16, publish_interval=1, version=10,
        published=10, highest_version=10, step=10, durable_step=10, steps_total=10, epoch=1, admission_paused=False,
        groups=Tally(issued=180, generating=3, ready=10, trained=160, filtered=5, stale=1, failed=1),
        tokens=Tally(issued=4500, ready=400, trained=4000, filtered=60, stale=40), payload_bytes=0,
        trained_by_lag={0: LagCount(100, 3000), 2: LagCount(60, 1000)},
        engines=(EngineRecord("engine-0", "http://127.0.0.1:30000", EngineState.SERVING, 10),), metrics=record(10),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_report_is_written_from_the_runs_files_alone_and_asks_for_nothing(tmp_path: Path) -> None:
    lines = [json.dumps(record(step)) for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = write_report(tmp_path, CONFIG, snapshot()).read_text()
    assert not re.search(r"(src|href)=|url\(|<script|@import", text)
    for title in (
        "Reward",
        "Policy lag",
        "Mean |log-ratio|",
        "SAT gate rate",
        "Tokens a second",
        "Who waits",
        "Ledger",
    ):
        assert title in text
    assert text.count('<svg viewBox="0 0 520') == 5
    assert "75.0%" in text
    assert ">closes<" in text
    (tmp_path / "report.html").unlink()
    assert draw_report(tmp_path, CONFIG).read_text() == text


def test_every_drawing_is_well_formed(tmp_path: Path) -> None:
    text = page(CONFIG, parse(json.dumps(record(s)) for s in range(1, 400)), asdict(snapshot()))
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    assert drawings
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_a_ledger_that_does_not_close_says_by_how_much() -> None:
    text = page(CONFIG, [record(1)], asdict(snapshot(groups=Tally(issued=12, trained=10))))
    assert "open by 2" in text


def test_a_run_without_a_step_or_a_ledger_still_has_a_report(tmp_path: Path) -> None:
    assert "no data" in draw_report(tmp_path, CONFIG).read_text()


def test_hostile_text_is_escaped() -> None:
    config = CONFIG.model_copy(update={"task": CONFIG.task.model_copy(update={"name": "<script>x</script>"})})
    assert "<script>" not in page(config, [], {})


def test_lags_are_joined_over_steps_and_weighted_by_token() -> None:
    first, second = record(1), record(2)
    second["by_lag"] = {"2": {"tokens": 300, "groups": 1, "log_ratio_abs": 0.01, "gate_rate": 0.05}}
    joined = by_lag([first, second])
    assert joined[2]["tokens"] == 400
    assert joined[2]["log_ratio_abs"] == pytest.approx((100 * 0.09 + 300 * 0.01) / 400)


def test_the_report_says_when_sat_could_not_act() -> None:
    assert sat_verdict(CONFIG, [record(1, 0.0), record(2, 0.0)]).startswith("SAT could not act")
    assert sat_verdict(CONFIG, [record(1, 0.02), record(2, 0.0)]).startswith("SAT clipped 1.00%")
    assert "not part" in sat_verdict(load_config(LOCAL, {"trainer.loss.name": "grpo"}), [record(1)])


def test_of_two_records_of_a_step_the_later_counts_and_those_after_it_are_forgotten() -> None:
    lines = [json.dumps({"step": s, "reward_mean": r}) for s, r in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5))]
    assert [(r["step"], r["reward_mean"]) for r in parse([*lines, "{torn", "7"])] == [(1, 0.1), (2, 0.5)]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    tail.read()
    whole = json.dumps({"step": 1, "reward_mean": 0.25}) + "\n"
    path.write_text(whole + whole[:9].replace("1", "2"))
    tail.read()
    assert tail.series("reward_mean") == [0.25]
    path.write_text(whole + whole.replace("1", "2", 1))
    tail.read()
    assert tail.series("reward_mean") == [0.25, 0.25]


def test_the_live_view_follows_a_trainer_that_resumed_and_trained_steps_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def line(step: int, reward: float) -> str:
        return json.dumps({"step": step, "reward_mean": reward, "step_s": 1.0}) + "\n"

    path.write_text("".join(line(step, 0.1) for step in (1, 2, 3, 4)))
    tail = MetricsTail(path)
    tail.read()
    aside = tmp_path / "metrics.tmp"
    aside.write_text("".join(line(step, 0.1) for step in (1, 2)))
    aside.replace(path)  # as trainer/metrics.py does: the checkpoint is of step 2
    with path.open("a") as file:
        file.write(line(3, 0.9))
    tail.read()
    assert (tail.series("step"), tail.series("reward_mean")) == ([1, 2, 3], [0.1, 0.1, 0.9])
    with path.open("a") as file:
        file.write(line(4, 0.8))
    tail.read()
    assert tail.series("reward_mean") == [0.1, 0.1, 0.9, 0.8]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30))
def test_charts_never_contain_a_number_that_is_none(values: list[float]) -> None:
    points = tuple((float(i), v) for i, v in enumerate(values))
    for text in (
        line_chart([Series("s", points)], x_label="x", label="l"),
        bar_chart([Bar(str(i), abs(v), "", "") for i, v in enumerate(values)], x_label="x", label="l"),
    ):
        assert not re.search(r'"[^"]*\b(nan|inf)\b', text)
        ElementTree.fromstring(text)


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_the_data(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    slack = 1e-6 * max(1.0, abs(low), span)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert 2 <= len(ticks) <= 8


def test_a_moving_average_of_a_constant_is_that_constant() -> None:
    assert moving_average([3.0] * 5) == pytest.approx([3.0] * 5)


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


RAISED = "ValueError: invalid literal for int() with base 10: '[seven]'"
WITHOUT: dict[str, dict[str, object]] = {
    "w0": {"samples_rewarded": 400, "reward_failures": 100, f"reward_failures{NEWEST}": RAISED}
}
REWARDED = {"w0": {"samples_rewarded": 400}}


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


def test_a_report_says_how_many_samples_got_no_reward_and_why(tmp_path: Path) -> None:
    text = write_report(tmp_path, CONFIG, snapshot(workers=WITHOUT)).read_text()
    assert "100 of 500 samples (20%) got no reward" in text
    assert html.escape(RAISED) in text
    gone = {"samples_rewarded": 900.0, "reward_failures": 100.0}  # of workers that are forgotten by now
    assert "100 of 1,000 samples (10%)" in write_report(tmp_path, CONFIG, snapshot(counters=gone)).read_text()
    assert "no reward" not in write_report(tmp_path, CONFIG, snapshot(workers=REWARDED)).read_text()


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


def test_the_report_holds_the_configuration() -> None:
    assert "learning_rate: 0.002" in page(CONFIG, [], {})


def test_a_full_disk_is_a_message_that_says_how_to_draw_the_report_later(tmp_path: Path) -> None:
    (tmp_path / "ledger.json.part").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"No space left on device.*lagrange report"):
        write_report(tmp_path, CONFIG, snapshot())


def test_a_damaged_file_of_metrics_costs_its_damaged_lines_alone_and_one_that_cannot_be_read_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\xff\x00\n{"step": 3}\n')
    assert [record["step"] for record in read_metrics(path)] == [1, 3]
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read \(Is a directory\)"):
        read_metrics(path)
    tail = MetricsTail(path)
    tail.read()  # what a disk does must not end the run that is watched
    assert tail.series("step") == []


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
