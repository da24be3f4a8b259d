"""What a run's configuration becomes on this machine: folder, ports, model, and the list of processes to start.

Invariant: the resolved configuration in runs/<id>/config.yaml is the only thing that processes are told; it holds no
port 0 but the engines' (each chooses its own and tells the registry), no relative path (but in a task's own parameters)
and no model that still has to be made, and resolving it again changes nothing but ports that are taken.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import RunConfig
from configs.load import validated
from configs.ports import free_port, port_is_free


class CannotStart(Exception):
    """Something that must be mended before the run can start; the message says what and how."""


@dataclass(frozen=True, slots=True)
class Role:
    """One process of the run. name: unique, "worker-0". command: arguments after `lagrange`."""

    name: str
    command: tuple[str, ...]


def roles(config: RunConfig, file: Path) -> tuple[Role, ...]:
    """The processes of a run in the order in which they start; `file` is its resolved configuration."""

    def of(name: str, command: str, index: int | None = None) -> Role:
        number = () if index is None else ("--index", str(index))
        return Role(name, (command, "--config", str(file), *number))

    engines = () if config.engine.urls else tuple(range(config.engine.replicas))
    return (
        *(of(f"engine-{i}", "engine", i) for i in engines),
        of("weight-sync", "weight-sync"),
        of("monitor", "monitor"),
        of("trainer", "trainer"),
        *(of(f"worker-{i}", "rollout", i) for i in range(config.rollout.workers)),
        *((of("evaluator", "evaluator"),) if config.evaluation.tasks else ()),
    )


def new_run_id(name: str, now: time.struct_time, taken: Collection[str] = ()) -> str:
    """`name` and the time of day, as in local-20261129-203515; a number is added if that folder exists."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S', now)}"
    candidate, number = stem, 2
    while candidate in taken:
        candidate, number = f"{stem}-{number}", number + 1
    return candidate


def resolve(config: RunConfig, run_id: str, directory: Path, *, move_taken_ports: bool = False) -> RunConfig:
    """The configuration that every process of run `run_id` reads: absolute paths, real ports, the model's folder.

    move_taken_ports: a port that is in use is replaced (a resumed run, whose ports were chosen for it) instead of
    refused. Raises CannotStart if a port that the file asks for is taken.
    """
    tree = _with_absolute_paths(config.model_dump(mode="python"))
    folder = directory.absolute() / run_id
    tree["run"].update(id=run_id, directory=folder.parent)
    if config.model.tiny is not None:
        tree["model"] = {"path": folder / "model", "tiny": None}
    ports = _Ports(move_taken_ports)
    if not config.engine.urls:
        tree["engine"]["port"] = ports.of_engines(config.engine.port, config.engine.host, config.engine.replicas)
    if embeds_redis(config):
        port = ports.choose("redis.port", config.redis.port, "127.0.0.1")
        tree["redis"].update(port=port, url=embedded_url(port))
    for section, part in (("weight_sync", config.weight_sync), ("monitor", config.monitor)):
        tree[section]["port"] = ports.choose(f"{section}.port", part.port, part.host)
    tree["trainer"]["port"] = ports.choose("trainer.port", config.trainer.port, "127.0.0.1")
    return validated(tree, str(folder))


def _with_absolute_paths(tree: dict[str, Any]) -> dict[str, Any]:
    """A symbolic link stays one: the place of an interpreter names its environment."""
    out = dict(tree)
    for name, value in tree.items():
        if isinstance(value, dict):
            out[name] = _with_absolute_paths(value)
        elif isinstance(value, Path):
            out[name] = value.absolute()
    return out


def embedded_url(port: int) -> str:
    """Address of the embedded Redis."""
    return f"redis://127.0.0.1:{port}/0"


def embeds_redis(config: RunConfig) -> bool:
    """Whether `lagrange up` starts Redis itself: no address is given, or the address is the one it gave itself."""
    return config.redis.url is None or config.redis.url == embedded_url(config.redis.port)


class _Ports:
    """Hands out ports, none of them twice."""

    def __init__(self, move_taken: bool) -> None:
        self._move_taken = move_taken
        self._given: set[int] = set()

    def choose(self, field: str, wanted: int, host: str) -> int:
        """`wanted` if it is free, any port if it is 0 or may be moved."""
        port = self._row(field, wanted, host, 1) or self._any(field, host)
        self._given.add(port)
        return port

    def of_engines(self, wanted: int, host: str, number: int) -> int:
        """`wanted` if it and the number - 1 ports after it are free, 0 if it is 0 or may be moved.

        With 0 an engine chooses when it starts, and again should somebody take its port before it listens.
        """
        first = self._row("engine.port", wanted, host, number)
        if not first:
            self._any("engine.port", host)  # where it cannot, it is to be said now
        self._given.update(range(first, first + number))
        return first

    def _row(self, field: str, wanted: int, host: str, length: int) -> int:
        """`wanted` if it and those after it are free, else 0. Raises CannotStart if they must not be moved."""
        taken = [
            p for p in range(wanted, wanted + length) if wanted and (p in self._given or not port_is_free(host, p))
        ]
        if taken and not self._move_taken:
            self._any(field, host)  # no port is free on a host that is not this one
            raise CannotStart(
                f"{field}: port {taken[0]} on {host} is in use. End what listens there, or set {field}: 0 "
                "for a free one."
            )
        return 0 if taken else wanted

    def _any(self, field: str, host: str) -> int:
        try:
            return free_port(host, self._given)
        except OSError as error:
            place = field.replace(".port", ".host")
            raise CannotStart(f"{place}: cannot listen on {host} ({error.strerror}). Set it to 127.0.0.1.") from error
