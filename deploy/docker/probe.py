#!/opt/lagrange/bin/python3
"""`lagrange-probe [ROLE]`: is this container's process well? Exit code 0: yes; 1: no, and one line says why.

    lagrange-probe engine              what a health check runs (weight-sync, monitor, trainer, rollout alike)
    lagrange-probe init --wait 600     until `lagrange init` has prepared the run

Invariant: changes nothing. engine, weight-sync and monitor are asked over HTTP on this machine; trainer and rollout,
which serve nothing, are well if Redis heard of them lately. Without ROLE (an image's own HEALTHCHECK) it is the one
that the container runs, as the arguments of process 1 say. It runs often, so what asks over HTTP imports next to
nothing: 0.1 s of a core instead of a whole one.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from broker.types import Snapshot

TIMEOUT_S = 4.0
FRESH_MS = 15_000
CONFIG = Path(os.environ.get("LAGRANGE_CONFIG", "/etc/lagrange/config.yaml"))
PATHS = {"engine": "/health", "weight-sync": "/readyz", "monitor": "/readyz"}
SECTIONS = {"engine": "engine", "weight-sync": "weight_sync", "monitor": "monitor"}
ROLES = (*PATHS, "trainer", "rollout")


class NotWell(Exception):
    """The message says what is wrong."""


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="lagrange-probe")
    parser.add_argument("role", nargs="?", choices=(*ROLES, "init"))
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to go on asking")
    options = parser.parse_args()
    role = options.role or role_of_container(Path("/proc/1/cmdline").read_bytes())
    end = time.monotonic() + options.wait
    while True:
        try:
            probe(role, CONFIG)
        except Exception as error:
            if time.monotonic() >= end:
                sys.stderr.write(f"{role}: {type(error).__name__}: {error}\n")
                return 1
            time.sleep(1.0)
        else:
            return 0


def role_of_container(command: bytes) -> str:
    """The role among the arguments of process 1: `lagrange ROLE --config ...`, maybe behind an init."""
    words = command.decode(errors="replace").split("\0")
    return next((word for word in words if word in ROLES), "unknown")


def probe(role: str, file: Path) -> None:
    """Raises unless all is well. file: the run's configuration."""
    if role in PATHS:
        tree: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        section = tree[SECTIONS[role]]
        get(f"{'https' if section.get('cert_file') else 'http'}://127.0.0.1:{section['port']}{PATHS[role]}")
    elif role == "trainer":
        trainer_is_attached(snapshot_of(file))
    elif role == "rollout":
        worker_beats(snapshot_of(file), socket.gethostname())
    elif role == "init":
        snapshot_of(file)
        model_is_there(file)
    else:
        raise NotWell("the container runs none of " + ", ".join(ROLES))


def trainer_is_attached(snapshot: Snapshot) -> None:
    """A trainer holds the run's lease, or the run needs none any more."""
    left = snapshot.counters.get("trainer_lease_left_ms", 0.0)
    if snapshot.status != "finished" and (snapshot.epoch == 0 or left <= 0):
        raise NotWell(f"no trainer renewed its lease: {left:.0f} ms left, epoch {snapshot.epoch}")


def worker_beats(snapshot: Snapshot, host: str) -> None:
    """A worker of this host said lately that it lives, or the run needs none any more."""
    ages = [
        snapshot.time_ms - float(facts.get("heartbeat_ms", 0))
        for name, facts in snapshot.workers.items()
        if f"@{host}-" in name
    ]
    if snapshot.status != "finished" and min(ages, default=float("inf")) > FRESH_MS:
        raise NotWell(f"no heartbeat from {host} within {FRESH_MS} ms")


def model_is_there(file: Path) -> None:
    """The model's folder holds a checkpoint."""
    from services.deployment import process_config  # see the module

    path = process_config(file).model.path
    if path is None or not (path / "config.json").is_file():
        raise NotWell(f"{path} holds no model")


def snapshot_of(file: Path) -> Snapshot:
    """The run in Redis."""
    from broker.queue import Broker  # see the module
    from configs import load_config
    from configs.secrets import REDIS_PASSWORD, read_secret

    broker = Broker.of_run(load_config(file), read_secret(REDIS_PASSWORD), timeout_s=TIMEOUT_S)
    try:
        return broker.snapshot()
    finally:
        broker.close()


def get(url: str) -> None:
    """Raises unless `url`, of this machine, answers 2xx within TIMEOUT_S.

    A certificate is of the service's name, not of 127.0.0.1, and nothing secret is sent: it is not checked.
    """
    unchecked = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    with urllib.request.build_opener(urllib.request.ProxyHandler({}), unchecked).open(url, timeout=TIMEOUT_S):
        pass


if __name__ == "__main__":
    sys.exit(main())
