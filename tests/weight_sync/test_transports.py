"""How weights travel, against a real Redis and fake engines: what each way does, and what it falls back to."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.types import EngineRecord, EngineState, VersionRecord
from rollout.local_copy import Keeper
from services.weight_sync.distributed import Distributed, buckets, within
from services.weight_sync.main import transport_of
from services.weight_sync.transports import Delta, Disk, Transport
from tests.weight_sync.live import (
    FAST,
    FAULTS,
    World,
    broadcasting,
    config,
    reach,
    syncing,
    until,
    wait_for,
    write_version,
)


@pytest.mark.parametrize(("name", "kind"), [("disk", Disk), ("delta", Delta), ("distributed", Distributed)])
def test_the_configuration_chooses_the_way(tmp_path: Path, name: str, kind: type[Transport]) -> None:
    chosen = transport_of(config("redis://127.0.0.1:1/0", tmp_path, transport=name), os.environ, lambda: None)
    assert isinstance(chosen, kind)


def test_a_sender_has_the_gpus_that_are_named_and_shares_memory_as_sglang_does(tmp_path: Path) -> None:
    def environment(**ours: str) -> dict[str, str]:
        asked = config("redis://127.0.0.1:1/0", tmp_path, transport="distributed")
        made = transport_of(asked, ours, lambda: None)
        assert isinstance(made, Distributed)
        return made.reach.environment

    found = environment(CUDA_VISIBLE_DEVICES="6,7", LAGRANGE_REDIS_PASSWORD="p")
    assert found["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert (found["NCCL_CUMEM_ENABLE"], found["NCCL_NVLS_ENABLE"]) == ("0", "0")
    assert not any(name.startswith("LAGRANGE_") for name in found)
    assert environment(NCCL_CUMEM_ENABLE="1")["NCCL_CUMEM_ENABLE"] == "1"  # an engine keeps what is set, too


def test_buckets_hold_every_tensor_once_within_the_limit_and_aligned(tmp_path: Path) -> None:
    folder = Path(write_version(tmp_path, 1).path)
    parts = buckets(folder, 600)
    names = [tensor.name for part in parts for tensor in part]
    assert len(names) == len(set(names)) == 8 + 3 * 4
    assert all(len(part) == 1 or sum(t.bytes for t in part) <= 600 for part in parts)
    assert len(parts) > 1


async def test_a_broadcast_is_paused_for_verified_and_flushed_once(w: World) -> None:
    engine = w.add_engine("e0")
    async with broadcasting(w) as reconciler:
        for _ in range(2):
            record = w.publish()
            await until(partial(w.serves, "e0", record.version))
        assert reconciler.transport.fallbacks == 0
        assert reconciler.members["e0"].figures.verified_exactly == 2
    received = engine.calls("/update_weights_from_distributed")
    assert [call["flush_cache"] for call in received[-2:]] == [False, True]
    assert {call["weight_version"] for call in received} == {"unverified-0", "unverified-1"}
    assert not engine.calls("/update_weights_from_disk")
    assert len(engine.calls("/init_weights_update_group")) == 1
    assert (engine.paused, engine.session) == (None, False)
    assert engine.received_while_unpaused == 0


async def test_buffers_are_made_before_the_engine_is_paused_once_for_each_version(w: World, tmp_path: Path) -> None:
    engine, orders = w.add_engine("e0"), tmp_path / "orders"
    made = reach(FAKE_SENDER_LOG=str(orders))
    paused_at_prepare: list[int] = []

    class Watched(Distributed):
        async def _prepare(self, *arguments: Any) -> None:
            paused_at_prepare.append(engine.pauses)
            await super()._prepare(*arguments)

    async with syncing(w, transport=lambda wake: Watched(made, wake)):
        for _ in range(3):
            record = w.publish()
            await until(partial(w.serves, "e0", record.version))
    words = orders.read_text().split()
    assert words[:2] == ["listen", "join"]
    per_version = ["prepare"] + ["send"] * (words.count("send") // 3)
    assert words[2:] == per_version * 3
    assert paused_at_prepare == [0, 1, 2]


def test_as_many_buffers_wait_as_memory_allows(tmp_path: Path) -> None:
    parts = buckets(Path(write_version(tmp_path, 1).path), 600)
    size = sum(t.bytes for part in parts for t in part)
    assert within(parts, size) == parts
    assert 0 < len(within(parts, size // 2)) < len(parts)
    assert within(parts, 0) == []


@pytest.mark.parametrize("how", ["broken", "deaf", "blind"])
async def test_without_a_sender_the_published_files_are_loaded(w: World, how: str) -> None:
    engine = w.add_engine("e0")
    async with broadcasting(w, how) as reconciler:
        record = w.publish()
        await until(lambda: w.serves("e0", record.version))
        assert reconciler.transport.fallbacks == 1
    assert engine.calls("/update_weights_from_disk")
    assert (engine.paused, engine.session) == (None, False)


STEPS = [
    "/init_weights_update_group",
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/continue_generation",
]


@pytest.mark.slow
@pytest.mark.parametrize("path", STEPS)
async def test_whatever_fails_in_a_broadcast_no_wrong_version_is_routable_and_everything_recovers(
    w: World, path: str
) -> None:
    engine = w.add_engine("e0")
    async with broadcasting(w, timeouts=FAST):
        for fault, options in [*FAULTS.items(), ("none", None)]:
            engine.faults.clear()
            if options:
                engine.fail(path, times=1, **options)
            record = w.publish()
            await until(partial(w.serves, "e0", record.version))
            assert engine.paused is None, fault
    w.check()
    assert not engine.session


async def test_a_process_that_takes_over_closes_the_session_that_another_left_open(w: World) -> None:
    engine = w.add_engine("e0")
    engine.session = True
    async with broadcasting(w) as reconciler:
        record = w.publish()
        await until(lambda: w.serves("e0", record.version))
        assert reconciler.transport.fallbacks == 0


async def test_an_engine_loads_the_copy_on_its_own_host(w: World, tmp_path: Path) -> None:
    engine = w.add_engine("e0")
    keeper = Keeper("e0", tmp_path / "local", w.broker)
    async with syncing(w, transport=lambda _wake: Delta(60.0)) as reconciler:
        copies = asyncio.create_task(keeper.run())
        for _ in range(2):
            record = w.publish()
            await until(partial(w.serves, "e0", record.version))
        assert reconciler.transport.fallbacks == 0
        assert reconciler.members["e0"].figures.verified_exactly == 2
        copies.cancel()
        await asyncio.gather(copies, return_exceptions=True)
    assert [Path(c["model_path"]).parent for c in engine.calls("/update_weights_from_disk")] == [tmp_path / "local"] * 2
    assert not (tmp_path / "local").exists()


async def test_a_version_that_is_staged_while_an_engine_is_taken_out_waits_for_its_own_copy(w: World) -> None:
    engine, update, made = w.add_engine("e0"), w.broker.update_engine, list[VersionRecord]()

    def publish_with_copy() -> None:
        made.append(w.publish())
        w.broker.heartbeat_engine("e0", made[-1].version, made[-1].path)

    async with syncing(w, transport=lambda _wake: Delta(60.0)) as reconciler:

        def slow(record: EngineRecord, expected: EngineState | None = None) -> bool:
            written = update(record, expected)
            if record.state is EngineState.UPDATING and len(made) == 2:
                publish_with_copy()
                wait_for(lambda: reconciler.staged and reconciler.staged.version == made[-1].version)
            return written

        object.__setattr__(w.broker, "update_engine", slow)
        for count in (1, 3):
            publish_with_copy()
            await until(lambda: len(made) == count and w.serves("e0", made[-1].version))  # noqa: B023
        assert reconciler.transport.fallbacks == 0
    assert [load["model_path"] for load in engine.calls("/update_weights_from_disk")] == [v.path for v in made]


async def test_an_engine_without_a_copy_loads_the_published_files_in_the_end(w: World) -> None:
    engine = w.add_engine("e0")
    async with syncing(w, transport=lambda _wake: Delta(0.2)) as reconciler:
        record = w.publish()
        await until(lambda: w.serves("e0", record.version))
        assert reconciler.transport.fallbacks == 1
    assert engine.calls("/update_weights_from_disk")[0]["model_path"] == record.path


async def test_copies_that_are_always_of_another_version_hold_an_engine_back_for_the_wait_alone(w: World) -> None:
    w.add_engine("e0")
    w.broker.heartbeat_engine("e0", 10**6, "/nowhere")
    async with syncing(w, transport=lambda _wake: Delta(2.0)):
        for _ in range(300):
            record = w.publish()
            if w.record("e0").routable:
                break
            await asyncio.sleep(0.1)
    assert record.version < 299


async def test_a_copy_that_is_not_what_it_says_is_quarantined_like_any_other_weights(w: World, tmp_path: Path) -> None:
    w.add_engine("e0")
    first, other = w.publish(), write_version(tmp_path / "other", 77)
    w.broker.heartbeat_engine("e0", first.version, other.path)
    w.violations.clear()
    async with syncing(w, transport=lambda _wake: Delta(60.0)) as reconciler:
        await until(lambda: reconciler.members.get("e0") and reconciler.members["e0"].figures.failures >= 2)
        assert w.record("e0").state is not EngineState.SERVING
        w.broker.heartbeat_engine("e0", first.version + 1, "")
        second = replace(w.publish())
        w.broker.heartbeat_engine("e0", second.version, second.path)
        await until(lambda: w.serves("e0", second.version))
