"""The tiny system in a real Docker engine: it learns, survives the end of each of its parts, scales, and resumes.

    make test-docker        or        python -m pytest tests/deploy/docker/drills.py -s

Not part of `make test`: it needs root, Debian's docker.io and about half an hour on two cores. DRILLS_FOLDER names the
folder that keeps engine, wheels and images for the next time (default /tmp/lagrange-docker); DRILLS_KEEP=1 leaves the
engine running, DRILLS_BUILD=0 takes the images that are there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.docker import environment as env
from tests.deploy.tools import DEPLOY, deploy_config, program

pytestmark = pytest.mark.timeout(3600)
FOLDER = Path(os.environ.get("DRILLS_FOLDER", "/tmp/lagrange-docker"))
PATIENCE_S = float(os.environ.get("DRILLS_PATIENCE_S", "300"))


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")


@dataclass
class System:
    """The compose project, as a person at the machine sees it."""

    folder: Path
    variables: dict[str, str]

    def compose(self, *words: str, timeout_s: float = 900) -> str:
        """Run docker compose; its standard output. Raises RuntimeError with what it said."""
        command = [program("docker-compose"), "-p", "lagrange-drills", "-f", str(DEPLOY / "docker-compose.yml"), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.variables, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout

    def up(self) -> None:
        """Start everything and wait until all is healthy; four times as long as a step of a drill."""
        limit = round(4 * PATIENCE_S)
        self.compose("up", "-d", "--wait", "--no-build", "--wait-timeout", str(limit), timeout_s=limit + 300)

    def containers(self, service: str) -> list[str]:
        """Ids of a service's running containers."""
        return self.compose("ps", "-q", service).split()

    def inspect(self, container: str, form: str) -> str:
        """One fact about a container."""
        return env.docker(self.folder, "inspect", "-f", form, container).stdout.strip()

    def kill(self, service: str) -> None:
        """kill -9 of a container's first process: not `docker kill`, which counts as a manual stop."""
        container = self.containers(service)[0]
        os.kill(int(self.inspect(container, "{{.State.Pid}}")), signal.SIGKILL)

    def get(self, path: str) -> dict[str, Any]:
        """An answer of the monitor, through its published port, which exists in the engine's namespace alone."""
        pid = (self.folder / "ns.pid").read_text().strip()
        url = f"http://127.0.0.1:8020{path}"
        command = ["nsenter", "-t", pid, "-n", "curl", "-fsS", "-m", "10", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            raise LookupError(done.stderr.strip())
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def step(self) -> int:
        """Optimizer steps so far."""
        return int(self.get("/v1/run")["step"])

    def until(self, what: str, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> float:
        """Seconds until `condition` is true; an answer that fails counts as not yet. Fails with the logs' ends."""
        began = time.monotonic()
        last: Exception | None = None
        while time.monotonic() - began < patience_s:
            try:
                if condition():
                    return time.monotonic() - began
            except (LookupError, RuntimeError, KeyError) as error:
                last = error
            time.sleep(1.0)
        raise AssertionError(
            f"{what}: not within {patience_s:.0f} s ({last})\n{self.compose('ps', '-a')}\n{self.ends()}"
        )

    def ends(self) -> str:
        """The last lines of every log."""
        return self.compose("logs", "--tail", "15", "--no-color")[-12000:]

    def sound(self) -> None:
        """The invariants that a person can see: the ledger closes, nothing was trained beyond the bound."""
        ledger = self.get("/v1/ledger")
        assert ledger["groups"]["closes"], ledger
        assert ledger["tokens"]["closes"], ledger
        staleness = self.get("/v1/staleness")
        trained = staleness["trained"]["tokens"]  # a distribution over lags
        assert trained is None or trained["max"] <= staleness["max_lag"], staleness

    def metrics(self) -> list[dict[str, Any]]:
        """The records of the surviving steps, from the shared volume."""
        (file,) = (self.folder / "data/volumes").glob("*runs/_data/runs/*/metrics.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """Engine, images and a project that is up."""
    if lacking := env.missing():
        pytest.skip(f"apt-get install --no-install-recommends {' '.join(lacking)}")
    if os.geteuid() != 0:
        pytest.skip("a Docker engine in its own namespaces needs root")
    made = () if os.environ.get("DRILLS_BUILD") == "0" else (env.make_base, env.fetch_wheels, env.build)
    try:
        for step in (env.start_engine, *made):
            began = time.monotonic()
            step(FOLDER)
            say(f"{step.__name__}: {time.monotonic() - began:.0f} s")
        with project() as running:
            yield running
    finally:
        if os.environ.get("DRILLS_KEEP") != "1":
            env.stop_engine(FOLDER)
            shutil.rmtree(FOLDER / "context", ignore_errors=True)


@contextmanager
def project() -> Iterator[System]:
    """The compose project, up and healthy; gone afterwards, with its volumes."""
    tree = deploy_config("tiny")
    tree["run"]["steps"] = 100000  # the drills end it
    tree["trainer"]["checkpoint"] = {"interval_steps": 5}
    tree["lag"]["max"] = 2
    (FOLDER / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    subprocess.run([DEPLOY / "secrets/make.sh"], check=True, timeout=30)
    (FOLDER / "docker-config/cli-plugins").mkdir(parents=True, exist_ok=True)
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(FOLDER),
        "DOCKER_CONFIG": str(FOLDER / "docker-config"),
        "DOCKER_HOST": env.socket_of(FOLDER),
        "REDIS_IMAGE": env.REDIS,
        "LAGRANGE_CONFIG": str(FOLDER / "config.yaml"),
        **{f"LAGRANGE_{name.upper()}_IMAGE": image for name, image in env.IMAGES.items()},
    }
    running = System(FOLDER, variables)
    running.compose("down", "-v", "--timeout", "5")
    try:
        began = time.monotonic()
        running.up()
        say(f"up --wait: {time.monotonic() - began:.0f} s")
        yield running
    except RuntimeError as error:
        raise AssertionError(f"{error}\n{running.ends()}") from error
    finally:
        if os.environ.get("DRILLS_KEEP") != "1":
            running.compose("down", "-v", "--timeout", "20")


def test_every_container_is_healthy_unprivileged_and_read_only(system: System) -> None:
    rows = [json.loads(line) for line in system.compose("ps", "--format", "json").splitlines()]
    assert {row["Service"]: row["Health"] for row in rows} == dict.fromkeys(
        ("redis", "weight-sync", "monitor", "trainer", "engine", "rollout"), "healthy"
    )
    for row in rows:
        assert system.inspect(row["ID"], "{{.HostConfig.ReadonlyRootfs}} {{.Config.User}}") in (
            "true 10001:10001",
            "true 999:999",
        )
        words = system.inspect(row["ID"], "{{json .Config.Env}} {{json .Args}}")
        for secret in (DEPLOY / "secrets").glob("*_*"):
            assert secret.read_text(encoding="utf-8") not in words


ATTEMPTS = """
import redis
password = open("/run/secrets/redis_password", encoding="utf-8").read().strip()
client = redis.Redis(host="redis", username="worker", password=password, socket_timeout=10)
for command in (("PING",), ("FLUSHALL",), ("HSET", "lagrange:{tiny}:policy", "max_lag", "99")):
    try:
        print(client.execute_command(*command))
    except redis.exceptions.NoPermissionError:
        print("refused")
"""


def test_a_workers_container_can_neither_flush_nor_steer(system: System) -> None:
    said = system.compose("exec", "-T", "rollout", "python3", "-c", ATTEMPTS)
    assert said.split() == ["True", "refused", "refused"]


def test_it_trains(system: System) -> None:
    say(f"step 10 after {system.until('step 10', lambda: system.step() >= 10, 2 * PATIENCE_S):.0f} s")
    system.sound()


@pytest.mark.parametrize("service", ["rollout", "weight-sync", "monitor", "engine", "trainer", "redis"])
def test_it_recovers_from_kill_9_of(system: System, service: str) -> None:
    before = system.step()
    container = system.containers(service)[0]
    restarts = int(system.inspect(container, "{{.RestartCount}}"))
    system.kill(service)
    took = system.until(
        f"{service} healthy again",
        lambda: system.inspect(container, "{{.RestartCount}} {{.State.Health.Status}}") == f"{restarts + 1} healthy",
    )
    more = system.until(f"steps after {service}", lambda: system.step() >= before + 3)
    say(f"{service}: healthy {took:.0f} s after kill -9, three more steps after another {more:.0f} s")
    system.sound()


def test_workers_scale_up_and_down_while_it_trains(system: System) -> None:
    for number in (4, 1, 2):
        system.compose("up", "-d", "--no-build", "--no-recreate", "--scale", f"rollout={number}", "rollout")
        system.until(f"{number} workers", lambda: len(system.containers("rollout")) == number)  # noqa: B023
        before = system.step()
        took = system.until(f"steps with {number} workers", lambda: system.step() >= before + 3)  # noqa: B023
        say(f"{number} workers: three steps in {took:.0f} s")
        system.sound()


def test_down_and_up_again_resumes_the_run(system: System) -> None:
    before = system.get("/v1/ledger")["groups"]["durable"]
    step = system.step()
    system.compose("down", "--timeout", "60")
    system.up()
    system.until("more steps", lambda: system.step() >= step + 3)
    assert system.get("/v1/ledger")["groups"]["durable"] >= before
    system.sound()


def test_the_reward_rose_and_no_step_is_missing(system: System) -> None:
    def mean(records: list[dict[str, Any]]) -> float:
        return sum(float(r["reward_mean"]) for r in records) / len(records)

    def rose() -> bool:
        records = system.metrics()
        return len(records) >= 40 and mean(records[-10:]) > mean(records[:10]) + 0.1

    system.until("reward rises", rose, 3 * PATIENCE_S)
    records = system.metrics()
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    say(
        f"reward {mean(records[:10]):.3f} in steps 1 to 10, {mean(records[-10:]):.3f} in the last ten of {len(records)}"
    )
