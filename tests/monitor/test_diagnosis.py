"""Each verdict, and the figures that it comes from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.types import NEWEST, EngineRecord, EngineState, Snapshot, Tally
from services.local.report_waits import slow_side
from services.monitor.diagnosis import Diagnosis, Verdict, diagnose
from services.monitor.figures import settled

ENGINE = EngineRecord("engine-0", "http://e", EngineState.SERVING, 10)
RUNNING = Snapshot(
    time_ms=1_700_000_060_000,
    run="r",
    status="running",
    max_lag=4,
    groups_per_step=16,
    publish_interval=1,
    version=10,
    published=10,
    highest_version=10,
    step=10,
    durable_step=0,
    steps_total=100,
    epoch=1,
    admission_paused=False,
    groups=Tally(issued=180, generating=4, ready=16, trained=160),
    tokens=Tally(issued=1760, ready=160, trained=1600),
    payload_bytes=0,
    engines=(ENGINE,),
    workers={"w0": {}, "w1": {}},
)


EARLIER = replace(RUNNING, time_ms=RUNNING.time_ms - 60_000, tokens=Tally(trained=600))
CALM_STEP = {"step_s": 1.0, "gate_rate": 0.1, "log_ratio_abs_mean": 0.01, "ess": 0.95, "entropy": 1.0}
START_S = 31.0  # that a run's first step waited, while its engines started


def steps(number: int = 11, *, first: int = 1, version: int = 1, **figures: object) -> list[dict[str, object]]:
    """Records of the steps since the trainer attached, newest first; the first waited for the engines' start."""
    calm = {**CALM_STEP, "wait_s": 0.05, **figures}
    made = [{**calm, "step": first + n, "version": version + n} for n in range(number)]
    return [*made[:0:-1], {**made[0], "wait_s": START_S, "step_s": START_S + 1}]


CALM = steps()


def test_a_run_whose_figures_are_all_in_their_bands_is_healthy() -> None:
    assert diagnose(RUNNING, EARLIER, CALM).verdict is Verdict.HEALTHY


def test_nothing_is_concluded_from_nothing() -> None:
    assert diagnose(replace(RUNNING, tokens=Tally()), None, []).verdict is Verdict.HEALTHY


def beats(now: Snapshot, **seconds: float) -> Snapshot:
    """Two workers whose heartbeats are of now; each says that it has waited so long, by reason."""
    totals = {f"admission_wait_{reason}_seconds": value for reason, value in seconds.items()}
    stats: dict[str, float | int | str] = {"heartbeat_ms": now.time_ms, **totals}
    return replace(now, workers={"w0": stats, "w1": stats})


def waiting(share: float, now: Snapshot = RUNNING, *, bound: float = 3.0, number: int = 11) -> Diagnosis:
    """Of a run whose trainer waits for this share, while the bound held each worker back for so many seconds of 60."""
    return diagnose(beats(now, bound=bound), beats(EARLIER), steps(number, wait_s=share))


@pytest.mark.parametrize(("share", "advice"), [(0.7, "about twice as many engines"), (0.3, "about 1.5 times as many")])
def test_a_trainer_that_waits_is_starved_and_is_told_about_how_many_engines_it_takes(share: float, advice: str) -> None:
    found = waiting(share)
    assert found.verdict is Verdict.STARVED
    assert f"{share * 100:.0f} %" in found.headline
    assert f"use {advice}" in found.headline
    assert "if there are GPUs or idle cores for them, else raise rollout.conc" in found.headline


def test_a_trainer_that_waits_while_the_bound_held_workers_back_is_told_so_at_every_moment() -> None:
    """What is in flight goes up and down within a step; the advice does not."""
    full = replace(RUNNING, groups=Tally(issued=240, generating=80, trained=160))
    for now in (RUNNING, full):
        assert "raise lag.max above 4" in waiting(0.7, now, bound=30.0).headline
        assert "twice as many engines" in waiting(0.7, now, bound=3.0).headline


