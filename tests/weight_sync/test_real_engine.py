"""Weight-sync against a real SGLang engine: what it reports after a load is what the files say, bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from broker import delta
from broker.types import EngineState, VersionRecord
from rollout.local_copy import Keeper
from services.weight_sync.checksums import Verdict, compare, expected_checksums
from services.weight_sync.distributed import Distributed, Reach
from services.weight_sync.engine_client import Done, EngineClient, Timeouts
from services.weight_sync.lifecycle import Policy
from services.weight_sync.reconciler import Reconciler, Settings
from services.weight_sync.transports import Delta, Disk, Transport
from tests.engine_fixture import RealEngine, engine_python, start_engine, stop_engine
from tests.weight_sync.live import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


def export(engine: RealEngine, folder: Path, version: int) -> VersionRecord:
    """The engine's checkpoint with every weight moved a little, as a version's folder."""
    shutil.copytree(engine.folder, folder)
    rng = np.random.default_rng(version)
    for file in folder.glob("*.safetensors"):
        moved = {
            name: (array * (1 + 0.1 * rng.normal(size=array.shape))).astype(array.dtype)
            for name, array in load_file(file).items()
        }
        save_file(moved, file)
    files = {
        f.name: {"bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in folder.iterdir()
    }
    manifest = json.dumps({"format": 1, "algorithm": "sha256", "files": files}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    return VersionRecord(version, version, str(folder), hashlib.sha256(manifest).hexdigest())


@pytest.fixture
def engine(real_engine: RealEngine) -> Iterator[RealEngine]:
    """The session's engine; its first weights and its record are put back afterwards."""
    record = real_engine.record()
    yield real_engine
    real_engine.load(real_engine.folder, 0)
    real_engine.post("/update_weight_version", {"new_version": "unconfirmed", "abort_all_requests": False})
    real_engine.broker.register_engine(replace(record, state=EngineState.JOINING, version=-1, checksum=""))


def broadcast(wake: Callable[[], None], ranks: int = 1) -> Transport:
    """From a real sender, over gloo, in buckets of 64 KiB."""
    python = engine_python()
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    return Distributed(Reach(python, "127.0.0.1", ranks, "gloo", 64 << 10, 60.0, environment), wake)


@contextlib.asynccontextmanager
async def syncing(
    engine: RealEngine,
    *,
    drain: bool,
    transport: Callable[[Callable[[], None]], Transport] = lambda _wake: Disk(),
) -> AsyncIterator[Reconciler]:
    settings = Settings(
        policy=Policy(drain=drain),
        timeouts=Timeouts(probe=20, load=60, pause=30, drain=30),
        interval_s=0.1,
        exact_dtype=engine.config.engine.dtype if engine.config.engine.tensor_parallel == 1 else None,
        api_key=engine.key,
    )
    async with httpx.AsyncClient(trust_env=False) as http:
        reconciler = Reconciler(engine.broker, http, settings, transport)
        task = asyncio.create_task(reconciler.run())
        try:
            yield reconciler
        finally:
            reconciler.stop()
            await task
    assert reconciler.totals.unexpected_errors == 0


async def checksums(engine: RealEngine) -> dict[str, str]:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await EngineClient(http, engine.url, Timeouts(probe=20), engine.key).checksums()
    assert isinstance(answer, Done), answer
    return answer.value


async def test_updates_reach_a_real_engine_verified_exactly_with_and_without_running_requests(
    engine: RealEngine, tmp_path: Path
) -> None:
    broker = engine.broker
    epoch = broker.attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch

    def publish() -> VersionRecord:
        version = broker.name_version(epoch)
        record = export(engine, tmp_path / f"v{version:06d}", version)
        broker.publish(epoch, record)
        return record

    def confirmed(version: int) -> bool:
        shown = engine.record()
        return shown.routable and shown.version == version

    first = publish()
    async with syncing(engine, drain=True) as reconciler:
        await until(lambda: confirmed(first.version), 120)
        assert reconciler.members["engine-0"].figures.verified_exactly == 1
    expected = expected_checksums(Path(first.path), "float32")
    assert compare(await checksums(engine), expected) == (Verdict.EXACT, "")
    other = expected_checksums(engine.folder, "float32")
    assert compare(await checksums(engine), other)[0] is Verdict.DIFFERENT

    async with syncing(engine, drain=False) as reconciler:
        over = asyncio.Event()
        asking = [asyncio.create_task(ask_until(over, engine)) for _ in range(8)]
        for _ in range(3):
            second = publish()
            await until(lambda: confirmed(second.version), 120)  # noqa: B023 (awaited in the same turn)
        figures = reconciler.members["engine-0"].figures
        assert (figures.verified_exactly, figures.failures) == (3, 0)
        assert not reconciler.members["engine-0"].life.maybe_paused
        over.set()
        assert sum(await asyncio.gather(*asking)) > 0
    answer = await asyncio.to_thread(
        engine.post, "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
    )
    assert answer.json()["meta_info"]["weight_version"] == str(second.version)

    # Other weights under the confirmed name: only the checksum can tell.
    await asyncio.to_thread(engine.load, Path(first.path), second.version)
    async with syncing(engine, drain=True) as reconciler:
        await until(lambda: reconciler.members and reconciler.members["engine-0"].figures.failures == 1, 60)
        await until(lambda: confirmed(second.version), 60)
    assert compare(await checksums(engine), expected_checksums(Path(second.path), "float32"))[0] is Verdict.EXACT


