"""Pull, step, commit, attachment and fencing on a real Redis, one behaviour a test."""

from __future__ import annotations

from contextlib import closing

import pytest

from broker.errors import CorruptPayload, Fenced, NotInitialised, NotLeased, SchemaMismatch, VersionMismatch
from broker.queue import Broker
from broker.types import (
    EngineRecord,
    EngineState,
    LagCount,
    Outcome,
    PromptCursor,
    Refused,
    VersionRecord,
)
from tests.broker.helpers import ENGINE, WORKER, Run, finished, reason, wait_for
from tests.conftest import ConfigFactory


def test_a_pull_waits_until_a_whole_batch_is_ready(run: Run) -> None:
    run.ready(1)
    assert reason(run.broker.pull(run.epoch, run.version, 2)) == "starved"


def test_whoever_waits_for_a_batch_is_told_when_it_is_whole_and_not_before(run: Run) -> None:
    heard: list[str] = []
    with closing(run.broker.listen_for_batches(heard.append)):
        wait_for(lambda: heard == ["listening"])
        run.ready(1)
        run.ready(1)
        wait_for(lambda: len(heard) > 1)
    assert heard == ["listening", "ready 2"]


def test_a_pull_takes_the_oldest_groups_first(run: Run) -> None:
    run.broker.set_max_lag(4)
    old = run.ready(3)
    run.step(run.pull())
    run.publish()
    run.ready(1)
    assert run.pull()[0].group_id == old[2].group_id


def test_a_pull_of_no_groups_leases_none(run: Run) -> None:
    run.ready(2)
    assert run.pull(0) == ()
    assert run.broker.snapshot().groups.ready == 2


def test_groups_past_the_bound_go_stale_at_the_pull_and_their_prompts_are_issued_again(run: Run) -> None:
    tickets = run.ready(4)
    run.step(run.pull())
    run.publish()
    run.broker.set_max_lag(0)
    assert reason(run.broker.pull(run.epoch, run.version, 2)) == "starved"
    seen = run.broker.snapshot()
    assert (seen.groups.stale, seen.tokens.stale) == (2, 16)
    again = run.admit()
    assert (again.prompt_index, again.attempt) == (tickets[2].prompt_index, 1)
    run.assert_closed()


def test_a_pull_waits_for_a_group_that_would_go_stale_by_it(run: Run, make_config: ConfigFactory) -> None:
    slow = run.admit()
    run.ready(2)
    run.step(run.pull())
    run.publish()
    run.ready(2)  # version 1, engine at 1; `slow` must be trained now
    assert reason(run.broker.pull(run.epoch, run.version, 2)) == "straggler"
    assert run.broker.submit(finished(slow, run.broker.run_id)) == "accepted"
    assert slow.group_id in [d.group_id for d in run.pull()]


def test_a_later_deadline_is_waited_for_exactly_when_more_are_late_than_the_steps_until_then_take(run: Run) -> None:
    run.broker.set_max_lag(2)
    slow = [run.admit() for _ in range(3)]  # of version 0: to be trained by version 2
    run.ready(2)
    run.step(run.pull())
    run.publish()
    run.ready(2)
    assert reason(run.broker.pull(run.epoch, run.version, 2)) == "straggler"  # 3 are late, the step at 2 takes 2
    assert run.broker.submit(finished(slow[0], run.broker.run_id)) == "accepted"
    assert slow[0].group_id in {d.group_id for d in run.pull()}


@pytest.mark.parametrize("set_back_s", [0, 3600])
def test_waiting_for_stragglers_is_bounded(run: Run, make_config: ConfigFactory, set_back_s: int) -> None:
    slow = run.admit()
    run.ready(2)
    run.step(run.pull())
    run.publish()
    run.ready(2)
    assert reason(run.broker.pull(run.epoch, run.version, 2)) == "straggler"
    run.set_clock(-set_back_s)
    run.broker.initialise(make_config(**{"rollout.lease_s": 1.0, "lag.straggler_wait_s": 1.0}))

    def pulled() -> bool:
        assert run.broker.renew(WORKER, [slow.group_id]) == (slow.group_id,)
        return not isinstance(run.broker.pull(run.epoch, run.version, 2), Refused)

    wait_for(pulled)
    assert run.broker.snapshot().counters["stragglers_left_behind"] == 1


