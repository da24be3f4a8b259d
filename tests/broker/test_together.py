"""Two transitions in one script: what they do is what one after the other does, and they are refused as these are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.connection import Connection
from broker.errors import CorruptPayload, Fenced, NotInitialised, NotLeased, VersionMismatch
from broker.queue import Broker
from broker.server import EmbeddedServer
from broker.types import Batch, EngineRecord, EngineState, Outcome, Refused
from tests.broker.helpers import ENGINE, WORKER, Run, finished
from tests.conftest import RUN, ConfigFactory


def outcomes(batch: Batch) -> list[Outcome]:
    return [Outcome(d.group_id) for d in batch.deliveries]


def batch_of(answer: Batch | Refused) -> Batch:
    assert isinstance(answer, Batch), answer
    return answer


@pytest.fixture
def four(broker: Broker, make_config: ConfigFactory) -> Run:
    """A run of one group a step with room for four, all of them ready."""
    broker.initialise(make_config(**{"trainer.groups_per_step": 1}))
    broker.set_max_lag(3)
    run = Run(broker).start()
    run.ready(4)
    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of the plain commands of each round trip."""
    seen: list[list[str]] = []
    exchange = Connection._exchange

    def noted(self: Connection, commands: Sequence[Any]) -> list[Any]:
        seen.append([str(command[0]) for command in commands])
        return exchange(self, commands)

    monkeypatch.setattr(Connection, "_exchange", noted)
    return seen


def test_a_step_brings_the_next_batch_in_the_same_round_trip_if_it_was_foreseen(
    four: Run, asked: list[list[str]]
) -> None:
    broker = four.broker
    ids = [g.group_id for g in broker.groups("ready")]
    batch = batch_of(broker.pull_batch(four.epoch, 0, 1))
    assert list(batch.ahead) == ids[1:2]
    batch = batch_of(broker.step_and_pull(four.epoch, 0, outcomes(batch), {0: 8}, {"loss": 1}, 1, batch.ahead))
    asked.clear()  # now that the script is loaded
    batch = batch_of(broker.step_and_pull(four.epoch, 1, outcomes(batch), {1: 8}, {"loss": 1}, 1, batch.ahead))
    assert asked == [["MGET", "EVALSHA"]]
    assert [g.group_id for g in batch.groups] == [d.group_id for d in batch.deliveries] == ids[2:3]
    assert list(batch.ahead) == ids[3:]
    assert (broker.snapshot().step, broker.snapshot().version) == (2, 2)
    four.version = 2
    four.assert_closed()


@pytest.mark.parametrize("ahead", [(), (10**15,), "another"])
def test_a_batch_that_was_not_foreseen_is_fetched(four: Run, ahead: tuple[int, ...] | str) -> None:
    batch = batch_of(four.broker.pull_batch(four.epoch, 0, 1))
    first, second = batch.ahead[0], four.broker.groups("ready")[1].group_id
    foreseen = (second,) if ahead == "another" else tuple(map(int, ahead))
    batch = batch_of(four.broker.step_and_pull(four.epoch, 0, outcomes(batch), {}, {}, 1, foreseen))
    assert [g.group_id for g in batch.groups] == [first]


def test_a_step_that_is_refused_pulls_nothing(four: Run) -> None:
    broker, batch = four.broker, batch_of(four.broker.pull_batch(four.epoch, 0, 1))
    before = broker.snapshot()
    with pytest.raises(VersionMismatch):
        broker.step_and_pull(four.epoch, 7, outcomes(batch), {}, {}, 1)
    with pytest.raises(NotLeased):
        broker.step_and_pull(four.epoch, 0, [Outcome(batch.ahead[0])], {}, {}, 1)
    with pytest.raises(Fenced):
        broker.step_and_pull(four.epoch - 1, 0, outcomes(batch), {}, {}, 1)
    after = broker.snapshot()
    assert (after.groups, after.step, after.version) == (before.groups, before.step, before.version)


