"""`lagrange engine`: keeps one SGLang server alive, and tells the registry what it is.

Invariant: the engine is JOINING in the registry only after a probe showed that it gives log-probs, versions and routes;
weight-sync alone makes it SERVING, once it has loaded and confirmed a published version. When the process ends it is
GONE at once. Heartbeats change nothing that weight-sync wrote. An engine that was told to leave the fleet stays out of
it until somebody lets it join again. The server dies with this process; this process gives up after MAX_FAILURES starts
in a row that came to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from broker.errors import BrokerError
from broker.logs import configure_logs
from broker.types import NO_SERVER, EngineRecord, EngineState
from configs.drain import drain_seconds
from configs.load import ConfigError
from configs.ports import free_port, port_is_free
from configs.schema import RunConfig
from configs.secrets import ENGINE_API_KEY, REDIS_PASSWORD, read_secret
from rollout.checkpoint import Checkpoint, read_checkpoint
from rollout.client import EngineBusy, EngineClient, EngineDropped, EngineError, EngineTimeout, EngineUnreachable
from rollout.command import Launch, engine_launch, key_file_text
from rollout.connect import connect_broker, stop_on_signal
from rollout.diagnosis import Diagnosis, diagnose
from rollout.local_copy import Keeper
from rollout.ports import LEFT, EngineRegistry
from rollout.probe import probe
from rollout.process import ServerProcess
from rollout.threads import in_thread

LOG = structlog.get_logger()
T = TypeVar("T")
MAX_FAILURES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
BEAT_S = 1.0
HUNG_S = 60.0  # a server that has not answered at all for so long is started again
PROBE_S = 60.0
# What an orchestrator says that starts many engines of the same configuration (docs/deploy/kubernetes.md):
ADVERTISED_HOST = "LAGRANGE_ADVERTISE_HOST"  # where others reach this engine; else the host name, or engine.host
SCRATCH = "LAGRANGE_SCRATCH"  # folder for log and key file, where the run's folder cannot be written
EVERYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a supervisor runs. url: where others reach it. key_file: written at start, removed at the end.

    engine_id: unique in the run; with a host that is reached from elsewhere it names the host, since every container
    may run an engine 0. drain_s: see configs/drain.py.
    """

    engine_id: str
    url: str
    launch: Launch
    checkpoint: Checkpoint
    log: Path
    key: str | None
    key_file: Path | None
    port: int
    drain_s: float = 0.0


def make_plan(config: RunConfig, index: int) -> Plan:
    """Read and check what a start needs. Raises ConfigError with one clear message; writes the key file."""
    engine = config.engine
    if config.model.path is None:
        raise ConfigError("model.path is not set. Set it, or start the run with `lagrange up`, which makes model.tiny.")
    checkpoint = read_checkpoint(config.model.path)
    if not any(config.model.path.glob("*.safetensors")):
        raise ConfigError(f"model.path: {config.model.path} has no *.safetensors. Complete the checkpoint.")
    if not os.access(engine.python, os.X_OK):
        raise ConfigError(f"engine.python: {engine.python} is missing or no program. Run `make setup`, or set it.")
    port = _port(config, index)
    key = read_secret(ENGINE_API_KEY)
    elsewhere = engine.host in EVERYWHERE
    host = os.environ.get(ADVERTISED_HOST) or (socket.gethostname() if elsewhere else engine.host)
    name = f"{index}@{host}" if elsewhere else str(index)
    scratch = Path(os.environ.get(SCRATCH) or config.run.folder)
    key_file = None
    if key is not None:
        key_file = scratch / f".engine-{name}.yaml"
        _write_private(key_file, key_file_text(key))
    return Plan(
        engine_id=f"engine-{name}",
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        launch=engine_launch(
            engine,
            checkpoint,
            port,
            environment=os.environ,
            key_file=key_file,
            index=index,
            seed=config.run.seed + index,
            cores=sorted(os.sched_getaffinity(0)),
        ),
        checkpoint=checkpoint,
        log=scratch / "logs" / f"sglang-{name}.log",
        key=key,
        key_file=key_file,
        port=port,
        drain_s=drain_seconds(),
    )


