"""Engines, versions, snapshots and memory on a real Redis, one behaviour a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.errors import SchemaMismatch
from broker.queue import Broker
from broker.types import (
    EngineRecord,
    EngineState,
    LagCount,
)
from tests.broker.helpers import ENGINE, WORKER, Run, reason, wait_for
from tests.conftest import ConfigFactory


def test_an_engine_is_updated_only_from_the_expected_state(broker: Broker) -> None:
    record = EngineRecord("e", "http://e", EngineState.JOINING)
    assert not broker.update_engine(record)
    broker.register_engine(record)
    assert not broker.update_engine(replace(record, state=EngineState.SERVING, version=3), EngineState.UPDATING)
    assert broker.update_engine(replace(record, state=EngineState.SERVING, version=3), EngineState.JOINING)
    (seen,) = broker.engines()
    assert (seen.state, seen.version, seen.routable) == (EngineState.SERVING, 3, True)
    assert seen.heartbeat_ms > 0
    broker.remove_engine("e")
    assert broker.engines() == ()


def test_an_event_says_why_an_engine_is_gone_and_no_version_that_it_never_had(broker: Broker, run: Run) -> None:
    broker.register_engine(EngineRecord("new", "http://new", EngineState.JOINING, -1))
    broker.register_engine(EngineRecord("new", "http://new", EngineState.GONE, -1, detail="port 8000 is in use"))
    broker.register_engine(EngineRecord(ENGINE, "http://engine", EngineState.GONE, 0))
    said = [event["text"] for event in broker.events(3)]
    assert said == [f"{ENGINE} is gone at version 0", "new is gone: port 8000 is in use", "new is joining"]


def test_a_role_is_free_after_the_time_that_is_asked_for_although_its_hold_ends_later(broker: Broker) -> None:
    assert broker.hold("weight-sync", "gone", 3600) == "gone"  # as one that was taken before the clock was set back
    assert broker.hold("weight-sync", "next", 0.03) == "gone"
    wait_for(lambda: broker.hold("weight-sync", "next", 0.03) == "next")


def test_versions_are_listed_and_forgotten(run: Run) -> None:
    run.train()
    assert [v.version for v in run.broker.versions()] == [0, 1]
    newest = run.broker.published()
    assert newest is not None
    assert newest.version == 1
    assert newest.published_ms > 0
    run.broker.forget_version(0)
    assert [v.version for v in run.broker.versions()] == [1]


def test_a_snapshot_shows_the_whole_run(run: Run) -> None:
    run.train()
    run.ready(2)
    run.broker.heartbeat_worker(WORKER, {"groups": 3})
    seen = run.broker.snapshot()
    assert seen.run == run.broker.run_id
    assert (seen.status, seen.version, seen.published, seen.step) == ("running", 1, 1, 1)
    assert (seen.groups.issued, seen.groups.ready, seen.groups.trained) == (4, 2, 2)
    assert seen.ready_by_version == {1: LagCount(2, 16)}
    assert seen.oldest_ready_ms >= 0
    assert 0 <= seen.mean_ready_ms <= seen.oldest_ready_ms
    assert seen.workers[WORKER]["groups"] == 3
    assert seen.engines[0].version == 1
    assert [e["kind"] for e in run.broker.events(1)] == ["engine"]
    assert run.broker.metrics_history() == [{"loss": 0.5}]


@pytest.mark.parametrize("record", [b"garbage", b"\xff", b"[]", b"{}"])
@pytest.mark.parametrize("name", ["engines", "versions"])
def test_a_record_that_does_not_read_as_one_is_an_error_of_the_broker(run: Run, name: str, record: bytes) -> None:
    run.broker._connection.client.hset(f"lagrange:{{{run.broker.run_id}}}:{name}", "other", record)
    for read in (run.broker.snapshot, getattr(run.broker, name)):
        with pytest.raises(SchemaMismatch, match="from one release"):
            read()


def test_a_worker_that_writes_garbage_of_itself_ends_nobody_who_looks(run: Run) -> None:
    run.broker._connection.client.hset(f"lagrange:{{{run.broker.run_id}}}:workers", b"\xff", b"\xff{")
    with pytest.raises(SchemaMismatch, match="from one release"):
        run.broker.snapshot()


def test_memory_at_the_limit_holds_producers_back_and_frees_rollback_payloads_first(
    run: Run, make_config: ConfigFactory
) -> None:
    run.broker.set_max_lag(8)
    run.train()
    held = run.broker.snapshot().payload_bytes
    run.broker._connection.client.hset(run.broker._keys.policy, "max_bytes", held)
    run.ready(2)
    assert reason(run.broker.admit(WORKER, ENGINE)) == "memory"
    seen = run.broker.snapshot()
    assert seen.counters["payloads_freed_early"] == 2
    state = run.broker.attach_trainer(checkpoint_step=0, checkpoint_version=0)
    assert state.returned == 0
    assert run.broker.snapshot().groups.failed == 2
    run.assert_closed()