def test_the_start_of_the_engines_is_no_wait_and_few_steps_give_no_advice() -> None:
    """Step 11 of a run whose first step waited for 31 s, and each other for an eighth of its time."""
    eleven = waiting(0.125)
    assert (eleven.verdict, eleven.figures["trainer_wait_share"]) == (Verdict.HEALTHY, 0.125)
    for bound in (3.0, 30.0):
        for number in range(1, 11):
            early = waiting(0.9, bound=bound, number=number)
            assert early.findings == []
            assert early.headline.startswith(f"healthy so far: who waits for whom is told in {11 - number} step")
        assert waiting(0.9, bound=bound, number=11).verdict is Verdict.STARVED


def test_after_a_resume_the_steps_are_counted_anew() -> None:
    before = steps(20, wait_s=0.9)
    again = steps(10, first=21, version=22, wait_s=0.9)  # a trainer that attaches takes a version for itself
    workers = (beats(RUNNING, bound=30.0), beats(EARLIER))
    assert [record["step"] for record in settled([*again, *before])] == list(range(22, 31))
    assert diagnose(*workers, [*again, *before]).findings == []
    again = steps(11, first=21, version=22, wait_s=0.9)
    assert diagnose(*workers, [*again, *before]).figures["trainer_wait_share"] == pytest.approx(0.9)


def test_what_holds_workers_back_is_not_guessed_before_they_were_seen_for_a_while() -> None:
    for before in (None, beats(replace(EARLIER, time_ms=RUNNING.time_ms - 2000))):
        found = diagnose(beats(RUNNING, bound=1.9), before, steps(wait_s=0.7))
        assert "look again when workers were seen for 10 s" in found.headline


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(2, 40))
def test_verdict_and_report_never_contradict_each_other(trainer: float, bound: float, number: int) -> None:
    """Of the same waits; the report's words are those of services/local/report_waits.py."""
    headline = waiting(trainer, bound=60 * bound, number=number).headline
    waits = {"since_step": 1, "worker_s": 120.0, "by_reason": {"bound": 120.0 * bound}}
    report = slow_side(steps(number, wait_s=trainer), waits)
    if "engines if there" in headline:
        assert "more engines would help" in report
    if "raise lag.max above" in headline:
        assert "A higher lag.max overlaps them" in report
    if "saturated" in headline:
        assert "The trainer is the slow side" in report


def test_a_trainer_that_waits_while_memory_held_workers_back_is_not_told_to_add_engines() -> None:
    found = diagnose(beats(RUNNING, memory=30.0), beats(EARLIER), steps(wait_s=0.7))
    assert "raise redis.max_memory_mb" in found.headline


def test_workers_that_the_bound_or_memory_holds_back_are_saturated() -> None:
    found = diagnose(beats(RUNNING, bound=125.0, memory=20.0), beats(EARLIER, bound=100.0), CALM)
    assert found.verdict is Verdict.SATURATED
    assert found.figures["admission_blocked_share"] == pytest.approx(0.75)


def test_workers_that_wait_for_an_engine_are_sync_bound_and_not_saturated() -> None:
    found = diagnose(beats(RUNNING, engine=45.0), beats(EARLIER), CALM)
    assert [finding.verdict for finding in found.findings] == [Verdict.SYNC_BOUND]
    assert "75 % of their time for an engine" in found.headline


def test_a_wait_that_the_ledger_learns_of_late_counts_for_the_time_in_which_it_was() -> None:
    """A worker tells the ledger with its first submission: all of its first wait at once."""
    told = replace(beats(RUNNING, engine=60.0), counters={"admission_wait_engine_seconds": 120.0})
    assert diagnose(told, beats(EARLIER, engine=59.0), CALM).verdict is Verdict.HEALTHY


def test_the_time_of_a_worker_is_what_lies_between_its_heartbeats() -> None:
    silent = beats(replace(RUNNING, time_ms=RUNNING.time_ms - 30_000), engine=30.0)
    assert diagnose(replace(silent, time_ms=RUNNING.time_ms), beats(EARLIER), CALM).figures[
        "engine_wait_share"
    ] == pytest.approx(1.0)
    joined = replace(EARLIER, workers={})
    assert diagnose(beats(RUNNING, engine=60.0), joined, CALM).figures["engine_wait_share"] is None