class Supervisor:
    """Keeps the server of a plan alive; `run` is its whole life.

    replan: makes a plan on another port, for when a port that we chose is taken; None: the port was asked for.
    """

    def __init__(
        self, plan: Plan, config: RunConfig, registry: EngineRegistry, replan: Callable[[], Plan] | None = None
    ) -> None:
        self._plan, self._config, self._registry, self._replan = plan, config, registry, replan
        self._broker_s = 3 * config.redis.timeout_s
        self._left = False  # somebody told the engine to leave the fleet
        weights = config.weights
        root = weights.local_folder / config.run.id / plan.engine_id
        self._copies = Keeper(plan.engine_id, root, registry) if weights.transport == "delta" else None

    async def run(self, stop: asyncio.Event) -> int:
        """0 when told to stop, 1 when the server cannot be kept alive."""
        if self._copies is None:
            return await self._keep_alive(stop)
        copies = asyncio.create_task(self._copies.run())
        try:
            return await self._keep_alive(stop)
        finally:
            copies.cancel()
            await asyncio.gather(copies, return_exceptions=True)

    async def _keep_alive(self, stop: asyncio.Event) -> int:
        failures, pause = 0, FIRST_PAUSE_S
        while not stop.is_set():
            began = time.monotonic()
            ready, diagnosis = await self._one_life(stop)
            if stop.is_set():
                break
            failures = 0 if ready and time.monotonic() - began > 2 * LONGEST_PAUSE_S else failures + 1
            pause = FIRST_PAUSE_S if failures <= 1 else min(2 * pause, LONGEST_PAUSE_S)
            LOG.error("the engine ended", problem=diagnosis.message, failures=failures, log=str(self._plan.log))
            await self._tell_gone(diagnosis.message, enter=True)
            if diagnosis.hopeless or failures >= MAX_FAILURES:
                LOG.error("cannot keep the engine alive", problem=diagnosis.message)
                return 1
            if diagnosis.port_taken and self._replan is not None:
                self._plan = self._replan()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tell_gone("stopped"), 1.0)
        return 0

    async def _one_life(self, stop: asyncio.Event) -> tuple[bool, Diagnosis]:
        """Start the server and stay until it ends or we are told to stop; whether it became ready, and why it ended."""
        plan, engine = self._plan, self._config.engine
        LOG.info("starting the engine", url=plan.url, log=str(plan.log))
        began = time.monotonic()
        try:
            server = await ServerProcess.start(plan.launch, plan.log, plan.key)
        except OSError as error:
            return False, Diagnosis(f"the engine's process cannot be started: {error.strerror}")
        client = EngineClient(plan.url, plan.checkpoint, api_key=plan.key, timeout_s=PROBE_S)
        try:
            problem = await _first(stop.wait(), server.wait(), server.port_taken.wait(), self._until_ready(client))
            if stop.is_set() or server.exit_code is not None or server.port_taken.is_set():
                return False, diagnose(server.exit_code, server.lines, engine, plan.port)
            if problem:
                seen = diagnose(None, server.lines, engine, plan.port)
                return False, replace(seen, message=f"{problem}; {seen.message}")
            LOG.info("the engine is ready", url=plan.url, pid=server.pid, seconds=round(time.monotonic() - began, 1))
            await _first(stop.wait(), server.wait(), self._watch(server, client))
            if stop.is_set() or server.exit_code is not None:
                return True, diagnose(server.exit_code, server.lines, engine, plan.port)
            return True, Diagnosis(f"the engine has not answered for {HUNG_S:g} s and is started again")
        finally:
            if stop.is_set() and server.exit_code is None:
                await self._drain(client)
            await server.stop()
            await client.close()

    async def _drain(self, client: EngineClient) -> None:
        """Leave the registry, so that no worker chooses this engine any more, and let running requests end."""
        end = time.monotonic() + self._plan.drain_s
        if self._plan.drain_s <= 0:
            return
        with contextlib.suppress(BrokerError, TimeoutError):
            await self._ask(partial(self._registry.remove_engine, self._plan.engine_id))
        with contextlib.suppress(EngineError, TimeoutError):
            while await client.running() and time.monotonic() < end:  # noqa: ASYNC110 - the engine is asked, not awaited
                await asyncio.sleep(0.2)
        LOG.info("drained", seconds=round(self._plan.drain_s - (end - time.monotonic()), 1))

    async def _until_ready(self, client: EngineClient) -> str:
        """Wait for the first answer, then probe; "" or what is wrong."""
        deadline = time.monotonic() + self._config.engine.start_timeout_s
        while time.monotonic() < deadline:
            try:
                await client.healthy()
                await probe(client)
                with contextlib.suppress(EngineError):  # it serves without, too
                    await client.freeze_garbage_collector()
                return ""
            except (EngineUnreachable, EngineBusy, EngineDropped, EngineTimeout):
                await asyncio.sleep(0.25)
            except EngineError as error:
                return f"the probe failed: {error}"
        return "no answer"

    async def _watch(self, server: ServerProcess, client: EngineClient) -> None:
        """Keep the registry informed; returns when the server has not answered for HUNG_S."""
        answered = time.monotonic()
        registered = False
        while time.monotonic() - answered < HUNG_S:
            try:
                registered = await self._beat(server.pid, registered)
            except (BrokerError, TimeoutError) as error:
                LOG.warning("the registry is away", detail=str(error))
            await asyncio.sleep(BEAT_S)
            try:
                async with asyncio.timeout(HUNG_S / 4):
                    await client.model_info()
                answered = time.monotonic()
            except (EngineUnreachable, EngineDropped, EngineTimeout, TimeoutError):
                continue
            except EngineError:  # any answer at all shows that it lives
                answered = time.monotonic()

    async def _beat(self, pid: int, registered: bool) -> bool:
        """Register once, and again if Redis lost the record; True when the record is there."""
        plan = self._plan
        records = await self._ask(self._registry.engines)
        known = next((r for r in records if r.engine_id == plan.engine_id), None)
        if known is not None and (registered or self._left):
            self._left = known.state is EngineState.GONE and known.detail == LEFT
        if (not registered and not self._left) or known is None:
            record = EngineRecord(plan.engine_id, plan.url, EngineState.JOINING, pid=pid)
            await self._ask(partial(self._registry.register_engine, record))
        else:
            await self._ask(partial(self._registry.heartbeat_engine, plan.engine_id, *self._local()))
        return True

    def _local(self) -> tuple[int, str]:
        copy = self._copies.latest if self._copies is not None else None
        return (-1, "") if copy is None else (copy.version, str(copy.folder))

    async def _tell_gone(self, detail: str, *, enter: bool = False) -> None:
        """Write into the registry, if Redis is there, that there is no server, and why.

        enter: also of an engine that the registry does not know, so that whoever looks at the run sees why none comes.
        """
        if self._left:
            return
        record = EngineRecord(
            self._plan.engine_id, self._plan.url, EngineState.GONE, detail=detail[:300], pid=NO_SERVER
        )
        try:
            known = await self._ask(partial(self._registry.update_engine, record, None))
            if enter and not known:
                await self._ask(partial(self._registry.register_engine, record))
        except (BrokerError, TimeoutError) as error:
            LOG.warning("the registry is away", detail=str(error))

    async def _ask(self, call: Callable[[], T]) -> T:
        return await in_thread(call, self._broker_s)


