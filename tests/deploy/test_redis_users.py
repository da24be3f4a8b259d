"""The users of broker/access.py on a real Redis: each role does its part of the protocol, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis.stateful import run_state_machine_as_test

from broker import scripts
from broker.access import RIGHTS, ROLES, BadPassword, Role, users
from broker.commands import Argument, Command
from broker.connection import Connection
from broker.errors import BrokerUnavailable, NotAllowed
from broker.queue import SCHEMA, Broker
from broker.server import EmbeddedServer
from broker.types import EngineRecord, EngineState
from configs import ConfigError
from services.deployment import redis_users
from tests.broker.helpers import ENGINE, WORKER, Run, finished
from tests.broker.schedules import on, schedules
from tests.conftest import RUN, small_config

PASSWORDS: dict[Role, str] = {role: f"password-of-the-{role}" for role in ROLES}
# Who may call a transition to its end. Where a role is not one that does so in a run, the threat model says why it may.
CALLERS: dict[str, set[Role]] = {
    **{name: {"worker", "trainer", "operator"} for name in ("admit", "submit", "submit+admit", "renew", "fail")},
    **{name: {"worker", "operator"} for name in ("heartbeat", "pass_rate")},
    **{
        name: {"trainer", "operator"} for name in ("attach", "pull", "reject", "step", "step+pull", "commit", "publish")
    },
    "return_leased": {"trainer", "operator"},
    **{name: {"trainer", "monitor", "operator"} for name in ("renew_trainer", "set_policy", "steer")},
    **{name: {"trainer", "monitor", "operator"} for name in ("name_version", "initialise")},  # they write the policy
    "cursor": {"trainer", "monitor", "operator", "worker"},
    "requeue": {"worker", "trainer", "monitor", "operator"},
    "engine": {"engine", "weight-sync", "operator"},
    "hold": {"weight-sync", "operator"},
    "evaluator": {"evaluator", "operator"},
    "groups": {"worker", "trainer", "monitor", "operator"},
    "snapshot": set(ROLES),
}
OWNER: dict[str, Role] = {
    **dict.fromkeys(("admit", "submit", "submit+admit", "renew", "fail", "heartbeat", "pass_rate"), "worker"),
    **dict.fromkeys(("steer", "requeue", "snapshot"), "monitor"),
    **dict.fromkeys(("initialise", "groups"), "operator"),
    "engine": "weight-sync",
    "hold": "weight-sync",
    "evaluator": "evaluator",
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server with the users, and an open one for the test itself, where the file has one that is switched off."""
    with EmbeddedServer(tmp_path_factory.mktemp("guarded"), append_only=False, password="") as server:
        with redis.Redis.from_url(server.url, socket_timeout=10) as client:
            for line in users(PASSWORDS).splitlines():
                _, name, *rules = line.split()
                if name != "default":
                    client.execute_command("ACL", "SETUSER", name, *rules)
        yield server


@pytest.fixture
def open_client(guarded: EmbeddedServer) -> Iterator[redis.Redis]:
    """Without limits, on an empty server."""
    with redis.Redis.from_url(guarded.url, socket_timeout=10) as client:
        client.flushall()
        yield client


def signed(server: EmbeddedServer, role: Role, run: str = RUN) -> Broker:
    return Broker.connect(server.url, run, user=role, password=PASSWORDS[role], timeout_s=5)


