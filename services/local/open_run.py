"""From a run's folder to a handle on its queue, or to a message that says what became of the run.

Invariant: nothing is waited for that cannot come. Whether the embedded Redis of a run can be there is known from its
folder: `lagrange up` holds it while it lives.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from broker.errors import BrokerError, BrokerUnavailable
from broker.queue import Broker
from broker.types import Snapshot
from configs import ConfigError, RunConfig, load_config
from configs.secrets import REDIS_PASSWORD, read_secret
from services.local.layout import embeds_redis
from services.local.live import Beginning
from services.options import program

LOCK = "up.lock"
BEGINNING = "session.json"  # of the last `lagrange up`


class NotRunning(Exception):
    """The run has ended; the message says how, and what to do."""


@contextmanager
def opened(where: Path) -> Iterator[tuple[Broker, RunConfig]]:
    """A handle on the run that a folder or a configuration file names, closed at the end.

    Raises ConfigError, NotRunning and BrokerError.
    """
    config, folder = located(where)
    if config.redis.url is None:
        raise ConfigError(f"{where}: redis.url is not set, so there is nothing to ask. Name a run's folder, runs/<id>.")
    see_it_runs(config, folder)
    broker = Broker.of_run(config, read_secret(REDIS_PASSWORD))
    try:
        yield broker, config
    except BrokerUnavailable:
        see_it_runs(config, folder)
        raise
    finally:
        broker.close()


def snapshot_if_any(where: Path) -> tuple[Snapshot | None, str]:
    """What Redis has of the run that a folder or a configuration file names now; None, and why, if it cannot be had."""
    try:
        with opened(where) as (broker, _):
            return broker.snapshot(), ""
    except (ConfigError, NotRunning, BrokerError) as error:
        return None, str(error)


def located(where: Path) -> tuple[RunConfig, Path]:
    """Configuration and folder of the run that its folder or its configuration file names; of a run whose processes
    were started one by one only the latter knows. Raises ConfigError."""
    if where.is_dir():
        if not (where / "config.yaml").is_file():
            raise ConfigError(
                f"{where}: no run, or one that `{program()} up` did not start (config.yaml is missing). Name a folder "
                "runs/<id>, or the configuration file that the run's processes were given."
            )
        return load_config(where / "config.yaml"), where
    if not where.exists():
        url = str(where).startswith(("http:/", "https:/"))
        why = "an address of a monitor, which `status` and `watch` take" if url else "no such folder or file"
        raise ConfigError(f"{where}: {why}. Name a run's folder, runs/<id>, or its configuration file.")
    config = load_config(where)
    if not config.run.id:
        raise ConfigError(f"{where}: run.id is not set, so it may be of many runs. Name a run's folder, runs/<id>.")
    return config, config.run.folder


def see_it_runs(config: RunConfig, folder: Path) -> None:
    """Raise NotRunning if the run's Redis went with the `lagrange up` that had started it."""
    lock = folder / LOCK
    if embeds_redis(config) and lock.is_file() and not held(lock):
        raise NotRunning(how_it_ended(folder))


def held(lock: Path) -> bool:
    """Whether a `lagrange up` holds the lock file of its run's folder."""
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def how_it_ended(folder: Path) -> str:
    """What became of a run whose Redis ended with its `lagrange up`, from its last snapshot."""
    ledger = read_ledger(folder)
    step = f"step {ledger['step']} of {ledger['steps_total']}" if {"step", "steps_total"} <= set(ledger) else ""
    if ledger.get("status") == "finished":
        return f"{folder} has finished ({step}), and its Redis with it. What it did: {folder / 'report.html'}"
    stopped = f"stopped ({step})" if step else "ended without a last snapshot"
    resume = f"{program()} up --resume {folder}"
    return f"{folder} does not run: it {stopped}, and its Redis ended with it. Go on with: {resume}"


def save_beginning(folder: Path, beginning: Beginning) -> None:
    """Note in a run's folder how a session of `up` began. Raises OSError."""
    aside = folder / f".{BEGINNING}"
    aside.write_bytes(msgspec.json.encode(beginning))
    aside.replace(folder / BEGINNING)


def has_begun(folder: Path) -> bool:
    """Whether a run's folder shows that its run was started, by `up` or on a cluster, and not merely prepared."""
    return (folder / BEGINNING).exists() or (folder / "checkpoints").is_dir()


def read_beginning(folder: Path) -> Beginning | None:
    """How the last session of `up` began; None for a run that `up` did not start."""
    try:
        return msgspec.json.decode((folder / BEGINNING).read_bytes(), type=Beginning)
    except (OSError, msgspec.MsgspecError):
        return None


def read_ledger(folder: Path) -> dict[str, Any]:
    """The last snapshot of a run as plain data; empty if there is none. Raises ConfigError for a damaged one."""
    file = folder / "ledger.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}). Delete it: the run's next end writes it anew.") from error
    return found if isinstance(found, dict) else {}