def main(config: RunConfig, index: int) -> int:
    """Entry point of `lagrange engine`; index: number of this engine, 0, 1, ...

    Returns the exit code: 0 after SIGTERM or SIGINT, 1 when the server cannot be kept alive, 2 for a configuration that
    cannot be used (no interpreter, no checkpoint, a port in use).
    """
    configure_logs(config.run.id, f"engine-{index}")
    try:
        if config.redis.url is None:
            raise ConfigError("redis.url is not set. Set it, or start the run with `lagrange up`.")
        plan, password = make_plan(config, index), read_secret(REDIS_PASSWORD)
    except ConfigError as error:
        LOG.error("cannot start", problem=str(error))
        return 2
    replan = None if config.engine.port else partial(make_plan, config, index)
    try:
        return asyncio.run(_serve(plan, config, password, replan))
    except ConfigError as error:  # what a plan needs went away
        LOG.error("cannot start again", problem=str(error))
        return 2
    finally:
        if plan.key_file is not None:
            plan.key_file.unlink(missing_ok=True)


async def _serve(plan: Plan, config: RunConfig, password: str | None, replan: Callable[[], Plan] | None) -> int:
    stop = stop_on_signal()
    broker = await connect_broker(config, password, stop)
    return 0 if broker is None else await Supervisor(plan, config, broker, replan).run(stop)


async def _first(*waits: Coroutine[Any, Any, Any]) -> Any:
    """The result of what ends first; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return next(iter(done)).result()


def _port(config: RunConfig, index: int) -> int:
    """The port of engine `index`: the one that is asked for, or a free one that no other engine chooses, nor a service
    of the run that has yet to listen. Raises ConfigError if there is none or something listens there."""
    engine = config.engine
    if engine.port and port_is_free(engine.host, engine.port + index):
        return engine.port + index
    others = (config.redis.port, config.weight_sync.port, config.monitor.port, config.trainer.port)
    try:
        port = free_port(engine.host, others, (index, engine.replicas))
    except OSError as error:
        raise ConfigError(f"engine.host: cannot listen on {engine.host} ({error.strerror}). Choose another.") from error
    if engine.port:
        raise ConfigError(f"engine.port: port {engine.port + index} on {engine.host} is in use. Choose another, or 0.")
    return port


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"run.directory: {path} cannot be written ({error.strerror}).") from error
