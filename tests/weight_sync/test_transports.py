"""How weights travel, against a real Redis and fake engines: what each way does, and what it falls back to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.types import EngineState
from rollout.local_copy import Keeper
from services.weight_sync.distributed import Distributed, Reach, buckets, within
from services.weight_sync.main import transport_of
from services.weight_sync.reconciler import Reconciler
from services.weight_sync.transports import Delta, Disk, Transport
from tests.weight_sync.live import FAST, PATIENT, World, config, syncing, until, write_version

FAKE_SENDER = Path(__file__).parents[1] / "fakes" / "sender.py"


def reach(how: str = "", bucket_bytes: int = 1024, **environment: str) -> Reach:
    environment |= {"PATH": os.environ["PATH"], "FAKE_SENDER": how}
    return Reach(Path(sys.executable), "127.0.0.1", 1, "gloo", bucket_bytes, 5.0, environment, FAKE_SENDER)


@contextlib.asynccontextmanager
async def broadcasting(w: World, how: str = "", *, fast: bool = False) -> AsyncIterator[Reconciler]:
    timeouts = FAST if fast else PATIENT
    async with syncing(w, timeouts=timeouts, transport=lambda wake: Distributed(reach(how), wake)) as reconciler:
        yield reconciler


@pytest.mark.parametrize(("name", "kind"), [("disk", Disk), ("delta", Delta), ("distributed", Distributed)])
def test_the_configuration_chooses_the_way(tmp_path: Path, name: str, kind: type[Transport]) -> None:
    chosen = transport_of(config("redis://127.0.0.1:1/0", tmp_path, transport=name), os.environ, lambda: None)
    assert isinstance(chosen, kind)


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


STEPS = ["/init_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"]
FAULTS: dict[str, dict[str, Any]] = {
    "refused": {"kind": "drop"},
    "black-hole": {"kind": "hang", "seconds": 3600.0},
    "error": {"kind": "status", "code": 500},
    "refused-after-applying": {"kind": "after", "code": 400, "body": {"success": False, "message": "x"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", STEPS)
async def test_whatever_fails_in_a_broadcast_no_wrong_version_is_routable_and_everything_recovers(
    w: World, path: str
) -> None:
    engine = w.add_engine("e0")
    async with broadcasting(w, fast=True):
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


async def test_an_engine_without_a_copy_loads_the_published_files_in_the_end(w: World) -> None:
    engine = w.add_engine("e0")
    async with syncing(w, transport=lambda _wake: Delta(0.2)) as reconciler:
        record = w.publish()
        await until(lambda: w.serves("e0", record.version))
        assert reconciler.transport.fallbacks == 1
    assert engine.calls("/update_weights_from_disk")[0]["model_path"] == record.path


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
