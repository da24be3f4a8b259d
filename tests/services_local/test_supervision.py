"""The restart policy and the guardian's list, as pure functions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.local.guardian import living_groups
from services.local.supervision import (
    FATAL,
    STOPPED,
    USAGE,
    End,
    Ended,
    History,
    Leave,
    News,
    Restart,
    RestartPolicy,
    after_exit,
    farewell,
    recorded,
)

POLICY = RestartPolicy(tries=3, window_s=60.0, first_delay_s=0.5, longest_delay_s=4.0)


def test_a_trainer_that_ends_with_zero_after_its_last_step_finishes_the_run() -> None:
    assert after_exit(Ended("trainer", 0, finished="all steps are trained"), History(), 0.0, POLICY) == End(
        0, "all steps are trained", "finished"
    )


def test_a_worker_that_ends_with_zero_when_the_run_is_finished_is_left_alone() -> None:
    assert after_exit(Ended("worker-0", 0, finished="all steps are trained"), History(), 0.0, POLICY) == Leave()
    assert isinstance(after_exit(Ended("worker-0", 0), History(), 0.0, POLICY), Restart)


def test_a_trainer_that_ends_with_zero_before_its_last_step_is_started_again() -> None:
    assert isinstance(after_exit(Ended("trainer", 0), History(), 0.0, POLICY), Restart)


def test_an_exit_code_that_says_fatal_or_usage_ends_the_run_with_that_code() -> None:
    for code in (FATAL, USAGE):
        decision = after_exit(Ended("monitor", code), History(), 0.0, POLICY)
        assert isinstance(decision, End)
        assert decision.code == code


def test_the_last_words_offer_to_go_on_as_it_was_only_where_that_can_help() -> None:
    folder = Path("runs/r")
    plain = "lagrange up --resume runs/r"
    assert farewell(End(STOPPED, "stopped", "failed"), folder).endswith(plain)
    assert farewell(End(1, "worker-0 ended 5 times", "failed"), folder).endswith(plain)
    for code in (USAGE, FATAL):
        said = farewell(End(code, "trainer cannot go on", "failed"), folder)
        assert said.startswith("Failed: trainer cannot go on")
        assert said.endswith(f"{plain} --set NAME=VALUE")
        assert "would fail again" in said
    assert "report.html" in farewell(End(0, "all steps are trained", "finished"), folder)


def test_dead_letters_are_named_at_the_end_with_how_a_resume_issues_them_again() -> None:
    for end in (End(FATAL, "trainer cannot go on", "failed"), End(0, "the data set has ended", "finished")):
        said = farewell(end, Path("runs/r"), ["too few samples", "a reward failed: no number"])
        assert "2 of its prompts are dead letters (the newest for: a reward failed: no number)" in said
        assert said.endswith("lagrange up --resume runs/r --requeue")


def test_a_command_that_is_suggested_is_called_as_this_program_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = tmp_path / "lagrange"
    found.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for called, suggested in (
        (".venv/bin/lagrange", ".venv/bin/lagrange"),
        ("/opt/my tools/lagrange", "'/opt/my tools/lagrange'"),
        (str(found), "lagrange"),  # how the system names a program that it found by its name
        ("lagrange", "lagrange"),
        ("/srv/services/__main__.py", "lagrange"),
    ):
        monkeypatch.setattr(sys, "argv", [called, "up"])
        said = farewell(End(STOPPED, "stopped", "failed"), Path("runs/r"))
        assert said == f"Stopped. Go on with: {suggested} up --resume runs/r"


def test_an_engine_that_never_served_ends_the_run_and_one_that_served_is_started_again() -> None:
    assert isinstance(after_exit(Ended("engine-0", 1, served=False), History(), 0.0, POLICY), End)
    assert isinstance(after_exit(Ended("engine-0", -9, served=True), History(), 0.0, POLICY), Restart)


@given(st.lists(st.floats(0.0, 30.0), max_size=60))
def test_no_process_is_started_again_more_often_than_the_policy_allows_in_any_window(gaps: list[float]) -> None:
    now, history, starts = 0.0, History(), []
    for gap in gaps:
        now += gap
        decision = after_exit(Ended("worker-0", 1), history, now, POLICY)
        if isinstance(decision, End):
            break
        assert isinstance(decision, Restart)
        assert POLICY.first_delay_s - 1e-9 <= decision.at - now <= POLICY.longest_delay_s + 1e-9
        history = recorded(history, decision.at, now, POLICY)
        starts.append(decision.at)
        now = decision.at
    assert history.total == len(starts)
    for start in starts:
        within = [at for at in starts if start <= at < start + POLICY.window_s]
        assert len(within) <= POLICY.tries + 1  # the window is looked at when a process ends, not when it starts


def test_the_delay_doubles_with_each_restart_in_the_window() -> None:
    history, delays = History(), []
    for _ in range(3):
        decision = after_exit(Ended("worker-0", 1), history, 10.0, POLICY)
        assert isinstance(decision, Restart)
        delays.append(decision.at - 10.0)
        history = recorded(history, decision.at, 10.0, POLICY)
    assert delays == [0.5, 1.0, 2.0]


def test_the_guardian_kills_only_groups_that_were_announced_and_not_taken_back() -> None:
    assert living_groups(["+12\n", "+13\n", "-12\n", "nonsense\n", "+1\n", "+0\n", "+x\n"]) == {13}


def test_a_trainers_end_is_news_until_another_has_attached() -> None:
    """Its age, by which news leaves the view, counts from then."""
    news = News("trainer ended", 10.0, ended_epoch=7)
    for now in (20.0, 51.0):
        news = news.seen(7, now)
        assert news == News("trainer ended", now, ended_epoch=7)
    assert news.seen(8, 52.0) == News("trainer ended", 52.0)
    assert news.seen(8, 52.0).seen(8, 90.0).at == 52.0
    other = News("worker-1 ended", 10.0)
    assert other.seen(8, 20.0) is other
