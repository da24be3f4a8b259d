"""Processes that an orchestrator starts one by one (compose, Kubernetes), without `lagrange up` to prepare their run.

Invariant: every process of a run derives the same configuration from the same file, so nothing has to be handed from
one to another; `initialise` may be repeated at any time, also while the run trains, and then changes nothing.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from broker.access import ROLES, Role, users
from broker.errors import BrokerUnavailable
from broker.queue import Broker
from configs import ConfigError, RunConfig, load_config
from configs.load import validated
from configs.secrets import REDIS_PASSWORD, read_secret
from configs.sections.run import NAME

REDIS_WAIT_S = 120.0


def process_config(file: Path) -> RunConfig:
    """The configuration of one process. A tiny model is where `initialise` makes it: <run.directory>/<run.id>/model.

    Raises ConfigError.
    """
    config = load_config(file)
    if config.model.tiny is None:
        return config
    if not config.run.id:
        raise ConfigError(f"{file}: run.id is empty. Name the run, or start it with `lagrange up`.")
    tree = config.model_dump(mode="python")
    tree["model"] = {"path": config.run.folder / "model", "tiny": None}
    return validated(tree, str(file))


def initialise(file: Path) -> RunConfig:
    """Make the run's folder, the tiny model if there is one to make, and the run's records in Redis.

    Waits for Redis. Returns the configuration that the run's processes use. Raises ConfigError and BrokerError.
    """
    from services.local.tiny_model import write_tiny_model  # processes that only read need no numpy

    asked, config = load_config(file), process_config(file)
    problems = deployment_problems(asked)
    if problems:
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in problems))
    try:
        config.run.folder.mkdir(parents=True, exist_ok=True)
        if asked.model.tiny is not None and config.model.path is not None:
            write_tiny_model(asked.model.tiny, asked.run.seed, config.model.path)
    except OSError as error:
        raise ConfigError(
            f"run.directory: {config.run.folder} cannot be written ({error.strerror}). Give it to user {os.getuid()}."
        ) from error
    if config.model.path is None or not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path: {config.model.path} holds no checkpoint (config.json is missing).")
    broker = _connect(config)
    try:
        broker.initialise(config)
    finally:
        broker.close()
    return config


def redis_users(passwords: Path, run: str = "*") -> str:
    """Redis' ACL file: a user for each role with a file redis_<role>_password in the folder `passwords`.

    run: whose keys the users may use, "*": those of every run. Raises ConfigError and BrokerError (a short password).
    """
    found: dict[Role, str] = {}
    for role in ROLES:
        file = passwords / f"redis_{role.replace('-', '_')}_password"
        if file.exists():
            found[role] = read_secret("PASSWORD", {"PASSWORD_FILE": str(file)}) or ""
    if run != "*" and not re.fullmatch(NAME, run):
        raise ConfigError(f"--run {run!r} is no run id. Name one run, or * for all.")
    if not found:
        raise ConfigError(f"{passwords}: no file redis_<role>_password. Roles are {', '.join(ROLES)}.")
    return users(found, run)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half written. Raises ConfigError."""
    try:
        aside = path.parent / f".{path.name}.new"
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). Name a file in a writable folder.") from error


def deployment_problems(config: RunConfig) -> list[str]:
    """What `lagrange up` would choose and nobody chooses here: one message for each field that is open."""
    found = []
    if not config.run.id:
        found.append("run.id is empty: every process needs the same. Name the run.")
    if config.redis.url is None:
        found.append("redis.url is not set: nobody embeds a server here. Name one.")
    if not config.run.directory.is_absolute():
        found.append(f"run.directory: {config.run.directory} is relative. Give the path of the shared volume.")
    ports = {
        "weight_sync.port": config.weight_sync.port,
        "monitor.port": config.monitor.port,
        "trainer.port": config.trainer.port,
        "engine.port": config.engine.port,
    }
    found += [f"{name} is 0: others have to find it. Choose a port." for name, port in ports.items() if port == 0]
    return found


def _connect(config: RunConfig) -> Broker:
    assert config.redis.url is not None
    password = read_secret(REDIS_PASSWORD)
    end = time.monotonic() + REDIS_WAIT_S
    while True:
        try:
            return Broker.of_run(config, password)
        except BrokerUnavailable:
            if time.monotonic() > end:
                raise
        time.sleep(0.5)
