"""Admission, submission and leases on a real Redis, one behaviour a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.errors import WrongRun
from broker.queue import Broker
from broker.types import (
    EngineRecord,
    EngineState,
    InvalidTrajectory,
    LagCount,
)
from tests.broker.helpers import ENGINE, WORKER, Run, finished, reason
from tests.conftest import ConfigFactory


def test_no_group_is_admitted_before_a_version_is_published(broker: Broker) -> None:
    broker.register_engine(EngineRecord(ENGINE, "http://engine", EngineState.SERVING, 0))
    assert reason(broker.admit(WORKER, ENGINE)) == "no-trainer"


@pytest.mark.parametrize("state", [s for s in EngineState if s is not EngineState.SERVING])
def test_only_a_serving_engine_is_admitted_to(run: Run, state: EngineState) -> None:
    run.broker.register_engine(EngineRecord(ENGINE, "http://engine", state, 0))
    assert reason(run.broker.admit(WORKER, ENGINE)) == "engine"
    assert reason(run.broker.admit(WORKER, "unknown")) == "engine"


def test_admission_stops_at_the_bound_in_groups(run: Run) -> None:
    for _ in range(4):
        run.admit()
    assert reason(run.broker.admit(WORKER, ENGINE)) == "bound"


def test_admission_stops_when_the_engine_is_too_far_behind(run: Run) -> None:
    run.ready(4)
    run.step(run.pull())
    run.step(run.pull())
    # version 2, engine at 0, nothing in flight, max_lag 1
    assert reason(run.broker.admit(WORKER, ENGINE)) == "bound"
    run.publish()
    run.admit()


def test_a_bound_of_zero_is_synchronous(redis_url: str, broker: Broker, make_config: ConfigFactory) -> None:
    run = Run(broker).start()
    broker.set_max_lag(0)
    run.ready(2)
    assert reason(broker.admit(WORKER, ENGINE)) == "bound"
    run.step(run.pull())
    assert reason(broker.admit(WORKER, ENGINE)) == "bound"
    run.publish()
    run.admit()


def test_no_more_groups_are_started_than_the_last_steps_need(run: Run, make_config: ConfigFactory) -> None:
    run.broker.initialise(make_config(**{"run.steps": 1}))
    run.ready(2)
    assert reason(run.broker.admit(WORKER, ENGINE)) == "bound"
    run.step(run.pull())
    run.broker.commit(run.epoch, 1)
    assert reason(run.broker.admit(WORKER, ENGINE)) == "finished"


def test_pausing_and_ending_a_run_stop_admission(run: Run) -> None:
    run.broker.steer("pause")
    assert reason(run.broker.admit(WORKER, ENGINE)) == "paused"
    run.broker.steer("resume")
    run.broker.set_status("draining")
    assert reason(run.broker.admit(WORKER, ENGINE)) == "paused"
    run.broker.set_status("stopped")
    assert reason(run.broker.admit(WORKER, ENGINE)) == "finished"


def test_prompts_are_issued_in_order_and_returned_ones_first(run: Run) -> None:
    first, second = run.admit(), run.admit()
    assert (first.prompt_index, second.prompt_index) == (0, 1)
    assert second.group_id > first.group_id
    assert run.broker.release(second.group_id, WORKER)
    assert run.broker.fail(first.group_id, WORKER, "engine died", tokens=7)
    again, other = run.admit(), run.admit()
    assert (again.prompt_index, again.attempt) == (0, 1)
    assert (other.prompt_index, other.attempt) == (1, 0)
    run.assert_closed()
    assert run.broker.snapshot().tokens.failed == 7


def test_a_group_is_refused_when_its_oldest_token_is_one_version_past_the_bound(run: Run) -> None:
    late, in_time = run.admit(), run.admit()
    run.ready(2)
    run.step(run.pull())
    assert run.broker.submit(finished(in_time, run.broker.run_id)) == "accepted"
    run.broker.set_max_lag(0)
    assert reason(run.broker.submit(finished(late, run.broker.run_id))) == "stale"
    assert run.broker.snapshot().groups.stale == 1
    run.assert_closed()


def test_submitting_twice_counts_once(run: Run) -> None:
    ticket = run.admit()
    group = finished(ticket, run.broker.run_id)
    assert run.broker.submit(group, stats={"retries": 2}) == "accepted"
    assert run.broker.submit(group, stats={"retries": 2}) == "accepted"
    seen = run.broker.snapshot()
    assert (seen.groups.ready, seen.counters["groups_accepted"], seen.counters["retries"]) == (1, 1, 2)
    assert len(run.broker.fetch([ticket.group_id])) == 1


def test_a_group_that_another_worker_holds_is_refused(run: Run) -> None:
    ticket = run.admit()
    assert reason(run.broker.submit(finished(ticket, run.broker.run_id, worker="thief"))) == "closed"
    assert not run.broker.fail(ticket.group_id, "thief", "x")
    assert not run.broker.release(ticket.group_id, "thief")
    assert run.broker.renew("thief", [ticket.group_id]) == ()
    assert run.broker.submit(finished(ticket, run.broker.run_id)) == "accepted"


def test_a_payload_of_another_run_or_without_samples_never_enters(run: Run) -> None:
    ticket = run.admit()
    with pytest.raises(WrongRun, match="another"):
        run.broker.submit(finished(ticket, "another"))
    with pytest.raises(InvalidTrajectory):
        run.broker.submit(replace(finished(ticket, run.broker.run_id), trajectories=()))


def test_a_group_without_trainable_tokens_is_as_old_as_the_trainer(run: Run) -> None:
    run.train()
    ticket = run.admit()
    assert run.broker.submit(finished(ticket, run.broker.run_id, version=0, trainable=False)) == "accepted"
    assert run.broker.snapshot().ready_by_version == {1: LagCount(1, 0)}


def test_an_expired_lease_returns_the_prompt_and_closes_the_group(run: Run, make_config: ConfigFactory) -> None:
    run.broker.initialise(make_config(**{"rollout.lease_s": 60.0}))
    lost = run.admit()
    run.set_clock(61)
    again = run.admit()
    assert (again.prompt_index, again.attempt) == (lost.prompt_index, 1)
    assert run.broker.renew(WORKER, [lost.group_id]) == ()
    assert reason(run.broker.submit(finished(lost, run.broker.run_id))) == "closed"
    run.assert_closed()


def test_a_renewed_lease_holds(run: Run, make_config: ConfigFactory) -> None:
    run.broker.initialise(make_config(**{"rollout.lease_s": 60.0}))
    ticket = run.admit()
    run.set_clock(40)
    assert run.broker.renew(WORKER, [ticket.group_id]) == (ticket.group_id,)
    run.set_clock(21)  # past the end of the lease that was given first
    run.admit()
    assert run.broker.snapshot().groups.failed == 0


def test_groups_of_a_worker_that_is_gone_wait_for_one_lease_although_the_clock_was_set_back(
    run: Run, make_config: ConfigFactory
) -> None:
    run.broker.initialise(make_config(**{"rollout.lease_s": 60.0}))
    run.admit()
    run.set_clock(-3600)
    for later, expired in ((0, 0), (61, 1)):
        run.set_clock(later)
        assert reason(run.broker.pull(run.epoch, run.version, 2)) == "starved"
        assert run.counter("leases_expired") == expired
    run.assert_closed()


def test_a_worker_may_hold_more_groups_than_lua_unpacks(run: Run) -> None:
    ticket = run.admit()
    assert run.broker.renew(WORKER, [*range(9000), ticket.group_id]) == (ticket.group_id,)


def test_a_poison_prompt_becomes_a_dead_letter_and_can_be_requeued(run: Run) -> None:
    for attempt in range(4):
        ticket = run.admit()
        assert (ticket.prompt_index, ticket.attempt) == (0, attempt)
        run.broker.fail(ticket.group_id, WORKER, "always fails")
    (letter,) = run.broker.dead_letters()
    assert (letter["prompt_index"], letter["attempt"], letter["reason"]) == (0, 3, "always fails")
    assert run.admit().prompt_index == 1
    assert run.broker.requeue(0).done
    assert run.broker.requeue(0).reason == "no-dead-letter"
    ticket = run.admit()
    assert (ticket.prompt_index, ticket.attempt) == (0, 0)
    run.assert_closed()