def test_a_step_that_is_refused_pulls_nothing_though_its_next_version_is_the_recorded_one(four: Run) -> None:
    """Weights of a restored checkpoint got a name meanwhile."""
    broker, batch = four.broker, batch_of(four.broker.pull_batch(four.epoch, 0, 1))
    assert broker.name_version(four.epoch) == 1
    with pytest.raises(VersionMismatch):
        broker.step_and_pull(four.epoch, 0, outcomes(batch), {}, {}, 1)
    assert [g.group_id for g in broker.groups("leased")] == [d.group_id for d in batch.deliveries]


def test_a_payload_that_was_not_there_when_it_was_looked_for_is_fetched(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder: the record has no file yet when it is read, and the group is ready when the batch is chosen."""
    folder = {"redis.payloads": "folder", "redis.payload_folder": str(tmp_path)}
    broker.initialise(make_config(**{"trainer.groups_per_step": 1}, **folder))
    run = Run(broker).start()
    run.ready(1)
    late, batch = run.admit(), batch_of(broker.pull_batch(run.epoch, 0, 1))
    connection = broker._connection

    def between(before: Sequence[Any], *call: Any) -> tuple[list[Any], list[Any]]:
        monkeypatch.undo()
        found = connection.commands(before)
        assert broker.submit(finished(late, RUN)) == "accepted"
        return found, connection.call_after([], *call)[1]

    monkeypatch.setattr(connection, "call_after", between)
    batch = batch_of(broker.step_and_pull(run.epoch, 0, outcomes(batch), {}, {}, 1, [late.group_id]))
    assert [g.group_id for g in batch.groups] == [late.group_id]


def test_of_a_batch_that_was_foreseen_in_part_the_rest_is_fetched(four: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, fetched = four.broker, list[int]()
    batch = batch_of(broker.pull_batch(four.epoch, 0, 1))
    ids = [g.group_id for g in broker.groups("ready")]
    fetch = broker.fetch_bytes

    def noted(group_ids: Sequence[int]) -> list[bytes | memoryview]:
        fetched.extend(group_ids)
        return fetch(group_ids)

    monkeypatch.setattr(broker, "fetch_bytes", noted)
    batch = batch_of(broker.step_and_pull(four.epoch, 0, outcomes(batch), {}, {}, 2, [ids[1]]))
    assert [g.group_id for g in batch.groups] == ids[:2]
    assert fetched == ids[:1]


def test_a_step_is_recorded_though_no_batch_follows(broker: Broker, make_config: ConfigFactory) -> None:
    broker.initialise(make_config(**{"trainer.groups_per_step": 1}))
    run = Run(broker).start()
    run.ready(1)
    batch = batch_of(broker.pull_batch(run.epoch, 0, 1))
    answer = broker.step_and_pull(run.epoch, 0, outcomes(batch), {}, {}, 1, batch.ahead)
    assert isinstance(answer, Refused)
    assert answer.reason == "starved"
    assert (broker.snapshot().step, batch.ahead) == (1, ())


def test_a_repeated_step_and_pull_gets_the_same_batch(four: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the answer was lost on the way and the connection asks again."""
    broker, batch = four.broker, batch_of(four.broker.pull_batch(four.epoch, 0, 1))
    call_after = broker._connection.call_after
    twice: list[Any] = []

    def lost(*arguments: Any) -> tuple[list[Any], list[Any]]:
        twice.extend([call_after(*arguments), call_after(*arguments)])
        return twice[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(broker._connection, "call_after", lost)
    after = batch_of(broker.step_and_pull(four.epoch, 0, outcomes(batch), {}, {}, 1, batch.ahead))
    (_, (_, first)), (_, (_, second)) = twice
    assert first[2:] == second[2:]
    assert [d.group_id for d in after.deliveries] == list(batch.ahead[:1])
    assert (broker.snapshot().step, broker.snapshot().groups.leased) == (1, 1)


def test_a_payload_that_cannot_be_read_leaves_a_recorded_step_and_a_batch_to_give_back(four: Run) -> None:
    broker, batch = four.broker, batch_of(four.broker.pull_batch(four.epoch, 0, 1))
    broker._connection.client.set(broker._keys.payload(batch.ahead[0]), b"nonsense")
    with pytest.raises(CorruptPayload) as caught:
        broker.step_and_pull(four.epoch, 0, outcomes(batch), {}, {}, 1, batch.ahead)
    assert caught.value.group_id == batch.ahead[0]
    assert broker.reject(four.epoch, caught.value.group_id, "corrupt")
    assert broker.return_leased(four.epoch) == 0
    assert broker.snapshot().step == 1
    assert batch_of(broker.pull_batch(four.epoch, 1, 1)).groups


def test_a_submission_makes_room_for_the_admission_that_comes_with_it(
    broker: Broker, make_config: ConfigFactory
) -> None:
    """It is refused as stale: its place is free, and its prompt comes first."""
    broker.initialise(make_config(**{"trainer.groups_per_step": 1}))
    broker.set_max_lag(0)
    run = Run(broker).start()
    late = run.admit()
    assert isinstance(broker.admit(WORKER, ENGINE), Refused)
    broker._connection.client.hset(broker._keys.policy, "version", 1)
    broker.update_engine(EngineRecord(ENGINE, "http://engine", EngineState.SERVING, 1))
    (answer,), tickets = broker.submit_and_admit([finished(late, RUN)], ENGINE, 2, stats={"retries": 3})
    assert isinstance(answer, Refused)
    assert answer.reason == "stale"
    assert not isinstance(tickets, Refused)
    assert [(t.prompt_index, t.attempt) for t in tickets] == [(late.prompt_index, 1)]
    assert broker.snapshot().counters["retries"] == 3
    run.assert_closed()


def test_a_submission_is_taken_though_no_admission_follows(broker: Broker, make_config: ConfigFactory) -> None:
    broker.initialise(make_config())
    run = Run(broker).start()
    ticket = run.admit()
    broker.steer("pause")
    (answer,), tickets = broker.submit_and_admit([finished(ticket, RUN)], ENGINE, 1)
    assert answer == "accepted"
    assert isinstance(tickets, Refused)
    assert tickets.reason == "paused"


@pytest.mark.parametrize("payloads", ["redis", "folder"])
def test_at_the_memory_limit_nothing_is_admitted_and_what_needs_no_memory_is_submitted(
    tmp_path: Path, make_config: ConfigFactory, payloads: str
) -> None:
    with EmbeddedServer(tmp_path / "redis", password="", append_only=False) as embedded:
        broker = Broker.connect(embedded.url, RUN, timeout_s=5)
        folder = {"redis.payloads": payloads, "redis.payload_folder": str(tmp_path / "payloads")}
        broker.initialise(make_config(**folder))
        run = Run(broker).start()
        ticket = run.admit()
        client = broker._connection.client
        client.config_set("maxmemory", "1mb")
        (answer,), tickets = broker.submit_and_admit([finished(ticket, RUN)], ENGINE, 1)
        assert isinstance(tickets, Refused)
        assert tickets.reason == "memory"
        if payloads == "folder":
            assert answer == "accepted"
        else:
            assert isinstance(answer, Refused)
            assert answer.reason == "memory"
        client.config_set("maxmemory", "64mb")
        (answer,), tickets = broker.submit_and_admit([finished(ticket, RUN)], ENGINE, 1)
        assert answer == "accepted"
        assert not isinstance(tickets, Refused)
        run.assert_closed()
        broker.close()


def test_without_a_run_both_say_so(broker: Broker, make_config: ConfigFactory) -> None:
    broker.initialise(make_config())
    run = Run(broker).start()
    ticket = run.admit()
    broker._connection.client.flushall()
    with pytest.raises(NotInitialised):
        broker.submit_and_admit([finished(ticket, RUN)], ENGINE, 1)
    with pytest.raises(NotInitialised):
        broker.step_and_pull(run.epoch, 0, [], {}, {}, 1)


def test_groups_of_two_workers_or_none_are_not_handed_in_together(four: Run) -> None:
    four.broker.set_max_lag(9)
    first, second = finished(four.admit(), RUN), finished(four.admit("other"), RUN, worker="other")
    for groups in ([], [first, second]):
        with pytest.raises(ValueError, match="one worker"):
            four.broker.submit_and_admit(groups, ENGINE, 1)
    assert four.broker.snapshot().groups.generating == 2
