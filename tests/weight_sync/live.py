"""A real Redis, real ports and fake engines whose parameter checksums are derived from the loaded files by numpy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from broker.queue import Broker
from broker.types import EngineRecord, EngineState, VersionRecord
from configs.schema import RunConfig
from services.weight_sync.distributed import Distributed, Reach
from services.weight_sync.engine_client import Timeouts
from services.weight_sync.lifecycle import Policy
from services.weight_sync.reconciler import Reconciler, Settings
from services.weight_sync.strategy import Strategy
from services.weight_sync.transports import Disk, Transport
from tests.fakes.engine import FakeEngine

EXPERTS, HIDDEN, INNER, VOCABULARY = 4, 8, 6, 10
PATIENT = Timeouts(probe=10, load=10, pause=10, drain=0.5, poll=0.005)  # for what answers: never too short
FAST = Timeouts(probe=0.4, load=0.4, pause=0.4, drain=0.3, poll=0.005)  # for what does not answer
FAKE_SENDER = Path(__file__).parents[1] / "fakes" / "sender.py"
FAULTS: dict[str, dict[str, Any]] = {
    "refused": {"kind": "drop"},
    "black-hole": {"kind": "hang", "seconds": 3600.0},
    "error": {"kind": "status", "code": 500},
    "unreadable": {"kind": "garbage"},
    "refused-after-applying": {"kind": "after", "code": 400, "body": {"success": False, "message": "x"}},
    "says-so-without-doing": {"kind": "lie"},
}


@contextlib.contextmanager
def redis_server(folder: Path, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A redis-server of its own; gives its URL."""
    port = port or free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen([*command, "--loglevel", "warning"], stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: accepts(port))
            yield f"redis://127.0.0.1:{port}/0", server
        finally:
            server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError("not within the deadline")


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = await asyncio.to_thread(condition)
        if value:
            return value
        await asyncio.sleep(0.005)
    raise AssertionError("not within the deadline")


def config(url: str, folder: Path, **weights: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"id": "test", "steps": 100, "directory": str(folder)},
            "redis": {"url": url, "timeout_s": 10.0},
            "lag": {"max": 4},
            "model": {"tiny": {}},
            "task": {"name": "max-digit"},
            "rollout": {"max_new_tokens": 4},
            "trainer": {"optimizer": {"learning_rate": 1e-3}},
            "weights": {"update_timeout_s": 1.0, "probe_interval_s": 0.05, **weights},
        }
    )


