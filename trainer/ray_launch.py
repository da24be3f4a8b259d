"""Starts the trainer's ranks on a Ray cluster: one actor a rank, all in one placement group.

Invariants: the ranks live and die together, as with the local launcher: when an actor, its node or its rank is lost,
the others are ended and the whole group is started anew, from the last checkpoint, at most `restarts` times. A rank is
the same process with the same environment as under the local launcher or torchrun; the kernel ends it with its actor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from configs.lifetime import signals_noted
from configs.load import ConfigError
from configs.own_packages import ROOT, module_path
from configs.ports import free_port
from configs.schema import RunConfig
from trainer.launch import AGAIN, PARENT, outcome, stop_seconds

log = structlog.get_logger()

_POLL_S = 0.2
_LOST = 128 + signal.SIGKILL


class Rank:
    """The actor: holds one rank's process. Every method returns at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int]:
        """(address of this node, a port that is free on it)."""
        import ray  # optional

        return ray.util.get_node_ip_address(), free_port()

    def start(self, command: Sequence[str], environment: dict[str, str], folder: str) -> None:
        """Start the rank, in `folder` where this node has it."""
        self._process = subprocess.Popen(
            list(command),
            env=os.environ | environment | {PARENT: str(os.getpid())},
            cwd=folder if Path(folder).is_dir() else None,
        )

    def poll(self) -> int | None:
        """The rank's exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the rank, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def run_on_ray(config: RunConfig, module: str, arguments: Sequence[str]) -> int:
    """Run module.main(arguments) on every rank of trainer.layout as Ray actors; returns the exit code.

    trainer.ray.address, or else RAY_ADDRESS, names the cluster; without either a local one is started. SIGTERM and
    SIGINT go to the ranks. A group that ends with code 1, or loses a rank, is started again. The interpreter and the
    run's folder must be at the same path on every node, as they are in the image. Raises ConfigError if ray is not
    installed, or the cluster has no room for the ranks in time.
    """
    try:
        import ray  # optional
    except ImportError as error:
        raise ConfigError("trainer.launcher is ray, but ray is not installed: pip install ray==2.60.0.") from error
    connect(ray, config, config.trainer.layout.ranks)
    try:
        with signals_noted(signal.SIGTERM, signal.SIGINT) as noted:
            for attempt in range(config.trainer.ray.restarts + 1):
                code = _group(config, module, arguments, noted)
                if noted or code not in (AGAIN, *range(128, 160)):
                    return code
                log.warning("the ranks ended and are started again", code=code, attempt=attempt + 1)
            return code
    finally:
        ray.shutdown()


def connect(ray: Any, config: RunConfig, cpus: int) -> bool:
    """Join the cluster, or start a local one with room for `cpus` actors, again until it is up.

    Ray itself waits 30 s for its node, too little for a busy machine. True if the cluster is our own. Raises
    ConfigError.
    """
    settings = config.trainer.ray
    address = settings.address or os.environ.get("RAY_ADDRESS")
    own = address is None
    deadline = time.monotonic() + settings.start_timeout_s
    while True:
        try:
            # Ray has its actors look for modules in the current folder first: no file there takes the place of another.
            with contextlib.chdir(ROOT):
                ray.init(
                    address=address or "local",
                    log_to_driver=True,
                    logging_level="warning",
                    include_dashboard=False if own else None,
                    num_cpus=max(cpus, os.cpu_count() or 1) if own else None,
                )
            return own
        except Exception as error:  # what ray raises when its node does not come up has no class of its own
            ray.shutdown()
            if not own or time.monotonic() > deadline:
                raise ConfigError(
                    f"no Ray cluster at {address or 'this machine'} within {settings.start_timeout_s} s: {error}"
                ) from error
            log.warning("ray did not come up and is started again", problem=str(error)[:200])


def _group(config: RunConfig, module: str, arguments: Sequence[str], noted: list[int]) -> int:
    """One life of the group: 0 if all ranks ended well, else the first failure's code; a lost actor is 128 + 9."""
    import ray  # optional
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    world, settings = config.trainer.layout.ranks, config.trainer.ray
    on_gpu = config.trainer.device == "cuda"
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if on_gpu else {})
    group = placement_group([bundle] * world, strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(settings.start_timeout_s):
            raise ConfigError(
                f"the Ray cluster has no room for {world} ranks of {bundle} after {settings.start_timeout_s} s. Add "
                "nodes, or change trainer.layout."
            )
        actor = ray.remote(Rank)
        actors = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if on_gpu else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(world)
        ]
        try:
            places = ray.get([a.place.remote() for a in actors], timeout=settings.start_timeout_s)
            _start(ray, actors, places, module, arguments, settings.start_timeout_s)
            return _watch(ray, actors, noted)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            log.warning("a rank's actor is lost", problem=str(error)[:200])
            return _LOST
    finally:
        for handle in actors:
            ray.kill(handle)  # and with it the rank
        remove_placement_group(group)


def _start(
    ray: Any,
    actors: Sequence[Any],
    places: Sequence[tuple[str, int]],
    module: str,
    arguments: Sequence[str],
    timeout_s: float,
) -> None:
    command = [sys.executable, "-P", "-m", "trainer.launch", module, *arguments]
    started = []
    for rank, handle in enumerate(actors):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",  # an actor sees no GPU but its own
            "WORLD_SIZE": str(len(actors)),
            "MASTER_ADDR": places[0][0],
            "MASTER_PORT": str(places[0][1]),
            **module_path(),
        }
        started.append(handle.start.remote(command, environment, str(Path.cwd())))
    ray.get(started, timeout=timeout_s)


def _watch(ray: Any, actors: Sequence[Any], noted: list[int]) -> int:
    """Until all ranks ended well or one did not, or stop_seconds() after a signal came."""
    patience = stop_seconds()
    passed_on: float | None = None
    while True:
        codes: list[int | None] = ray.get([a.poll.remote() for a in actors], timeout=30)
        if (code := outcome(codes)) is not None:
            return code
        if noted and passed_on is None:
            passed_on = time.monotonic()
            ray.get([a.send.remote(noted[0]) for a in actors], timeout=30)
        if passed_on is not None and time.monotonic() - passed_on > patience:
            return 128 + noted[0]
        time.sleep(_POLL_S)