def test_a_step_moves_version_and_ledger_and_repeating_it_changes_nothing(run: Run) -> None:
    run.ready(2)
    batch = run.pull()
    outcomes = [Outcome(batch[0].group_id), Outcome(batch[1].group_id, filtered=True)]
    run.broker.step(run.epoch, 0, outcomes, {0: 8}, {"loss": float("nan")})
    assert run.broker.prompt_cursor(run.epoch, 1) == PromptCursor(2, ())
    before = run.broker.snapshot()
    run.broker.step(run.epoch, 0, outcomes, {0: 8}, {"loss": 0.1})
    after = run.broker.snapshot()
    assert (before.version, before.step, before.groups) == (after.version, after.step, after.groups)
    assert (after.version, after.step, after.groups.trained, after.groups.filtered) == (1, 1, 1, 1)
    assert after.trained_by_lag == {0: LagCount(1, 8)}
    assert after.metrics == {"loss": None}
    run.assert_closed()


def test_a_step_names_only_leased_groups(run: Run) -> None:
    run.ready(3)
    batch = run.pull()
    waiting = next(t for t in run.broker.snapshot().ready_by_version)
    assert waiting == 0
    with pytest.raises(NotLeased):
        run.broker.step(run.epoch, 0, [Outcome(batch[0].group_id), Outcome(1)], {}, {})
    with pytest.raises(NotLeased):
        run.broker.step(run.epoch, 0, [Outcome(batch[0].group_id), Outcome(batch[0].group_id)], {}, {})
    assert run.broker.snapshot().groups.leased == 2


def test_a_leased_group_that_a_step_leaves_out_returns_to_the_queue(run: Run) -> None:
    run.ready(2)
    batch = run.pull()
    run.broker.step(run.epoch, 0, [Outcome(batch[0].group_id)], {}, {})
    seen = run.broker.snapshot()
    assert (seen.groups.leased, seen.groups.ready, seen.groups.trained) == (0, 1, 1)


def test_a_version_that_does_not_continue_the_recorded_one_is_refused(run: Run) -> None:
    run.ready(2)
    with pytest.raises(VersionMismatch):
        run.broker.pull(run.epoch, 5, 2)
    batch = run.pull()
    with pytest.raises(VersionMismatch):
        run.broker.step(run.epoch, 3, [Outcome(d.group_id) for d in batch], {}, {})
    with pytest.raises(VersionMismatch):
        run.broker.commit(run.epoch, 9)
    with pytest.raises(VersionMismatch):
        run.broker.publish(run.epoch, VersionRecord(9, 9, "w", "c"))


def test_a_durable_step_frees_records_and_payloads(run: Run) -> None:
    batch = run.train()
    assert run.broker.snapshot().payload_bytes > 0
    assert run.broker.commit(run.epoch, 1) == 2
    assert run.broker.commit(run.epoch, 1) == 0
    seen = run.broker.snapshot()
    assert (seen.payload_bytes, seen.groups.trained, seen.groups.durable, seen.durable_step) == (0, 2, 2, 1)
    with pytest.raises(CorruptPayload, match="missing"):
        run.broker.fetch([batch[0].group_id])
    run.assert_closed()


def test_retention_prompt_frees_payloads_at_the_step_and_reissues_prompts_after_a_rollback(
    run: Run, make_config: ConfigFactory
) -> None:
    run.broker.initialise(make_config(**{"trainer.retention": "prompt"}))
    batch = run.train()
    assert run.broker.snapshot().payload_bytes == 0
    state = run.broker.attach_trainer(checkpoint_step=0, checkpoint_version=0)
    assert (state.returned, run.broker.snapshot().groups.failed) == (0, 2)
    run.epoch, run.version = state.epoch, run.broker.name_version(state.epoch)
    run.publish()
    assert {run.admit().prompt_index, run.admit().prompt_index} == {d.prompt_index for d in batch}
    run.assert_closed()


def test_a_rejected_group_is_failed_and_a_dead_letter(run: Run) -> None:
    run.ready(2)
    batch = run.pull()
    assert run.broker.reject(run.epoch, batch[0].group_id, "checksum")
    assert not run.broker.reject(run.epoch, batch[0].group_id, "checksum")
    assert run.broker.snapshot().dead_letters == 1
    run.assert_closed()


def test_an_aborted_step_puts_its_batch_back(run: Run) -> None:
    run.ready(2)
    batch = run.pull()
    assert run.broker.return_leased(run.epoch) == 2
    assert run.pull() == batch