def test_the_wait_for_the_first_engine_is_no_fault_of_weight_sync() -> None:
    starting = replace(beats(EARLIER), engines=(replace(ENGINE, state=EngineState.JOINING, version=-1),))
    found = diagnose(beats(RUNNING, engine=59.0), starting, CALM)
    assert (found.verdict, found.figures["engine_wait_share"]) == (Verdict.HEALTHY, None)


def filtered(groups: int, without: int, **more: Any) -> list[dict[str, object]]:
    return steps(groups=groups, groups_filtered=without, reward_mean=0.25, **more)[:4]


def test_groups_whose_rewards_are_all_equal_teach_nothing_and_that_is_said_with_what_to_change() -> None:
    found = diagnose(RUNNING, EARLIER, filtered(16, 15))
    assert found.verdict is Verdict.NO_GRADIENT
    assert "94 % of the trained groups have no gradient: their rewards are all equal, 0.25 on average" in found.headline
    assert "rollout.samples_per_prompt" in found.headline
    assert found.figures["filtered_share"] == pytest.approx(15 / 16)


def test_an_ordinary_share_of_equal_groups_is_no_finding_and_neither_is_one_of_a_handful_of_groups() -> None:
    assert diagnose(RUNNING, EARLIER, filtered(16, 14)).verdict is Verdict.HEALTHY
    assert diagnose(RUNNING, EARLIER, filtered(2, 2)).verdict is Verdict.HEALTHY


def test_equal_groups_that_workers_drop_before_they_are_trained_are_seen_too() -> None:
    now = replace(RUNNING, counters={"groups_filtered_by_workers": 120.0, "groups_accepted": 212.0})
    before = replace(EARLIER, counters={"groups_filtered_by_workers": 20.0, "groups_accepted": 208.0})
    found = diagnose(now, before, filtered(16, 0))
    assert found.verdict is Verdict.NO_GRADIENT
    assert "workers drop 96 % of their groups: their rewards are all equal" in found.headline


def counted(snapshot: Snapshot, failed: int, accepted: int) -> Snapshot:
    return replace(snapshot, counters={"groups_failed": float(failed), "groups_accepted": float(accepted)})


def test_groups_that_fail_are_the_verdict_and_it_says_where_their_reasons_are() -> None:
    found = diagnose(counted(RUNNING, 401, 0), counted(EARLIER, 101, 0), steps(wait_s=0.9))
    assert [finding.verdict for finding in found.findings] == [Verdict.FAILING, Verdict.STARVED]
    assert "100 % of the finished groups failed" in found.headline
    assert "`lagrange groups list RUN --state dead`" in found.headline
    assert "worker" in found.headline
    assert diagnose(counted(RUNNING, 401, 0), None, []).verdict is Verdict.FAILING


def test_failures_that_are_old_or_few_are_no_finding() -> None:
    for now, before in (((401, 400), (401, 200)), ((19, 0), (0, 0)), ((40, 60), (0, 0))):
        assert diagnose(counted(RUNNING, *now), counted(EARLIER, *before), CALM).verdict is Verdict.HEALTHY


RAISED = "ValueError: invalid literal for int() with base 10: 'seven'"


def judged(snapshot: Snapshot, rewarded: int, failed: int, name: str = "reward_failures") -> Snapshot:
    """Two workers that have judged so many samples together."""
    half: dict[str, float | int | str] = {
        "heartbeat_ms": snapshot.time_ms, "samples_rewarded": rewarded / 2, name: failed / 2, f"{name}{NEWEST}": RAISED,
    }  # fmt: skip
    return replace(snapshot, workers={"w0": half, "w1": half})


@pytest.mark.parametrize("name", ["reward_failures", "episode_failures"])
def test_samples_without_a_reward_are_the_verdict_before_a_wait_with_what_was_raised(name: str) -> None:
    now, before = judged(RUNNING, 1400, 1200, name), judged(EARLIER, 1000, 800, name)
    found = diagnose(now, before, steps(wait_s=0.7))
    assert [finding.verdict for finding in found.findings] == [Verdict.UNREWARDED, Verdict.STARVED]
    assert "50 % of the samples got no reward" in found.headline
    assert RAISED in found.headline
    assert "return 0" in found.headline


