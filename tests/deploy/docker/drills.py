"""The tiny system in a real Docker engine: it learns, survives the end of each of its parts, scales, and resumes.

    make test-docker        or        python -m pytest tests/deploy/docker/drills.py -s

Not part of `make test`: it needs root, Debian's docker.io and about half an hour on two cores. DRILLS_FOLDER names the
folder that keeps engine, wheels and images for the next time (default /tmp/lagrange-docker); DRILLS_KEEP=1 leaves the
engine running, DRILLS_BUILD=0 takes the images that are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.docker.system import PATIENCE_S, System, project, say

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def system(docker_folder: Path) -> Iterator[System]:
    """A project that is up."""
    with project(docker_folder) as running:
        yield running


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
        for secret in (system.deploy / "secrets").glob("*_*"):
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
    system.recovers(service)


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