def test_payloads_come_back_as_they_were(run: Run, redis_url: str) -> None:
    (ticket,) = run.ready(1)
    (group,) = run.broker.fetch([ticket.group_id])
    assert (group.group_id, group.prompt_index, group.worker) == (ticket.group_id, 0, WORKER)
    client = run.broker._connection.client
    key = run.broker._keys.payload(ticket.group_id)
    assert client.ttl(key) == -1
    client.setrange(key, 200, b"\xff\xfe\xfd")
    with pytest.raises(CorruptPayload, match="checksum"):
        run.broker.fetch([ticket.group_id])


def test_a_new_trainer_fences_the_old_one_out_of_everything(run: Run) -> None:
    run.ready(2)
    run.pull()
    old, new = run.epoch, run.broker.attach_trainer(checkpoint_step=0, checkpoint_version=0)
    assert new.epoch > old
    assert new.returned == 2
    for act in (
        lambda: run.broker.pull(old, 0, 2),
        lambda: run.broker.step(old, 0, [], {}, {}),
        lambda: run.broker.commit(old, 0),
        lambda: run.broker.name_version(old),
        lambda: run.broker.publish(old, VersionRecord(0, 0, "w", "c")),
        lambda: run.broker.renew_trainer(old),
        lambda: run.broker.return_leased(old),
        lambda: run.broker.reject(old, 1, "x"),
    ):
        with pytest.raises(Fenced) as caught:
            act()
        assert caught.value.holder == new.epoch


def test_a_restart_keeps_what_the_checkpoint_trained_and_returns_the_rest(run: Run) -> None:
    run.broker.set_max_lag(4)
    first, second = run.train(), run.train()
    state = run.broker.attach_trainer(
        checkpoint_step=1, checkpoint_version=1, consumed=[d.group_id for d in first], cursor=PromptCursor(2, ())
    )
    assert (state.step, state.highest_version, state.returned) == (1, 2, 2)
    seen = run.broker.snapshot()
    assert (seen.groups.durable, seen.groups.trained, seen.groups.ready) == (2, 2, 2)
    assert seen.trained_by_lag == {0: LagCount(2, 16)}
    run.epoch, run.version = state.epoch, run.broker.name_version(state.epoch)
    assert run.version == 3
    assert {d.group_id for d in run.pull()} == {d.group_id for d in second}
    run.assert_closed()


def test_a_step_that_the_checkpoint_has_and_redis_lost_is_not_trained_again(run: Run) -> None:
    run.ready(2)
    batch = run.pull()  # the step was taken and saved, but never recorded
    state = run.broker.attach_trainer(
        checkpoint_step=1,
        checkpoint_version=1,
        consumed=[d.group_id for d in batch],
        cursor=PromptCursor(2, ()),
    )
    seen = run.broker.snapshot()
    assert (state.step, seen.groups.durable, seen.groups.ready, seen.version) == (1, 2, 0, 1)
    run.assert_closed()


def test_an_empty_redis_takes_the_prompts_of_the_checkpoint(redis_url: str, broker: Broker) -> None:
    state = broker.attach_trainer(
        checkpoint_step=7, checkpoint_version=9, consumed=[1, 2, 3], cursor=PromptCursor(20, (11, 13))
    )
    assert (state.step, state.highest_version) == (7, 9)
    run = Run(broker, state.epoch, broker.name_version(state.epoch))
    run.publish()
    assert run.version == 10
    assert [run.admit().prompt_index for _ in range(3)] == [11, 13, 20]


def test_a_version_is_never_named_twice_even_if_only_an_engine_remembers_it(run: Run) -> None:
    run.broker.register_engine(EngineRecord("other", "http://other", EngineState.SERVING, 41))
    assert run.broker.name_version(run.epoch) == 42


def test_a_flushed_redis_is_told_apart_from_an_idle_one(run: Run) -> None:
    run.broker._connection.client.flushall()
    with pytest.raises(NotInitialised, match="not in Redis"):
        run.broker.admit(WORKER, ENGINE)
    with pytest.raises(NotInitialised):
        run.broker.snapshot()


def test_data_of_another_schema_is_refused(broker: Broker, make_config: ConfigFactory) -> None:
    broker._connection.client.hset(broker._keys.policy, "schema", "999")
    with pytest.raises(SchemaMismatch, match="999"):
        broker.initialise(make_config())