def test_failed_rewards_that_are_old_or_few_are_no_finding() -> None:
    for now, before in (((1500, 800), (1000, 800)), ((960, 40), (0, 0)), ((3, 3), (0, 0))):
        assert diagnose(judged(RUNNING, *now), judged(EARLIER, *before), CALM).verdict is Verdict.HEALTHY


def test_samples_that_come_less_often_than_once_a_minute_are_judged_since_the_workers_began() -> None:
    found = diagnose(judged(RUNNING, 30, 10), judged(EARLIER, 30, 10), CALM)
    assert (found.verdict, found.figures["unrewarded_share"]) == (Verdict.UNREWARDED, 0.25)


def test_workers_that_were_started_again_count_from_zero() -> None:
    found = diagnose(judged(RUNNING, 60, 20), judged(EARLIER, 5000, 0), CALM)
    assert found.figures["unrewarded_share"] == 0.25


def test_groups_that_fail_for_their_rewards_are_said_to() -> None:
    now = replace(judged(RUNNING, 0, 800), counters={"groups_failed": 400.0})
    found = diagnose(now, EARLIER, CALM)
    assert found.verdict is Verdict.FAILING
    assert "100 % of the finished groups failed: 100 % of the samples got no reward" in found.headline
    assert RAISED in found.headline


def test_a_policy_that_falls_apart_comes_before_rewards_that_are_equal() -> None:
    verdicts = [
        f.verdict
        for f in diagnose(RUNNING, EARLIER, steps(groups=16, groups_filtered=16, ess=0.1, wait_s=0.9)).findings
    ]
    assert verdicts == [Verdict.UNSTABLE, Verdict.NO_GRADIENT, Verdict.STARVED]


def test_a_full_queue_is_saturated() -> None:
    assert diagnose(replace(RUNNING, groups=Tally(ready=80)), EARLIER, CALM).verdict is Verdict.SATURATED


def test_an_engine_that_does_not_follow_is_sync_bound() -> None:
    assert (
        diagnose(replace(RUNNING, engines=(replace(ENGINE, version=8),)), EARLIER, CALM).verdict is Verdict.SYNC_BOUND
    )


def test_no_routable_engine_is_sync_bound() -> None:
    now = replace(RUNNING, engines=(replace(ENGINE, state=EngineState.QUARANTINED, version=-1),))
    assert "no engine is routable (quarantined)" in diagnose(now, EARLIER, CALM).headline


def test_an_engine_that_is_out_for_an_ordinary_update_is_no_finding() -> None:
    out = replace(ENGINE, state=EngineState.UPDATING, since_ms=RUNNING.time_ms - 2000)
    assert diagnose(replace(RUNNING, engines=(out,)), EARLIER, CALM).verdict is Verdict.HEALTHY
    stuck = replace(out, since_ms=RUNNING.time_ms - 60_000)
    assert diagnose(replace(RUNNING, engines=(stuck,)), EARLIER, CALM).verdict is Verdict.SYNC_BOUND


def test_a_run_without_an_engine_yet_has_no_verdict() -> None:
    assert diagnose(replace(RUNNING, engines=()), EARLIER, CALM).verdict is Verdict.NOT_RUNNING


ALONE = replace(RUNNING, groups=Tally(issued=164, generating=4, trained=160))
"""Too little is in flight for another step."""


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (replace(RUNNING, counters={"trainer_lease_left_ms": -90_000.0}), "no trainer: its lease ended 90 s ago"),
        (replace(ALONE, admission_paused=True), "admission is paused"),
        (replace(ALONE, workers={"w0": {"heartbeat_ms": RUNNING.time_ms - 31_000}}), "no rollout worker"),
    ],
)
def test_a_run_that_lacks_a_part_is_told_which_and_not_to_add_engines(now: Snapshot, says: str) -> None:
    found = diagnose(now, EARLIER, steps(wait_s=0.9))
    assert found.verdict is Verdict.NOT_RUNNING
    assert found.headline.startswith(says)