async def ask_until(over: asyncio.Event, engine: RealEngine) -> int:
    """Ask for long answers, one after another, and check each; how many came back aborted with some tokens."""
    body: dict[str, object] = {"input_ids": [5, 6], "return_logprob": True, "return_routed_experts": True}
    body |= {"sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    aborted = 0
    async with httpx.AsyncClient(trust_env=False, headers=engine.headers, timeout=60) as http:
        while not over.is_set():
            response = await http.post(engine.url + "/generate", json=body)
            assert response.status_code == 200, response.text
            answer = response.json()
            meta, count = answer["meta_info"], len(answer["output_ids"])
            named = {span["version"].removeprefix("unverified-") for span in meta["weight_versions"]}
            assert len(named) <= 1, "no sample mixes the weights of versions"
            assert len(meta["output_token_logprobs"]) == count
            assert count == 0 or meta["routed_experts"]
            aborted += meta["finish_reason"]["type"] == "abort" and count > 0
    return aborted


class Publisher:
    """A trainer that only publishes: each version with its delta to the one before."""

    def __init__(self, engine: RealEngine, root: Path) -> None:
        self._engine, self._root = engine, root
        self._before: Path | None = None
        self._epoch = engine.broker.attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch

    async def publish(self) -> VersionRecord:
        """The next version, once the engine is confirmed with it."""
        version = self._engine.broker.name_version(self._epoch)
        record = export(self._engine, self._root / f"v{version:06d}", version)
        if self._before is not None:
            delta.write(self._before, Path(record.path))
        self._before = Path(record.path)
        self._engine.broker.publish(self._epoch, record)
        await until(lambda: self._engine.record().routable and self._engine.record().version == version, 120)
        return record


async def is_exactly(engine: RealEngine, record: VersionRecord) -> bool:
    """Whether the engine holds a version bit for bit, and samples under its name."""
    verdict = compare(await checksums(engine), expected_checksums(Path(record.path), "float32"))[0]
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
    answer = (await asyncio.to_thread(engine.post, "/generate", body)).json()["meta_info"]
    return verdict is Verdict.EXACT and answer["weight_version"] == str(record.version)


async def test_copies_made_from_deltas_reach_a_real_engine_exactly(engine: RealEngine, tmp_path: Path) -> None:
    publisher, keeper = Publisher(engine, tmp_path), Keeper("engine-0", tmp_path / "local", engine.broker)
    async with syncing(engine, drain=True, transport=lambda _wake: Delta(60.0)) as reconciler:
        copies = asyncio.create_task(keeper.run())
        for first in (True, False, False):
            record = await publisher.publish()
            assert await is_exactly(engine, record)
            assert keeper.latest is not None
            assert bool(keeper.latest.problem) is first
        assert reconciler.transport.fallbacks == 0
        copies.cancel()
        await asyncio.gather(copies, return_exceptions=True)


async def test_broadcasts_reach_a_real_engine_exactly_and_a_dead_sender_costs_one_load_from_disk(
    engine: RealEngine, tmp_path: Path
) -> None:
    publisher = Publisher(engine, tmp_path)
    async with syncing(engine, drain=True, transport=broadcast) as reconciler:
        transport = reconciler.transport
        assert isinstance(transport, Distributed)
        for fallbacks in (0, 0, 1, 1):
            if fallbacks > transport.fallbacks:
                sender = transport.links["engine-0"].sender
                assert sender is not None
                await sender.end()
            assert await is_exactly(engine, await publisher.publish())
            assert transport.fallbacks == fallbacks
        assert reconciler.members["engine-0"].figures.verified_exactly == 4


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_broadcast_brings_both_ranks_of_a_tensor_parallel_engine_what_the_files_would(
    engine_redis: str, tmp_path: Path
) -> None:
    engine = await asyncio.to_thread(start_engine, tmp_path / "tp2", engine_redis, tensor_parallel=2)
    try:
        publisher, before = Publisher(engine, tmp_path), await checksums(engine)
        transport = functools.partial(broadcast, ranks=2)
        async with syncing(engine, drain=True, transport=transport) as reconciler:
            for _ in range(2):
                record = await publisher.publish()
            assert reconciler.transport.fallbacks == 0
        received = await checksums(engine)
        assert received != before
        await asyncio.to_thread(engine.load, Path(record.path), record.version)
        assert await checksums(engine) == received
    finally:
        await asyncio.to_thread(stop_engine, engine)