class ByRole(Connection):
    """Sends each transition as the role that calls it in a run; all else without limits."""

    def __init__(self, url: str) -> None:
        super().__init__(url, password=None, timeout_s=30)
        self.roles = {r: Connection(url, user=r, password=PASSWORDS[r], timeout_s=30) for r in ROLES}

    def call_after(
        self, before: Sequence[Command], name: str, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> tuple[list[Any], list[Any]]:
        return self.roles[OWNER.get(name, "trainer")].call_after(before, name, keys, arguments)

    def close(self) -> None:
        for one in self.roles.values():
            one.close()
        super().close()


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.timeout(300)
def test_any_schedule_of_commands_goes_as_without_users(
    guarded: EmbeddedServer, open_client: redis.Redis, tmp_path: Path, count: int
) -> None:
    with on(guarded, tmp_path) as machine:
        machine.broker.close()
        machine.broker = Broker(ByRole(guarded.url), RUN)
        run_state_machine_as_test(machine, settings=schedules(count))


@pytest.mark.parametrize("payloads", ["redis", "folder"])
def test_each_role_does_all_of_its_part(  # noqa: PLR0915 - a life of a run, told in order
    guarded: EmbeddedServer, open_client: redis.Redis, tmp_path: Path, payloads: str
) -> None:
    """Also what is no transition: payloads, registry, channel, and the paths that are rare."""
    config = small_config(tmp_path, **{"redis.payloads": payloads, "redis.payload_folder": str(tmp_path / "payloads")})
    of = {role: signed(guarded, role) for role in ROLES}
    of["operator"].initialise(config)
    of["trainer"].initialise(config)
    run = Run(of["trainer"])
    run.epoch = of["trainer"].attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch
    run.version = of["trainer"].name_version(run.epoch)
    heard: list[str] = []
    changes = of["weight-sync"].listen(heard.append)
    of["engine"].register_engine(EngineRecord(ENGINE, "http://engine", EngineState.JOINING))
    assert of["engine"].heartbeat_engine(ENGINE, 0, "/staged")
    serving = EngineRecord(ENGINE, "http://engine", EngineState.SERVING, run.version)
    assert of["weight-sync"].update_engine(serving)
    assert of["weight-sync"].hold("weight-sync", "me", 9) == "me"
    assert of["weight-sync"].hold("weight-sync", "other", 5) == "me"  # which has no more than 5 s from now
    _published(of["trainer"], run)
    tickets = of["worker"].admit_many(WORKER, ENGINE, 3)
    assert isinstance(tickets, tuple)
    assert len(of["worker"].renew(WORKER, [t.group_id for t in tickets])) == 3
    of["worker"].heartbeat_worker(WORKER, {"groups": 3})
    open_client.zadd(of["worker"]._keys.named("workers_seen"), {"long-gone": 1})
    open_client.hset(of["worker"]._keys.named("by_hist"), "g:trained:worker:0:long-gone", 1)
    of["worker"].heartbeat_worker(WORKER, {"groups": 3})  # forgets the other
    assert of["worker"].fail(tickets[2].group_id, WORKER, "no use", final=True)
    for ticket in tickets[:2]:
        assert of["worker"].submit(finished(ticket, RUN), stats={"tokens_made": 4.0}) == "accepted"
    assert of["monitor"].snapshot(5, names=True).dead_letters == 1
    assert of["monitor"].requeue(tickets[2].prompt_index).done
    assert of["monitor"].steer("lag", 2, why="a test").done
    batch = run.pull(2)
    assert len(of["trainer"].fetch([d.group_id for d in batch])) == 2
    run.step(batch)
    of["trainer"].prompt_cursor(run.epoch, 1)
    assert of["monitor"].steer("checkpoint", why="a test").done
    assert of["trainer"].checkpoint_asked() == 1
    assert of["trainer"].commit(run.epoch, 1) == 2
    of["evaluator"].evaluator(5.0)
    assert of["monitor"].steer("evaluate", why="a test").done
    assert of["evaluator"].evaluator(5.0, begins=True)
    of["evaluator"].evaluated({"score": 1.0}, "all right", 5.0)
    assert of["operator"].groups("generating") == []
    assert of["operator"].dead_letters() == []
    for role in ROLES:
        seen = of[role].snapshot()
        assert seen.groups.closes, role
        assert of[role].engines(), role
        assert of[role].server_time_ms() > 0, role
    of["trainer"].forget_version(0)
    of["engine"].remove_engine(ENGINE)
    assert of["weight-sync"].hold("weight-sync", "me", 0) == ""
    of["trainer"].set_status("finished")
    changes.close()
    for broker in of.values():
        broker.close()


def _published(trainer: Broker, run: Run) -> None:
    from broker.types import VersionRecord

    trainer.publish(run.epoch, VersionRecord(run.version, 0, "weights", "sum"))


def prepared(server: EmbeddedServer, folder: Path) -> dict[str, list[Any]]:
    """A run with a group of each state; script -> arguments that would take it to its end."""
    broker = Broker.connect(server.url, RUN, timeout_s=5)
    broker.initialise(small_config(folder, **{"lag.max": 4}))
    run = Run(broker).start()
    run.train(2)
    broker.update_engine(EngineRecord(ENGINE, "http://engine", EngineState.SERVING, run.version))
    dead, held = run.admit(), run.admit()
    assert broker.fail(dead.group_id, WORKER, "no use", final=True)
    run.ready(2)
    (leased, *_) = run.pull(1)
    epoch, version, group = run.epoch, run.version, finished(held, RUN)
    broker.close()
    record = '{"engine_id":"e","url":"u","state":"joining","version":-1}'
    submission = [held.group_id, WORKER, 1, "sum", 1, 8, 14, 2, "file", group.task]
    return {
        "admit": [WORKER, ENGINE, 1],
        "submit": [1, *submission],
        "submit+admit": [11, 1, *submission, WORKER, ENGINE, 1],
        "renew": [WORKER, held.group_id],
        "fail": [held.group_id, WORKER, "no use", 0, "try"],
        "heartbeat": [WORKER, "{}"],
        "pass_rate": ["prompt", 1, 2, 0.5],
        "attach": [0, -1, 0, -1],
        "pull": [epoch, version, 1, "nonce", 1],
        "reject": [epoch, leased.group_id, "corrupt"],
        "step": [epoch, version, "{}", 1, leased.group_id, 0, 0, 8],
        "step+pull": [8, epoch, version, "{}", 1, leased.group_id, 0, 0, 8, epoch, version + 1, 1, "nonce", 1],
        "commit": [epoch, 1],
        "cursor": [epoch, 1],
        "name_version": [epoch],
        "publish": [epoch, version, "{}"],
        "renew_trainer": [epoch],
        "return_leased": [epoch],
        "initialise": [SCHEMA, RUN, "max_lag", 99, "lease_ms", 1],
        "set_policy": ["max_lag", 99],
        "steer": ["pause", 0, "somebody", ""],
        "requeue": [dead.prompt_index, "why"],
        "engine": ["e", record, "", "register"],
        "hold": ["weight-sync", "somebody", 1000],
        "evaluator": [1000, 1, '{"score": 1}', "a result"],
        "groups": ["ready", 5],
        "snapshot": [5, 1],
    }


def protected(client: redis.Redis) -> dict[str, Any]:
    """What only trainer, operators and monitor may change."""
    prefix = f"lagrange:{{{RUN}}}:"
    hashes = {name: client.hgetall(prefix + name) for name in ("policy", "versions", "lag_hist", "step_lags")}
    return {**hashes, "trained": client.zrange(f"{prefix}trained", 0, -1, withscores=True)}


@pytest.mark.parametrize("name", scripts.names())
def test_a_transition_is_refused_to_roles_that_have_no_part_in_it(
    guarded: EmbeddedServer, open_client: redis.Redis, tmp_path: Path, name: str
) -> None:
    allowed = set()
    for role in ROLES:
        open_client.flushall()
        arguments = prepared(guarded, tmp_path)[name]
        before = protected(open_client)
        broker = signed(guarded, role)
        try:
            broker._connection.call(name, [broker._keys.prefix], arguments)
            allowed.add(role)
        except NotAllowed:
            if role not in ("trainer", "monitor", "operator"):
                assert protected(open_client) == before
        finally:
            broker.close()
    assert allowed == CALLERS[name]


FORBIDDEN: tuple[tuple[Any, ...], ...] = (
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "worker", "+@all"),
    ("EVAL", "return redis.call('FLUSHALL')", 0),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LOAD", "#!lua name=l\nredis.register_function('f', function() return 1 end)"),
    ("SHUTDOWN", "NOSAVE"),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("MONITOR",),
    ("CLIENT", "KILL", "ID", "1"),
    ("MODULE", "LIST"),
    ("SAVE",),
    ("PUBLISH", "another-channel", "x"),
    ("GET", "a-key-of-somebody-else"),
    ("SET", "a-key-of-somebody-else", "x"),
    ("SWAPDB", 0, 1),
    ("MIGRATE", "127.0.0.1", "1", "", 0, 1, "KEYS", f"lagrange:{{{RUN}}}:policy"),
)
POLICY = f"lagrange:{{{RUN}}}:policy"


