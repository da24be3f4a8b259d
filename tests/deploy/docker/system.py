"""A compose project of the tiny system in a Docker engine of the test's own, as a person at the machine sees it."""

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

import yaml

from tests.deploy.docker import environment as env
from tests.deploy.tools import DEPLOY, Tree, deploy_config, program

PATIENCE_S = float(os.environ.get("DRILLS_PATIENCE_S", "300"))
KEEP = os.environ.get("DRILLS_KEEP") == "1"


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")


@dataclass
class System:
    """folder: the engine's. deploy: a copy of deploy/ with secrets. overrides: compose files on top of the main one."""

    folder: Path
    deploy: Path
    variables: dict[str, str]
    overrides: tuple[str, ...] = ()

    @property
    def tls(self) -> bool:
        """Whether the services speak it."""
        return "compose.tls.yaml" in self.overrides

    def compose(self, *words: str, timeout_s: float = 900) -> str:
        """Run docker compose; its standard output. Raises RuntimeError with what it said."""
        files = [word for name in ("docker-compose.yml", *self.overrides) for word in ("-f", str(self.deploy / name))]
        command = [program("docker-compose"), "-p", "lagrange-drills", *files, *words]
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
        address = f"https://localhost:8020{path}" if self.tls else f"http://127.0.0.1:8020{path}"
        trust = ["--cacert", str(self.deploy / "tls/ca.crt")] if self.tls else []
        command = ["nsenter", "-t", pid, "-n", "curl", "-fsS", "-m", "10", *trust, address]
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

    def recovers(self, service: str) -> None:
        """kill -9 of a service's first container: it gets healthy again and the run goes on. Fails with the logs."""
        before = self.step()
        container = self.containers(service)[0]
        restarts = int(self.inspect(container, "{{.RestartCount}}"))
        self.kill(service)
        took = self.until(
            f"{service} healthy again",
            lambda: self.inspect(container, "{{.RestartCount}} {{.State.Health.Status}}") == f"{restarts + 1} healthy",
        )
        more = self.until(f"steps after {service}", lambda: self.step() >= before + 3)
        say(f"{service}: healthy {took:.0f} s after kill -9, three more steps after another {more:.0f} s")
        self.sound()

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


@contextmanager
def project(folder: Path, changes: Tree | None = None, overrides: tuple[str, ...] = ()) -> Iterator[System]:
    """The compose project, up and healthy; gone afterwards, with its volumes, secrets and certificates.

    folder: the engine's. changes: section -> fields, on top of the tiny configuration.
    """
    deploy = folder / "deploy"
    shutil.rmtree(deploy, ignore_errors=True)
    private = ("*_password", "*_token", "*_key", "*.key", "*.crt", "*.srl", "wheels")
    shutil.copytree(DEPLOY, deploy, ignore=shutil.ignore_patterns(*private))
    for made in ("secrets/make.sh", "tls/make.sh"):
        subprocess.run([deploy / made], check=True, capture_output=True, timeout=PATIENCE_S)
    tree = deploy_config("tiny")
    tree["run"]["steps"] = 100000  # the drills end it
    mine: Tree = {"trainer": {"checkpoint": {"interval_steps": 5}}, "lag": {"max": 2}}
    for section, fields in {**mine, **(changes or {})}.items():
        tree.setdefault(section, {}).update(fields)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    (folder / "docker-config/cli-plugins").mkdir(parents=True, exist_ok=True)
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "DOCKER_CONFIG": str(folder / "docker-config"),
        "DOCKER_HOST": env.socket_of(folder),
        "REDIS_IMAGE": env.REDIS,
        "LAGRANGE_CONFIG": str(folder / "config.yaml"),
        **{f"LAGRANGE_{name.upper()}_IMAGE": image for name, image in env.IMAGES.items()},
    }
    running = System(folder, deploy, variables, overrides)
    running.compose("down", "-v", "--timeout", "5")
    try:
        began = time.monotonic()
        running.up()
        say(f"up --wait: {time.monotonic() - began:.0f} s")
        yield running
    except RuntimeError as error:
        raise AssertionError(f"{error}\n{running.ends()}") from error
    finally:
        if not KEEP:
            running.compose("down", "-v", "--timeout", "20")
            shutil.rmtree(deploy)
