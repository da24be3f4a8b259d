"""Redis gone, restarted, emptied, replaced, failed over: each ends in an error that says so, or goes on as it was."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from broker import sentinel
from broker.errors import BrokerUnavailable, Fenced, NotInitialised, VersionMismatch
from broker.queue import Broker
from broker.server import EmbeddedServer, find_server
from broker.types import PromptCursor, Refused
from configs.ports import free_port
from tests.broker.helpers import ENGINE, WORKER, Run, finished, wait_for
from tests.conftest import RUN, ConfigFactory


def test_a_restart_without_aof_is_told_and_the_checkpoint_restores_step_version_and_prompts(
    tmp_path: Path, make_config: ConfigFactory
) -> None:
    with EmbeddedServer(tmp_path / "redis", password="", append_only=False) as server:
        broker = Broker.connect(server.url, RUN, timeout_s=20)
        broker.initialise(make_config())
        run = Run(broker).start()
        batch = run.train()
        (in_flight,) = run.ready(1)
        server.kill()
        server.start(30)
        for act in (
            lambda: broker.admit(WORKER, ENGINE),
            lambda: broker.submit(finished(in_flight, RUN)),
            lambda: broker.pull(run.epoch, run.version, 2),
            broker.snapshot,
        ):
            with pytest.raises(NotInitialised, match="restart the trainer from its checkpoint"):
                act()
        broker.initialise(make_config())
        with pytest.raises(Fenced):  # the trainer of before does not go on over an empty queue
            broker.pull(run.epoch, run.version, 2)
        state = broker.attach_trainer(
            checkpoint_step=1,
            checkpoint_version=1,
            consumed=[d.group_id for d in batch],
            cursor=PromptCursor(3, (2,)),
        )
        after = Run(broker, state.epoch, broker.name_version(state.epoch))
        after.publish()
        assert (state.step, after.version) == (1, 2)
        late = broker.submit(finished(in_flight, RUN))  # its worker never heard of all that
        assert isinstance(late, Refused)
        assert late.reason == "closed"
        again = after.admit()
        assert again.prompt_index == 2
        assert again.group_id > in_flight.group_id
        assert state.epoch > run.epoch
        after.assert_closed()
        broker.close()


def test_a_trainer_that_is_ahead_of_a_redis_that_lost_its_last_second_attaches_again(run: Run) -> None:
    client, keys = run.broker._connection.client, run.broker._keys
    run.ready(2)
    batch = run.pull()
    lost = {name: client.dump(name) or b"" for name in client.keys(keys.prefix.replace("{", "\\{") + "*")}
    run.step(batch)
    client.flushall()
    for name, value in lost.items():  # what an AOF without its last second brings back
        client.restore(name, 0, value)
    with pytest.raises(VersionMismatch):
        run.broker.pull(run.epoch, run.version, 2)
    state = run.broker.attach_trainer(
        checkpoint_step=1, checkpoint_version=1, consumed=[d.group_id for d in batch], cursor=PromptCursor(2, ())
    )
    seen = run.broker.snapshot()
    assert (state.step, seen.groups.durable, seen.groups.ready) == (1, 2, 0)
    run.assert_closed()


def test_a_replica_takes_over_with_everything_that_was_acknowledged(tmp_path: Path, make_config: ConfigFactory) -> None:
    with (
        EmbeddedServer(tmp_path / "a", password="", append_only=False) as first,
        EmbeddedServer(tmp_path / "b", password="", append_only=False) as second,
    ):
        broker = Broker.connect(first.url, RUN, timeout_s=20)
        heir = Broker.connect(second.url, RUN, timeout_s=20)
        heir._connection.client.config_set("repl-diskless-load", "swapdb")
        broker._connection.client.config_set("repl-diskless-sync-delay", 0)
        heir._connection.client.replicaof("127.0.0.1", str(first.port))
        wait_for(lambda: heir._connection.client.info("replication")["master_link_status"] == "up")
        broker.initialise(make_config())
        run = Run(broker).start()
        tickets = run.ready(2)
        assert broker._connection.client.wait(1, 20_000) == 1
        before = broker.snapshot().groups
        first.kill()
        quick = Broker(heir._connection, RUN)
        heir._connection.timeout_s = 0.2
        with pytest.raises(BrokerUnavailable):  # not a second truth: it refuses writes until it is promoted
            quick.admit(WORKER, ENGINE)
        heir._connection.timeout_s = 20
        heir._connection.client.replicaof("NO", "ONE")
        assert heir.snapshot().groups == before
        after = Run(heir, run.epoch, run.version)
        assert [d.group_id for d in after.pull()] == [t.group_id for t in tickets]
        assert [g.group_id for g in heir.fetch([t.group_id for t in tickets])] == [t.group_id for t in tickets]
        after.assert_closed()
        broker.close()
        heir.close()


@pytest.mark.slow
def test_a_handle_follows_the_primary_that_sentinel_elects(tmp_path: Path, make_config: ConfigFactory) -> None:
    with (
        EmbeddedServer(tmp_path / "a", password="", append_only=False) as first,
        EmbeddedServer(tmp_path / "b", password="", append_only=False) as second,
        watching(tmp_path, first.port) as url,
        contextlib.closing(Broker.connect(second.url, RUN, timeout_s=20)) as replica,
        contextlib.closing(Broker.connect(url, RUN, timeout_s=60)) as broker,
    ):
        replica._connection.client.replicaof("127.0.0.1", str(first.port))
        broker.initialise(make_config())
        run = Run(broker).start()
        tickets = run.ready(2)
        # the sentinel has to know the replica before it can promote it
        wait_for(lambda: knows_a_replica(url), 60)
        assert broker._connection.client.wait(1, 20_000) == 1
        before = broker.snapshot().groups
        asked_of_sentinel(url, "SENTINEL", "SET", "queue", "down-after-milliseconds", "500")
        first.kill()
        assert [d.group_id for d in run.pull()] == [t.group_id for t in tickets]  # the same handle, the other server
        assert replica._connection.client.info("replication")["role"] == "master"
        assert before.issued == replica.snapshot().groups.issued
        run.assert_closed()


def test_a_step_that_was_not_replicated_is_told_to_the_trainer_and_undone(
    tmp_path: Path, make_config: ConfigFactory
) -> None:
    """What an asynchronous replica did not get is a lost tail: never gone on over, always one clear error."""
    with (
        EmbeddedServer(tmp_path / "a", password="", append_only=False) as first,
        EmbeddedServer(tmp_path / "b", password="", append_only=False) as second,
        contextlib.closing(Broker.connect(first.url, RUN, timeout_s=20)) as broker,
        contextlib.closing(Broker.connect(second.url, RUN, timeout_s=20)) as heir,
    ):
        heir._connection.client.replicaof("127.0.0.1", str(first.port))
        broker.initialise(make_config())
        run = Run(broker).start()
        run.ready(2)
        batch = run.pull()
        (late,) = run.ready(1)
        wait_for(lambda: broker._connection.client.wait(1, 1000) == 1)
        heir._connection.client.replicaof("NO", "ONE")  # from here on nothing arrives
        run.step(batch)
        lost = run.admit()
        first.kill()
        after = Run(heir, run.epoch, run.version)
        with pytest.raises(VersionMismatch, match="Attach again"):
            after.broker.pull(run.epoch, run.version, 2)
        with pytest.raises(VersionMismatch):
            after.broker.prompt_cursor(run.epoch, 1)
        answer = heir.submit(finished(lost, RUN))
        assert isinstance(answer, Refused)
        assert answer.reason == "closed"
        state = heir.attach_trainer(checkpoint_step=0, checkpoint_version=0)
        assert (state.step, state.returned) == (0, 2)
        assert {r.group_id for r in heir.groups("ready")} == {late.group_id, *(d.group_id for d in batch)}
        after.assert_closed()


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://:secret@a/service",
        "redis+sentinel://a:x/service",
        "redis+sentinel://a",
        "redis+sentinel:///service",
    ],
)
def test_an_address_of_sentinels_that_cannot_be_used_is_said_clearly(url: str) -> None:
    with pytest.raises(BrokerUnavailable, match=r"redis.url .* cannot be used"):
        Broker.connect(url, RUN, timeout_s=1)


@contextlib.contextmanager
def watching(folder: Path, port: int) -> Iterator[str]:
    """A sentinel that watches the server at `port` as `queue`, patient with one that is only slow; its address."""
    own, file = free_port(), folder / "sentinel.conf"
    file.write_text(
        f"port {own}\nbind 127.0.0.1\nprotected-mode no\ndir {folder}\nsentinel monitor queue 127.0.0.1 {port} 1\n"
        "sentinel down-after-milliseconds queue 120000\nsentinel failover-timeout queue 5000\n"
    )
    with (folder / "sentinel.log").open("w") as log:
        process = subprocess.Popen([find_server(), file, "--sentinel"], stdout=log, stderr=log)
    try:
        yield f"redis+sentinel://127.0.0.1:{own}/queue"
    finally:
        process.kill()
        process.wait(10)


def knows_a_replica(url: str) -> bool:
    return bool(asked_of_sentinel(url, "SENTINEL", "REPLICAS", "queue"))


def asked_of_sentinel(url: str, *command: str) -> Any:
    watched = sentinel.parse(url)
    assert watched is not None
    host, port = watched.sentinels[0]
    with redis.Redis(host, port, socket_timeout=5) as client:
        return client.execute_command(*command)