@pytest.mark.parametrize("role", ROLES)
def test_nobody_may_flush_configure_or_reach_other_keys(
    guarded: EmbeddedServer, open_client: redis.Redis, role: Role
) -> None:
    broker = signed(guarded, role)
    for command in FORBIDDEN:
        with pytest.raises(redis.exceptions.NoPermissionError):
            broker._connection.client.execute_command(*command)
    for own in ("return redis.call('FLUSHALL')", "return redis.call('SET', 'a-key-of-somebody-else', 'x')"):
        digest = broker._connection.client.script_load(own)
        with pytest.raises(redis.exceptions.ResponseError):
            broker._connection.client.evalsha(digest, 0)
    broker.close()


@pytest.mark.parametrize("role", ["worker", "engine", "weight-sync", "evaluator"])
def test_a_script_of_ones_own_gives_no_more_rights(
    guarded: EmbeddedServer, open_client: redis.Redis, tmp_path: Path, role: Role
) -> None:
    prepared(guarded, tmp_path)
    before = protected(open_client)
    broker = signed(guarded, role)
    client, prefix = broker._connection.client, broker._keys.prefix
    attempts = [
        f"return redis.call('HSET', '{prefix}policy', 'max_lag', 99)",
        f"return redis.call('HSET', '{prefix}policy', 'epoch', 99)",
        f"return redis.call('DEL', '{prefix}policy')",
        f"return redis.call('RENAME', '{prefix}events', '{prefix}policy')",
        f"return redis.call('HSET', '{prefix}versions', '7', '{{}}')",
        f"return redis.call('ZREM', '{prefix}trained', '1')",
        f"return redis.call('HSET', '{prefix}lag_hist', 'g:9', '1')",
    ]
    for text in attempts:
        with pytest.raises(redis.exceptions.ResponseError):
            client.evalsha(client.script_load(text), 0)
    for command in (("HSET", f"{prefix}policy", "paused", "1"), ("UNLINK", f"{prefix}versions")):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command)
    assert protected(open_client) == before
    broker.close()


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed (Debian: redis-tools)")
def test_the_operator_can_take_a_backup(guarded: EmbeddedServer, open_client: redis.Redis, tmp_path: Path) -> None:
    prepared(guarded, tmp_path)
    command = ["redis-cli", "-u", guarded.url, "--user", "operator", "--rdb", str(tmp_path / "backup.rdb")]
    environment = {**os.environ, "REDISCLI_AUTH": PASSWORDS["operator"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "backup.rdb").read_bytes().startswith(b"REDIS")


def test_users_of_one_run_do_not_see_another(guarded: EmbeddedServer, open_client: redis.Redis, tmp_path: Path) -> None:
    line = next(line for line in users(PASSWORDS, "only-this").splitlines() if line.startswith("user worker "))
    try:
        open_client.execute_command("ACL", "SETUSER", "guest", "reset", *line.split()[2:])
        prepared(guarded, tmp_path)
        with redis.Redis.from_url(guarded.url, username="guest", password=PASSWORDS["worker"]) as client:
            client.hset("lagrange:{only-this}:cursor", "last_id", 1)
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.hget(POLICY, "step")
    finally:
        open_client.execute_command("ACL", "DELUSER", "guest")


def test_a_wrong_role_or_password_is_one_clear_message(
    guarded: EmbeddedServer, open_client: redis.Redis, tmp_path: Path
) -> None:
    with pytest.raises(BrokerUnavailable, match="user worker"):
        Broker.connect(guarded.url, RUN, user="worker", password="wrong", timeout_s=5)
    prepared(guarded, tmp_path)
    broker = signed(guarded, "worker")
    with pytest.raises(NotAllowed, match=r"user worker .*LAGRANGE_REDIS_USER"):
        broker.set_max_lag(7)
    broker.close()


def test_the_list_holds_digests_and_switches_the_default_user_off() -> None:
    text = users(PASSWORDS)
    assert text.startswith("user default off resetpass ")  # all else of it: test_redis_files.py
    assert "user check on nopass -@all +ping\n" in text
    assert not [word for word in PASSWORDS.values() if word in text]
    assert {line.split()[1] for line in text.splitlines()} == {"default", "check", *ROLES}
    assert set(RIGHTS) == set(ROLES)
    assert "+@all" not in text.split("\n", 1)[1]
    with pytest.raises(BadPassword, match="worker"):
        users({"worker": "short"})


def test_passwords_come_from_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="redis_<role>_password"):
        redis_users(tmp_path)
    for role in ("worker", "weight-sync"):
        (tmp_path / f"redis_{role.replace('-', '_')}_password").write_text(PASSWORDS[role], encoding="utf-8")
    made: Callable[[Path], str] = redis_users
    assert made(tmp_path) == users({role: PASSWORDS[role] for role in ("worker", "weight-sync")})


@pytest.mark.parametrize("run", ["", "a b", "a*", "one\n+@all", "~*"])
def test_a_run_that_is_no_run_id_gives_no_rights(tmp_path: Path, run: str) -> None:
    (tmp_path / "redis_worker_password").write_text("x" * 16, encoding="utf-8")
    assert "{one}" in redis_users(tmp_path, "one")
    with pytest.raises(ConfigError, match="is no run id"):
        redis_users(tmp_path, run)