def test_while_there_is_enough_in_flight_for_a_step_a_pause_or_a_worker_that_ended_is_no_verdict() -> None:
    for now in (replace(RUNNING, admission_paused=True), replace(RUNNING, workers={})):
        assert diagnose(now, EARLIER, CALM).verdict is Verdict.HEALTHY


STALE = replace(RUNNING, tokens=Tally(trained=1600, stale=200))  # a sixth of the last minute's tokens


@pytest.mark.parametrize(
    ("counters", "share", "advice"),
    [
        ({"stale_at_attach": 96.0, "attachments": 2.0}, 1.0, "its log says why it ended"),
        ({"stale_at_pull": 96.0, "attachments": 2.0}, 1.0, "its log says why it ended"),
        ({"stale_at_attach": 50.0, "stale_at_submit": 50.0, "attachments": 2.0}, 0.5, "raise lag.max"),
        ({"stale_at_pull": 96.0, "attachments": 1.0}, 0.0, "raise lag.max"),  # its first start aged nothing
    ],
)
def test_what_a_restart_of_the_trainer_cost_is_told_from_what_the_bound_cost(
    counters: dict[str, float], share: float, advice: str
) -> None:
    found = diagnose(replace(STALE, counters=counters), EARLIER, CALM)
    assert found.verdict is Verdict.STALE
    assert found.figures["restart_stale_share"] == share
    assert advice in found.headline
    said = {1.0: "of 4, all of them as the trainer", 0.5: "of 4, 50 % of them as the", 0.0: "bound of 4; "}
    assert said[share] in found.headline


def test_a_restart_of_long_ago_is_not_the_cause_of_what_goes_stale_now() -> None:
    old = replace(EARLIER, counters={"stale_at_attach": 96.0, "attachments": 2.0})
    now = replace(STALE, counters={"stale_at_attach": 96.0, "attachments": 2.0, "stale_at_pull": 20.0})
    assert diagnose(now, old, CALM).figures["restart_stale_share"] == 0.0
    assert "raise lag.max" in diagnose(now, old, CALM).headline


def test_waste_of_the_last_minute_is_stale_and_old_waste_is_not() -> None:
    now = replace(RUNNING, tokens=Tally(trained=1600, stale=200))
    assert diagnose(now, EARLIER, CALM).verdict is Verdict.STALE
    assert diagnose(now, replace(EARLIER, tokens=Tally(trained=600, stale=200)), CALM).verdict is Verdict.HEALTHY


@pytest.mark.parametrize(
    "figure",
    [{"gate_rate": 0.9}, {"log_ratio_abs_mean": 2.0}, {"ess": 0.1}, {"entropy": 1e-9}, {"nonfinite_fraction": 0.01}],
)
def test_a_figure_of_the_loss_out_of_its_band_is_unstable_and_comes_before_all_else(figure: dict[str, Any]) -> None:
    found = diagnose(RUNNING, EARLIER, steps(wait_s=0.9, **figure))
    assert found.verdict is Verdict.UNSTABLE
    assert [f.verdict for f in found.findings] == [Verdict.UNSTABLE, Verdict.STARVED]


def test_all_figures_of_the_loss_that_are_out_of_their_bands_are_named() -> None:
    found = diagnose(RUNNING, EARLIER, steps(gate_rate=0.9, ess=0.1, entropy=1e-9))
    assert found.headline == (
        "unstable: SAT gates 90 % of the tokens, the effective sample size is 10 % of the tokens, the policy's entropy "
        "is 1e-09; lower trainer.optimizer.learning_rate or lag.max; set trainer.loss.entropy_coefficient"
    )


@pytest.mark.parametrize("figure", [{"gate_rate": 0.9}, {"nonfinite_fraction": 0.01}])
def test_what_the_trainer_writes_of_sat_in_a_part_of_its_record_is_seen(figure: dict[str, float]) -> None:
    calm = {key: value for key, value in CALM[0].items() if key != "gate_rate"}
    assert diagnose(RUNNING, EARLIER, [{**calm, "sat": figure}]).verdict is Verdict.UNSTABLE


def test_a_run_that_does_not_run_has_no_verdict() -> None:
    assert diagnose(replace(RUNNING, status="finished"), EARLIER, CALM).verdict is Verdict.NOT_RUNNING