def write_version(folder: Path, version: int) -> VersionRecord:
    """A version's folder as the trainer exports it: one layer of a Qwen3-MoE, its manifest."""
    path = folder / f"v{version:06d}"
    path.mkdir(parents=True)
    rng = np.random.default_rng(version)

    def weights(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    layer = "model.layers.0"
    tensors = {
        "model.embed_tokens.weight": weights(VOCABULARY, HIDDEN),
        "lm_head.weight": weights(VOCABULARY, HIDDEN),
        "model.norm.weight": weights(HIDDEN),
        f"{layer}.self_attn.q_proj.weight": weights(8, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": weights(4, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": weights(4, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": weights(HIDDEN, 8),
        f"{layer}.mlp.gate.weight": weights(EXPERTS, HIDDEN),
    }
    for e in range(EXPERTS):
        tensors[f"{layer}.mlp.experts.{e}.gate_proj.weight"] = weights(INNER, HIDDEN)
        tensors[f"{layer}.mlp.experts.{e}.up_proj.weight"] = weights(INNER, HIDDEN)
        tensors[f"{layer}.mlp.experts.{e}.down_proj.weight"] = weights(HIDDEN, INNER)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in path.iterdir()
    }
    manifest = json.dumps({"format": 1, "algorithm": "sha256", "files": files}).encode()
    (path / "manifest.json").write_bytes(manifest)
    return VersionRecord(version, version, str(path), hashlib.sha256(manifest).hexdigest())


def parameters(folder: Path) -> dict[str, np.ndarray]:
    """What an engine holds after loading `folder`, fused by numpy: an implementation other than the service's."""
    files = load_file(folder / "model.safetensors")
    layer = "model.layers.0"
    experts = f"{layer}.mlp.experts"
    attention = [files[f"{layer}.self_attn.{p}_proj.weight"] for p in "qkv"]
    padding = np.zeros((64 - VOCABULARY, HIDDEN), np.float32)
    fused = (".experts.", ".q_proj.", ".k_proj.", ".v_proj.")
    out = {name: array for name, array in files.items() if not any(part in name for part in fused)}
    out["model.embed_tokens.weight"] = np.concatenate([files["model.embed_tokens.weight"], padding])
    out["lm_head.weight"] = np.concatenate([files["lm_head.weight"], padding])
    out[f"{layer}.self_attn.qkv_proj.weight"] = np.concatenate(attention)
    out[f"{experts}.w13_weight"] = np.stack(
        [
            np.concatenate([files[f"{experts}.{e}.gate_proj.weight"], files[f"{experts}.{e}.up_proj.weight"]])
            for e in range(EXPERTS)
        ]
    )
    out[f"{experts}.w2_weight"] = np.stack([files[f"{experts}.{e}.down_proj.weight"] for e in range(EXPERTS)])
    return out


class Engine(FakeEngine):
    """The fake with a real engine's parameter names. A broadcast brings what is published under its name."""

    published: Callable[[], Iterable[VersionRecord]] = tuple  # nothing, until it is somebody's engine

    def broadcast_folder(self, name: str) -> str:
        version = int(name.removeprefix("unverified-"))
        return next(v.path for v in self.published() if v.version == version)

    def checksum(self) -> dict[str, Any]:
        if not (Path(self.model_path) / "model.safetensors").exists():
            sums = {"model.norm.weight": "0" * 16}
        else:
            sums = {
                name: hashlib.sha256(array.tobytes()).hexdigest()[:16]
                for name, array in parameters(Path(self.model_path)).items()
            }
        ranks = [{"checksums": sums, "per_gpu_checksum": "", "parallelism_info": []}]
        return {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": ""}


def hold_loads(*engines: Engine) -> threading.Event:
    """Their loads from disk wait until the event is set."""
    go = threading.Event()

    def holding(load: Callable[[dict[str, Any]], Awaitable[tuple[bool, str]]]) -> Any:
        async def held(body: dict[str, Any]) -> tuple[bool, str]:
            while not go.is_set():  # noqa: ASYNC110 (set by another thread)
                await asyncio.sleep(0.005)
            return await load(body)

        return held

    for engine in engines:
        object.__setattr__(engine, "load", holding(engine.load))
    return go


def watch_writes(w: World, watch: Callable[[EngineRecord], object]) -> None:
    """Call `watch` with every record of an engine that weight-sync is about to write."""
    update = w.broker.update_engine

    def watched(record: EngineRecord, expected: EngineState | None = None) -> bool:
        watch(record)
        return update(record, expected)

    object.__setattr__(w.broker, "update_engine", watched)


@dataclass
class World:
    """Redis, a run whose trainer attached, and engines. violations: moments at which something routable was wrong."""

    folder: Path
    url: str
    broker: Broker
    epoch: int
    engines: dict[str, Engine] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def add_engine(self, name: str, *, port: int = 0, **options: Any) -> Engine:
        """A fake engine that listens, registered as its supervisor does."""
        engine = Engine(version="unconfirmed", **options)
        engine.published = self.broker.versions
        url = self.stack.enter_context(engine.serve(port))
        self.engines[name] = engine
        self.broker.register_engine(EngineRecord(name, url, EngineState.JOINING, pid=os.getpid()))
        return engine

    def publish(self) -> VersionRecord:
        """Name, write and publish the next version."""
        version = self.broker.name_version(self.epoch)
        record = write_version(self.folder / "weights", version)
        self.broker.publish(self.epoch, record)
        return record

    def record(self, name: str) -> EngineRecord:
        return next(r for r in self.broker.engines() if r.engine_id == name)

    def check(self) -> None:
        """Every routable engine has the weights that it was confirmed with, and lets requests through."""
        for record in self.broker.engines():
            engine = self.engines[record.engine_id]
            has, name, paused = Path(engine.model_path).name, engine.version, engine.paused
            if not record.routable or self.record(record.engine_id) != record:
                continue
            if name != str(record.version) or has != f"v{record.version:06d}" or paused:
                self.violations.append(f"{record.engine_id}: {record.version} but {name} from {has}, paused {paused}")

    def serves(self, name: str, version: int) -> bool:
        """Whether it is confirmed with `version`; looks for violations on the way."""
        self.check()
        record = self.record(name)
        return record.routable and record.version == version


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    with redis_server(folder) as (url, _server):
        broker = Broker.connect(url, "test", timeout_s=10.0)
        try:
            broker.initialise(config(url, folder))
            epoch = broker.attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch
            made = World(folder, url, broker, epoch)
            with made.stack:
                yield made
        finally:
            broker.close()
    assert made.violations == []


@contextlib.asynccontextmanager
async def syncing(
    w: World,
    strategy: Strategy | None = None,
    timeouts: Timeouts = PATIENT,
    transport: Callable[[Callable[[], None]], Transport] = lambda _wake: Disk(),
    **options: Any,
) -> AsyncIterator[Reconciler]:
    """The reconciler at work; it is stopped, and its errors shown, at the end."""
    policy = Policy(**{"tries": 2, "back_off_s": 0.05, "back_off_max_s": 0.2, "gone_after_s": 1.0, **options})
    settings = Settings(policy, strategy or Strategy(), timeouts, interval_s=0.03, exact_dtype="float32")
    async with httpx.AsyncClient(trust_env=False) as http:
        reconciler = Reconciler(w.broker, http, settings, transport)
        task = asyncio.create_task(reconciler.run())
        try:
            yield reconciler
        finally:
            reconciler.stop()
            await task
    assert reconciler.totals.unexpected_errors == 0


def reach(how: str = "", bucket_bytes: int = 1024, **environment: str) -> Reach:
    """Engines are reached by the fake sender. how: what is wrong with it."""
    environment |= {"PATH": os.environ["PATH"], "FAKE_SENDER": how}
    return Reach(Path(sys.executable), "127.0.0.1", 1, "gloo", bucket_bytes, 5.0, environment, FAKE_SENDER)


@contextlib.asynccontextmanager
async def broadcasting(
    w: World, how: str = "", *, timeouts: Timeouts = PATIENT, drain: bool = True
) -> AsyncIterator[Reconciler]:
    """The reconciler at work with the one transport for which an engine is paused."""
    transport = lambda wake: Distributed(reach(how), wake)  # noqa: E731
    async with syncing(w, timeouts=timeouts, transport=transport, drain=drain) as reconciler:
        yield reconciler
