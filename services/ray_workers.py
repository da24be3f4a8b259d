"""`lagrange rollout-pool`: rollout workers as actors of a Ray cluster, as many as `rollout.workers` says by now.

Invariants: each index has at most one worker. One that ended badly, or whose node was lost, is started again wherever
the cluster has room, after waits that grow. One that is surplus, or all when the pool is asked to stop, get SIGTERM
first and hand their tickets back. The pool holds no state of the run: when it dies its workers die with their actors,
their leases run out, and their prompts are issued again. SIGHUP makes it read the file again: that adds and removes
workers.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from broker.logs import configure_logs
from configs.lifetime import signals_noted
from configs.load import ConfigError
from configs.own_packages import module_path
from configs.schema import RunConfig
from services.deployment import process_config
from trainer.ray_launch import Rank, connect

log = structlog.get_logger()

MODULE = "services.ray_workers"
POLL_S = 0.5
GRACE_S = 20.0
"""How long a worker that got SIGTERM may take to hand its tickets back, in seconds."""
LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One index. running: its worker lives. done: it ended well. failures: bad ends in a row, the last at ended_s."""

    running: bool
    done: bool = False
    failures: int = 0
    ended_s: float = 0.0


def due(wanted: int, seen: Mapping[int, Seen], now_s: float) -> tuple[list[int], list[int]]:
    """(indexes to start, indexes to stop) now. Pure. A worker that failed k times waits min(2^k, 30) / 2 seconds."""

    def waits(entry: Seen) -> bool:
        pause = min(2.0**entry.failures, LONGEST_WAIT_S) / 2 if entry.failures else 0.0
        return now_s < entry.ended_s + pause

    start = [i for i in range(wanted) if i not in seen or not (seen[i].running or seen[i].done or waits(seen[i]))]
    return start, [i for i, entry in seen.items() if entry.running and i >= wanted]


def wanted_now(read: Callable[[Path], RunConfig], file: Path, before: int) -> int:
    """rollout.workers as the file says now; `before` if it cannot be used: a slip in it is to end no worker."""
    try:
        return read(file).rollout.workers
    except ConfigError as error:
        log.error("the file is not taken", problem=str(error))
        return before


class Pool:
    """The workers of one run."""

    def __init__(self, ray: Any, file: Path, *, module: str = MODULE, cpus: float = 1.0) -> None:
        """module: its main(["--worker", file, index]) is a worker. cpus: that one worker reserves on the cluster."""
        self._ray, self._file, self._module, self._cpus = ray, file, module, cpus
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}  # the answer to come of each worker's last poll
        self.seen: dict[int, Seen] = {}

    def tend(self, wanted: int) -> None:
        """Look at every worker, then start and stop what is due."""
        for index in list(self._actors):
            code = self._code(index)
            if code is not None:
                self._ended(index, code)
        start, stop = due(wanted, self.seen, time.monotonic())
        self._stop(stop)
        for index in start:
            self._start(index)

    def close(self) -> None:
        """End all workers."""
        self._stop(list(self._actors))

    def _code(self, index: int) -> int | None:
        """A worker's exit code, None while it runs or waits for room; 137 if its actor or node is gone."""
        answer = self._asked.setdefault(index, self._actors[index].poll.remote())
        ready, _ = self._ray.wait([answer], timeout=0.2)
        if not ready:
            return None
        del self._asked[index]
        try:
            code: int | None = self._ray.get(answer)
            return code
        except self._ray.exceptions.RayActorError:
            return 128 + signal.SIGKILL

    def _drop(self, index: int) -> None:
        self._asked.pop(index, None)
        self._ray.kill(self._actors.pop(index))

    def _ended(self, index: int, code: int) -> None:
        self._drop(index)
        failures = self.seen[index].failures + 1 if code else 0
        self.seen[index] = Seen(False, not code, failures, time.monotonic())
        log.warning("a rollout worker ended", index=index, code=code, failures=failures)

    def _start(self, index: int) -> None:
        actor = self._ray.remote(Rank).options(num_cpus=self._cpus, max_restarts=0).remote()
        command = [sys.executable, "-P", "-m", "trainer.launch", self._module, "--worker", str(self._file), str(index)]
        actor.start.remote(command, module_path(), str(Path.cwd()))
        self._actors[index] = actor
        self.seen[index] = Seen(True, failures=self.seen[index].failures if index in self.seen else 0)
        log.info("rollout worker", index=index, started=True)

    def _stop(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            self._actors[index].send.remote(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for index in indexes:
            while self._code(index) is None and time.monotonic() < deadline:
                time.sleep(0.1)
            self._drop(index)
            del self.seen[index]
            log.info("rollout worker", index=index, started=False)


def run(file: Path, *, module: str = MODULE, read: Callable[[Path], RunConfig] = process_config) -> int:
    """Keep the pool until all workers ended well, as they do with the run, or SIGTERM or SIGINT. Raises ConfigError."""
    try:
        import ray  # optional
    except ImportError as error:
        raise ConfigError("a pool of rollout workers needs Ray: pip install ray==2.60.0.") from error
    config = read(file)
    configure_logs(config.run.id, "rollout-pool")
    own = connect(ray, config, config.rollout.workers)
    wanted = config.rollout.workers
    # A local cluster has the CPUs of its start, and workers mostly wait: there they reserve none, so a pool can grow.
    pool = Pool(ray, file.absolute(), module=module, cpus=0.0 if own else 1.0)
    with signals_noted(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as noted:
        try:
            while not set(noted) & {signal.SIGTERM, signal.SIGINT}:
                if noted:
                    noted.clear()
                    wanted = wanted_now(read, file, wanted)
                    log.info("rollout pool", wanted=wanted)
                pool.tend(wanted)
                if all(i in pool.seen and pool.seen[i].done for i in range(wanted)):
                    break
                time.sleep(POLL_S)
            return 0
        finally:
            pool.close()
            ray.shutdown()


def main(arguments: Sequence[str]) -> int:
    """One worker, as an actor starts it: --worker FILE INDEX."""
    from rollout import main as worker  # the pool itself needs none of it

    _, file, index = arguments
    return int(worker.main(process_config(Path(file)), int(index)) or 0)
