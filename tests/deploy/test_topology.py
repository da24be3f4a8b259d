"""The compose file without containers: its commands, variables, order and health checks, as local processes.

What containers add (images, users, networks, limits) is tested by tests/deploy/docker/drills.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
import yaml

from broker.access import ROLES, Role, users
from broker.queue import Broker
from broker.server import EmbeddedServer
from broker.types import Snapshot
from tests.deploy.test_compose import OURS, USERS, password_of
from tests.deploy.tools import DEPLOY, ROOT, Tree, compose, deploy_config, free_ports, seconds
from tests.engine_fixture import engine_python
from trainer.launch import STOPPED

START_S = 420.0
SECRETS = {"api_token": "token", "engine_api_key": "engine-key"}
PASSWORDS: dict[Role, str] = {role: f"password-of-the-{role}" for role in ROLES}


@dataclass
class Topology:
    """The processes of the compose file, moved into `folder`."""

    folder: Path
    broker: Broker
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def environment(self, name: str) -> dict[str, str]:
        """The service's own variables, with the places of containers moved into the folder."""
        own = {k: str(v) for k, v in compose()["services"][name]["environment"].items()}
        moved = {k: v.replace("/run/secrets", str(self.folder / "secrets")) for k, v in own.items()}
        moved["LAGRANGE_REDIS_PASSWORD_FILE"] = str(self.folder / "secrets" / password_of(USERS[name]))
        if "LAGRANGE_SCRATCH" in moved:
            moved["LAGRANGE_SCRATCH"] = str(self.folder / "scratch")
        here = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return {**here, "LAGRANGE_CONFIG": str(self.folder / "config.yaml"), **moved}

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Run the service's command."""
        words = [str(w).replace("/etc/lagrange", str(self.folder)) for w in compose()["services"][name]["command"]]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "services", *words], env=self.environment(name), stdout=log, stderr=log, cwd=ROOT
            )
        self.processes[name] = process
        return process

    def healthy(self, name: str) -> bool:
        """The service's own health check."""
        test = compose()["services"][name]["healthcheck"]["test"]
        assert test == ["CMD", "lagrange-probe", name]
        command = [sys.executable, str(DEPLOY / "docker/probe.py"), name]
        done = subprocess.run(
            command, env=self.environment(name), capture_output=True, timeout=60, check=False, cwd=ROOT
        )
        return done.returncode == 0

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for a condition; a process that ended early, or START_S, fails the test with the log's end."""
        end = time.monotonic() + START_S
        while not condition():
            ended = {n: p.returncode for n, p in self.processes.items() if p.poll() not in (None, 0)}
            if ended or time.monotonic() > end:
                logs = "\n".join(f"{f.name}: {f.read_text()[-1500:]}" for f in sorted(self.folder.glob("*.log")))
                pytest.fail(f"{what}: not reached; ended: {ended}\n{logs}")
            time.sleep(0.3)

    def snapshot(self) -> Snapshot:
        """The run, at one instant."""
        return self.broker.snapshot()


def add_users(url: str, password: str) -> None:
    """Those of the compose file, on a server whose default user stays for the test."""
    with redis.Redis.from_url(url, password=password, socket_timeout=10) as client:
        for line in users(PASSWORDS).splitlines()[1:]:
            client.execute_command("ACL", "SETUSER", *line.split()[1:])


@pytest.fixture
def topology(tmp_path: Path) -> Iterator[Topology]:
    python = engine_python()
    (tmp_path / "secrets").mkdir()
    for name, value in (SECRETS | {password_of(role): word for role, word in PASSWORDS.items()}).items():
        (tmp_path / "secrets" / name).write_text(value, encoding="utf-8")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "data").mkdir()
    with EmbeddedServer(tmp_path / "data", append_only=True, max_memory_mb=256, password="for-the-test") as server:
        add_users(server.url, "for-the-test")
        tree: Tree = deploy_config("tiny")
        engine, sync, monitor, trainer = free_ports(4)
        tree["run"]["directory"] = str(tmp_path / "runs")
        tree["redis"]["url"] = server.url
        tree["engine"] |= {"port": engine, "python": str(python)}
        tree["weight_sync"]["port"], tree["monitor"]["port"], tree["trainer"]["port"] = sync, monitor, trainer
        tree["trainer"]["checkpoint"] = {"interval_steps": 5}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        running = Topology(tmp_path, Broker.connect(server.url, "tiny", password="for-the-test", timeout_s=10))
        try:
            yield running
        finally:
            for process in running.processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait(10)
            running.broker.close()


@pytest.mark.engine
@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_compose_files_processes_train_are_healthy_and_end_on_sigterm(topology: Topology) -> None:
    assert topology.start("init").wait(120) == 0
    order = [name for name in OURS if name not in ("init", "rollout")]
    for name in order:
        topology.start(name)
    for name in order:
        topology.until(f"{name} healthy", lambda: topology.healthy(name))  # noqa: B023 - called at once
    topology.start("rollout")
    topology.until("the worker healthy", lambda: topology.healthy("rollout"))
    topology.until("six steps", lambda: topology.snapshot().step >= 6)
    seen = topology.snapshot()
    assert seen.groups.closes
    assert seen.tokens.closes
    assert max(seen.trained_by_lag) <= seen.max_lag
    for name in ("rollout", "trainer", "engine", "weight-sync", "monitor"):
        process = topology.processes[name]
        process.send_signal(signal.SIGTERM)
        grace = compose()["services"][name]["stop_grace_period"]
        assert process.wait(seconds(grace)) == (STOPPED if name == "trainer" else 0), name
    assert topology.snapshot().engines == ()  # it drained
    assert topology.snapshot().groups.generating == 0  # tickets were handed back
    words = b"".join(Path(f"{log}").read_bytes() for log in topology.folder.rglob("*.log"))
    secrets = (*SECRETS.values(), *PASSWORDS.values())
    assert not [secret for secret in secrets if len(secret) > 8 and secret.encode() in words]
