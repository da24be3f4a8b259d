"""Who waited, and what restarts cost, as the report says it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from broker.types import Snapshot
from configs import load_config
from services.local.report import draw_report, page, write_report
from services.local.report_waits import restarts, slow_side, waits_since
from tests.monitor.test_diagnosis import RUNNING, beats

CONFIG = load_config(Path(__file__).parents[2] / "configs" / "local.yaml", {"lag.max": 4, "run.id": "r"})
START_S = 69.0  # until the engine served
STEPS = [
    {"step": n, "time_s": START_S + n, "wait_s": START_S if n == 1 else 0.3, "step_s": START_S + 1 if n == 1 else 1.0}
    for n in range(1, 38)
]


def later(first: Snapshot, seconds: float, **waited: float) -> Snapshot:
    """The end of a run whose workers waited for so long since its first step, by reason."""
    end = replace(first, time_ms=first.time_ms + int(1000 * seconds), step=37)
    return beats(end, **{"engine": START_S, **waited})


FIRST = beats(replace(RUNNING, step=1), engine=START_S)


def rows(text: str) -> dict[str, str]:
    """What the table says of each row: words -> share."""
    found = re.findall(r"<small>([^<]*)</small></th><td>.*?</td><td>([^<]*)</td>", text.partition("Who waits")[2])
    return dict(found)


def test_what_was_waited_for_before_the_first_step_is_in_no_share_and_reasons_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in STEPS))
    end = later(FIRST, 36.0, bound=3.6, engine=START_S + 9.0)
    text = write_report(tmp_path, CONFIG, end, FIRST).read_text()
    assert rows(text) == {
        "waits for groups": "30%",
        "at the lag bound, for the trainer": "10%",
        "for an engine that serves": "25%",
    }
    assert "Sampling is the slow side" in text
    (tmp_path / "report.html").unlink()
    assert draw_report(tmp_path, CONFIG).read_text() == text


def test_a_run_that_goes_on_or_had_no_step_says_nothing_of_its_workers(tmp_path: Path) -> None:
    assert rows(page(CONFIG, STEPS, {})) == {"waits for groups": "30%"}
    assert waits_since(None, FIRST) == {}
    assert "is known once the run has ended" in write_report(tmp_path, CONFIG, FIRST).read_text()


@pytest.mark.parametrize(
    ("trainer", "waited", "said"),
    [
        (0.05, {"bound": 0.4}, "The trainer is the slow side"),
        (0.05, {"engine": 0.4, "memory": 0.4}, "Neither side"),
        (0.6, {"engine": 0.4}, "Sampling is the slow side"),
        (0.6, {"bound": 0.4}, "Both sides wait"),
    ],
)
def test_the_bounds_share_alone_says_that_the_trainer_is_the_slow_side(
    trainer: float, waited: dict[str, float], said: str
) -> None:
    steps = [{"step": n, "wait_s": trainer, "step_s": 1.0} for n in (1, 2, 3)]
    end = later(FIRST, 100.0, **{name: START_S * (name == "engine") + 100 * share for name, share in waited.items()})
    assert said in slow_side(steps, waits_since(FIRST, end))


def test_restarts_are_counted_and_what_went_stale_by_them_is_told_from_the_rest() -> None:
    assert restarts({"attachments": 1.0}) == "The trainer was never started again."
    told = restarts({"attachments": 3.0, "groups_rolled_back": 160.0, "stale_at_attach": 96.0, "stale_at_submit": 2.0})
    assert "started again 2 times (attachments); groups it had to take back: 160." in told
    assert "96 when it started again, 0 when it pulled, 2 when they were submitted" in told
    ledger = {"counters": {"attachments": 2.0, "stale_at_attach": 96.0}}
    assert "started again once" in page(CONFIG, [], ledger)
