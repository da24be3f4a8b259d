"""The report, as a function of made-up runs, and what it reads."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.types import Tally
from configs import ConfigError, load_config
from services.local.charts import Bar, Series, bar_chart, line_chart, moving_average, nice_ticks
from services.local.metrics import MetricsTail, parse, read_metrics
from services.local.report import by_lag, draw_report, page, sat_verdict, write_report
from tests.services_local.made_up import CONFIG, LOCAL, RAISED, REWARDED, WITHOUT, record, snapshot


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


def test_a_report_says_how_many_samples_got_no_reward_and_why(tmp_path: Path) -> None:
    text = write_report(tmp_path, CONFIG, snapshot(workers=WITHOUT)).read_text()
    assert "100 of 500 samples (20%) got no reward" in text
    assert html.escape(RAISED) in text
    gone = {"samples_rewarded": 900.0, "reward_failures": 100.0}  # of workers that are forgotten by now
    assert "100 of 1,000 samples (10%)" in write_report(tmp_path, CONFIG, snapshot(counters=gone)).read_text()
    assert "no reward" not in write_report(tmp_path, CONFIG, snapshot(workers=REWARDED)).read_text()


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
