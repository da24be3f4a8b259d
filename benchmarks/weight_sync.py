"""What an update costs on a real engine, by transport, beside the engine's own bare load in the same run.

    python -m benchmarks.weight_sync [updates] [hidden] [transport ...]

Starts one SGLang engine on this machine's CPU with a Qwen3-MoE of about `hidden` x `hidden` experts, and brings
`updates` versions into it by each transport, in abort mode. Before each update it measures bare loads of the idle,
paused engine: SGLang's own load from disk, and for `distributed` also its own load by the plainest broadcast of the
same bytes in buckets of the same size (plain_broadcast.py). Prints one JSON object, medians in milliseconds: transfer
(before anything is held back), pause (requests are held back), load (of the pause), out (not routable), whole
(published until confirmed), bare loads, and the pause over each bare load. Needs .venv-sglang.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from broker import delta
from broker.server import EmbeddedServer
from broker.types import EngineRecord, VersionRecord
from configs.schema import TinyModel
from rollout.command import engine_environment
from rollout.local_copy import Keeper
from services.weight_sync.distributed import Distributed, Reach
from services.weight_sync.engine_client import Timeouts
from services.weight_sync.lifecycle import Policy
from services.weight_sync.reconciler import Reconciler, Settings
from services.weight_sync.transports import Delta, Disk, Transport
from tests.engine_fixture import RealEngine, start_engine, stop_engine
from tests.weight_sync.live import until

BUCKET_BYTES = 64 << 20
PLAIN_BROADCAST = Path(__file__).with_name("plain_broadcast.py")
WAYS = ("disk", "delta", "distributed")
CHANGED = 0.02  # share of the elements that move by one bit in each version


def write_version(before: Path, folder: Path, version: int) -> VersionRecord:
    """The folder of a version: the one before it with a few elements moved."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(version)
    for file in before.iterdir():
        if file.suffix != ".safetensors":
            if file.name not in (delta.DELTA, delta.MANIFEST):
                (folder / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for array in tensors.values():
            bits = array.reshape(-1).view(np.uint32)
            bits ^= (rng.random(bits.size) < CHANGED).astype(np.uint32) << 16
        save_file(tensors, folder / file.name)
    files = {
        f.name: {"bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in folder.iterdir()
    }
    (folder / delta.MANIFEST).write_text(json.dumps({"format": 1, "files": files}))
    return VersionRecord(version, version, str(folder), delta.checksum_of(folder))


class Bench:
    """One engine, a trainer that only publishes, and the versions so far."""

    def __init__(self, engine: RealEngine, root: Path) -> None:
        self.engine, self.root, self.folder = engine, root, engine.folder
        self.epoch = engine.broker.attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch
        self.environment = engine_environment(engine.config.engine, os.environ)
        self.http = httpx.Client(base_url=engine.url, headers=engine.headers, timeout=60, trust_env=False)

    def load_from_disk(self) -> float:
        """Seconds of SGLang's own load of the newest files."""
        body = {"model_path": str(self.folder), "flush_cache": True, "weight_version": self._name()}
        began = time.perf_counter()
        answer = self.http.post("/update_weights_from_disk", json=body)
        took = time.perf_counter() - began
        assert answer.json()["success"], answer.text
        return took

    @contextlib.contextmanager
    def broadcaster(self) -> Iterator[Callable[[], float]]:
        """What gives the seconds of SGLang's own load of the newest files by the plainest broadcast."""
        command = [str(self.engine.config.engine.python), str(PLAIN_BROADCAST)]
        command += [self.engine.url, self.engine.key, str(BUCKET_BYTES)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": self.environment, "text": True}
        with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]

            def push() -> float:
                process.stdin.write(f"{self.folder} {self._name()}\n")
                process.stdin.flush()
                return float(process.stdout.readline())

            yield push
            process.stdin.close()

    def bare(self, load: Callable[[], float]) -> float:
        """Seconds of a load of the paused engine, on which nothing runs."""
        self.http.post("/pause_generation", json={"mode": "abort"})
        try:
            return load()
        finally:
            self.http.post("/continue_generation", json={})

    def _name(self) -> str:
        return str(self.engine.record().version)

    def next_version(self) -> VersionRecord:
        """Written, with its delta, and not yet published."""
        version = self.engine.broker.name_version(self.epoch)
        record = write_version(self.folder, self.root / f"v{version:06d}", version)
        if (self.folder / delta.MANIFEST).exists():
            delta.write(self.folder, Path(record.path))
        self.folder = Path(record.path)
        return record

    def transport(self, way: str, wake: Callable[[], None]) -> Transport:
        """By its name."""
        if way == "distributed":
            python = self.engine.config.engine.python
            return Distributed(Reach(python, "127.0.0.1", 1, "gloo", BUCKET_BYTES, 60.0, self.environment), wake)
        return Delta(60.0) if way == "delta" else Disk()

    async def run(self, way: str, updates: int) -> dict[str, float]:
        """Medians of one transport."""
        settings = Settings(
            policy=Policy(drain=False),
            timeouts=Timeouts(probe=20, load=60, pause=30, drain=30),
            exact_dtype=self.engine.config.engine.dtype,
            api_key=self.engine.key,
        )
        rows: list[dict[str, float]] = []
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
            reconciler = Reconciler(self.engine.broker, http, settings, lambda wake: self.transport(way, wake))
            bare = {"bare load from disk": self.load_from_disk}
            if way == "distributed":
                bare["bare broadcast"] = await asyncio.to_thread(stack.enter_context, self.broadcaster())
            syncing = asyncio.create_task(reconciler.run())
            if way == "delta":
                keeper = asyncio.create_task(Keeper("engine-0", self.root / "local", self.engine.broker).run())
                stack.callback(keeper.cancel)
            for _ in range(updates + 1):
                record = await asyncio.to_thread(self.next_version)
                if rows:  # the first version makes groups and copies
                    found = {name: await asyncio.to_thread(self.bare, load) for name, load in bare.items()}
                rows.append(await self.update(reconciler, record))
                if len(rows) > 1:
                    rows[-1] |= found | {f"pause / {name}": rows[-1]["pause"] / s for name, s in found.items()}
            assert reconciler.members["engine-0"].figures.verified_exactly == updates + 1
            assert reconciler.transport.fallbacks == 0
            reconciler.stop()
            await syncing
        median = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[1]}
        return {name: round(m, 2) if "/" in name else round(1000 * m, 1) for name, m in median.items()}

    async def update(self, reconciler: Reconciler, record: VersionRecord) -> dict[str, float]:
        """Publish a version; seconds of what it took."""
        began, members = time.perf_counter(), reconciler.members
        await asyncio.to_thread(self.engine.broker.publish, self.epoch, record)
        await until(lambda: "engine-0" in members and is_confirmed(members["engine-0"].shown, record), 120)
        figures = members["engine-0"].figures
        return {
            "transfer": reconciler.totals.last_staging_seconds,
            "pause": figures.last_pause_seconds,
            "load": figures.last_load_seconds,
            "out": figures.last_unroutable_seconds,
            "whole": time.perf_counter() - began,
        }


def is_confirmed(shown: EngineRecord, record: VersionRecord) -> bool:
    """Whether the registry shows that an engine serves a version."""
    return shown.routable and shown.version == record.version


def main(updates: str = "8", hidden: str = "512", *ways: str) -> None:
    """Run and print."""
    tiny = TinyModel(hidden=int(hidden), expert_hidden=int(hidden), layers=4, experts=8)
    with (
        tempfile.TemporaryDirectory() as scratch,
        EmbeddedServer(Path(scratch), append_only=False, password="") as redis,
    ):
        engine = start_engine(Path(scratch) / "engine", redis.url, tiny)
        try:
            bench = Bench(engine, Path(scratch) / "weights")
            size = sum(f.stat().st_size for f in engine.folder.glob("*.safetensors"))
            found: dict[str, object] = {"bytes": size}
            for way in ways or WAYS:
                found[way] = asyncio.run(bench.run(way, int(updates)))
            bench.http.close()
            sys.stdout.write(json.dumps(found, indent=1) + "\n")
        finally:
            stop_engine(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
