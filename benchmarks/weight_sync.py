"""What an update costs on a real engine, by transport, beside the engine's own bare load in the same run.

    python -m benchmarks.weight_sync [updates] [hidden]

Starts one SGLang engine on this machine's CPU with a Qwen3-MoE of about `hidden` x `hidden` experts, and brings
`updates` versions into it by each transport, with a bare load of the idle, paused engine before each update. Prints one
JSON object, medians in milliseconds: bare; for each transport transfer (before the pause), pause (pause sent until
continue is confirmed), load, out (not routable), and whole (published until confirmed). Needs .venv-sglang.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from broker import delta
from broker.server import EmbeddedServer
from broker.types import VersionRecord
from configs.schema import TinyModel
from rollout.command import engine_environment
from rollout.local_copy import Keeper
from services.weight_sync.distributed import Distributed, Reach
from services.weight_sync.engine_client import Timeouts
from services.weight_sync.lifecycle import Policy
from services.weight_sync.reconciler import Reconciler, Settings
from services.weight_sync.transports import Delta, Disk, Transport
from tests.engine_fixture import RealEngine, start_engine, stop_engine

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

    def bare_load(self) -> float:
        """Seconds of SGLang's own load of the newest files, the engine idle and paused."""
        body = {"model_path": str(self.folder), "flush_cache": True, "weight_version": self._name()}
        url, headers = self.engine.url, self.engine.headers
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            http.post("/pause_generation", json={"mode": "abort"})
            began = time.perf_counter()
            answer = http.post("/update_weights_from_disk", json=body)
            took = time.perf_counter() - began
            http.post("/continue_generation", json={})
        assert answer.json()["success"], answer.text
        return took

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

    def distributed(self, wake: Callable[[], None]) -> Transport:
        """By broadcast over gloo."""
        engine = self.engine.config.engine
        environment = engine_environment(engine, os.environ)
        return Distributed(Reach(engine.python, "127.0.0.1", 1, "gloo", 64 << 20, 60.0, environment), wake)

    async def run(self, transport: Callable[[Callable[[], None]], Transport], updates: int) -> dict[str, float]:
        """Medians of one transport."""
        settings = Settings(
            policy=Policy(drain=False),
            timeouts=Timeouts(probe=20, load=60, pause=30, drain=30),
            exact_dtype=self.engine.config.engine.dtype,
            api_key=self.engine.key,
        )
        rows: list[dict[str, float]] = []
        async with httpx.AsyncClient(trust_env=False) as http:
            reconciler = Reconciler(self.engine.broker, http, settings, transport)
            keeper = Keeper("engine-0", self.root / "local", self.engine.broker)
            tasks = [asyncio.create_task(reconciler.run()), asyncio.create_task(keeper.run())]
            for _ in range(updates + 2):
                record = await asyncio.to_thread(self.next_version)
                if rows:
                    rows[-1]["bare"] = await asyncio.to_thread(self.bare_load)
                began = time.perf_counter()
                await asyncio.to_thread(self.engine.broker.publish, self.epoch, record)
                while not ((r := self.engine.record()).routable and r.version == record.version):  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                whole, figures = time.perf_counter() - began, reconciler.members["engine-0"].figures
                rows.append(
                    {
                        "transfer": reconciler.totals.last_staging_seconds,
                        "pause": figures.last_pause_seconds,
                        "load": figures.last_load_seconds,
                        "out": figures.last_unroutable_seconds,
                        "whole": whole,
                    }
                )
            assert figures.verified_exactly >= updates
            assert reconciler.transport.fallbacks == 0
            reconciler.stop()
            await tasks[0]
            tasks[1].cancel()
            await asyncio.gather(tasks[1], return_exceptions=True)
        kept = rows[1:-1]  # the first makes groups and copies
        medians = {name: round(1000 * statistics.median(r[name] for r in kept), 1) for name in kept[0]}
        medians["pause / bare"] = round(statistics.median(r["pause"] / r["bare"] for r in kept), 2)
        return medians


def main(updates: int, hidden: int) -> None:
    """Run and print."""
    tiny = TinyModel(hidden=hidden, expert_hidden=hidden, layers=4, experts=8)
    with (
        tempfile.TemporaryDirectory() as scratch,
        EmbeddedServer(Path(scratch), append_only=False, password="") as redis,
    ):
        engine = start_engine(Path(scratch) / "engine", redis.url, tiny)
        try:
            bench = Bench(engine, Path(scratch) / "weights")
            size = sum(f.stat().st_size for f in engine.folder.glob("*.safetensors"))
            found: dict[str, object] = {"bytes": size}
            ways: dict[str, Callable[[Callable[[], None]], Transport]] = {
                "disk": lambda _wake: Disk(),
                "delta": lambda _wake: Delta(60.0),
                "distributed": bench.distributed,
            }
            for name, way in ways.items():
                found[name] = asyncio.run(bench.run(way, updates))
            sys.stdout.write(json.dumps(found, indent=1) + "\n")
        finally:
            stop_engine(engine)


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    main(*given, *(8, 512)[len(given) :])
