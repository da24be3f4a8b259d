"""Weight-sync against a real Redis and fake engines, with a fault at every step of an update."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from broker.queue import Broker
from broker.snapshot import engine_json
from broker.types import EngineRecord, EngineState
from services.weight_sync import engine_client
from services.weight_sync.reconciler import FORGOTTEN_MS
from tests.fakes.engine import FakeEngine
from tests.weight_sync.live import (
    FAST,
    FAULTS,
    PATIENT,
    World,
    broadcasting,
    config,
    hold_loads,
    syncing,
    until,
    watch_writes,
    write_version,
)

CONTROL = [
    "/model_info",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/weights_checker",
]


async def test_a_published_version_reaches_the_engine_verified_with_the_cache_flushed_and_nothing_aborted(
    w: World,
) -> None:
    engine = w.add_engine("e0")
    record = w.publish()
    async with syncing(w) as reconciler:
        await until(lambda: w.serves("e0", record.version))
        assert reconciler.members["e0"].figures.verified_exactly == 1
    (load,) = engine.calls("/update_weights_from_disk")
    assert load["model_path"] == record.path
    assert (load["weight_version"], load["flush_cache"], load["abort_all_requests"]) == (
        f"unverified-{record.version}",
        True,
        False,
    )
    assert engine.version == str(record.version)
    assert w.record("e0").checksum
    assert engine.pauses == 0


async def test_a_paused_engine_waits_for_its_load_alone_and_for_no_write_and_no_request_that_ran(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "ABORTED_S", 30.0)  # an aborted request leaves at once, or is waited for
    engine, written = w.add_engine("e0", token_seconds=0.002, context=50_000), list[tuple[EngineState, str | None]]()
    watch_writes(w, lambda record: written.append((record.state, engine.paused)))
    running_at_pause: list[int] = []
    pause = engine.pause

    async def paused(mode: str) -> None:
        running_at_pause.append(len(engine.running))
        await pause(mode)

    object.__setattr__(engine, "pause", paused)
    async with broadcasting(w, drain=False), httpx.AsyncClient(trust_env=False) as http:
        first = w.publish()
        await until(lambda: w.serves("e0", first.version))
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 40_000, "ignore_eos": True}}  # for 80 s
        engine.answer = lambda _prompt, _random: [7] * 40_000
        asked = asyncio.create_task(http.post(w.record("e0").url + "/generate", json=body, timeout=60))
        await until(lambda: engine.running)
        second = w.publish()
        await until(lambda: w.serves("e0", second.version))
        answer = (await asked).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert running_at_pause[-1] == 0
    assert engine.pauses >= 1
    assert all(mode is None for _state, mode in written), written
    assert EngineState.PAUSING in {state for state, _mode in written}


@pytest.mark.slow
@pytest.mark.parametrize("path", CONTROL)
async def test_whatever_fails_no_wrong_version_is_routable_and_everything_recovers(w: World, path: str) -> None:
    engine = w.add_engine("e0")
    async with syncing(w, drain=path == "/update_weight_version", timeouts=FAST):
        for fault, options in FAULTS.items():
            record = w.publish()
            await until(partial(w.serves, "e0", record.version))
            engine.faults.clear()
            engine.fail(path, times=2, **options)
            record = w.publish()
            await until(partial(w.serves, "e0", record.version))
            assert engine.paused is None, fault
    w.check()


async def test_weights_that_a_load_may_have_left_half_done_lose_the_name_of_the_version_before(w: World) -> None:
    engine = w.add_engine("e0")
    async with syncing(w):
        first = w.publish()
        await until(lambda: w.serves("e0", first.version))
        engine.fail("/update_weights_from_disk", "status", times=10**6)
        second = w.publish()
        await until(lambda: engine.version == f"unverified-{second.version}")
    assert engine.loads == 1  # no load but the first gave it a name


async def test_an_engine_with_other_weights_than_the_files_is_quarantined_until_a_full_load_is_verified(
    w: World,
) -> None:
    engine = w.add_engine("e0")

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        answer["ranks"][0]["checksums"]["model.norm.weight"] = "f" * 16
        return answer

    spoiled = engine.fail("/weights_checker", "mutate", times=10**6, change=spoil)
    record = w.publish()
    async with syncing(w) as reconciler:
        await until(lambda: reconciler.members.get("e0") and reconciler.members["e0"].figures.failures >= 3)
        shown = w.record("e0")
        assert shown.state is not EngineState.SERVING
        assert shown.version == -1
        spoiled.times = 0
        await until(lambda: w.serves("e0", record.version))


async def test_a_version_that_is_not_what_its_manifest_says_is_never_loaded_and_the_engine_goes_on_serving(
    w: World,
) -> None:
    engine = w.add_engine("e0")
    first = w.publish()
    async with syncing(w) as reconciler:
        await until(lambda: w.serves("e0", first.version))
        version = w.broker.name_version(w.epoch)
        broken = write_version(w.folder / "weights", version)
        file = Path(broken.path) / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        w.broker.publish(w.epoch, broken)
        await until(lambda: reconciler.totals.staging_failures >= 2)
        assert w.serves("e0", first.version)
        assert "checksum" in reconciler.staging_problem
        third = w.publish()
        await until(lambda: w.serves("e0", third.version))
    assert [load["weight_version"] for load in engine.calls("/update_weights_from_disk")] == [
        f"unverified-{first.version}",
        f"unverified-{third.version}",
    ]


async def test_an_engine_that_hangs_delays_no_other_and_all_are_continued(w: World) -> None:
    engines = [w.add_engine(f"e{i}") for i in range(3)]
    first = w.publish()
    async with broadcasting(w, drain=False, timeouts=FAST):
        for i in range(3):
            await until(partial(w.serves, f"e{i}", first.version))
        engines[0].fail("/pause_generation", "hang", times=4, seconds=3600.0)
        second = w.publish()
        await until(lambda: w.serves("e1", second.version) and w.serves("e2", second.version))
        await until(lambda: w.serves("e0", second.version))
        assert all(e.paused is None for e in engines)


async def test_versions_published_during_an_update_are_skipped_but_for_the_newest(w: World) -> None:
    engine = w.add_engine("e0")
    go, first = hold_loads(engine), w.publish()
    async with syncing(w, timeouts=replace(PATIENT, load=60)) as reconciler:
        await until(lambda: engine.calls("/update_weights_from_disk"))
        newest = [w.publish() for _ in range(10)][-1]
        await until(lambda: reconciler.staged is not None and reconciler.staged.version == newest.version)
        go.set()
        await until(lambda: w.serves("e0", newest.version))
    loaded = [load["weight_version"] for load in engine.calls("/update_weights_from_disk")]
    assert loaded == [f"unverified-{first.version}", f"unverified-{newest.version}"]


async def test_running_requests_end_under_the_version_that_they_began_with(w: World) -> None:
    engine = w.add_engine("e0", token_seconds=0.01)
    first = w.publish()
    async with (
        syncing(w, timeouts=replace(PATIENT, drain=20)),
        httpx.AsyncClient(base_url=w.record("e0").url, timeout=30) as client,
    ):
        await until(lambda: w.serves("e0", first.version))
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 15, "ignore_eos": True}}
        asked = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: engine.running)
        second = w.publish()
        answer = (await asked).json()["meta_info"]
        assert answer["finish_reason"]["type"] == "length"
        assert [span["version"] for span in answer["weight_versions"]] == [str(first.version)]
        await until(lambda: w.serves("e0", second.version))
    assert engine.pauses == 0


async def test_a_drain_that_takes_too_long_aborts_what_runs_and_continues(w: World) -> None:
    engine = w.add_engine("e0", token_seconds=0.1)
    first = w.publish()
    async with syncing(w), httpx.AsyncClient(base_url=w.record("e0").url, timeout=10) as client:
        await until(lambda: w.serves("e0", first.version))
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        asked = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: engine.running)
        second = w.publish()
        answer = (await asked).json()["meta_info"]
        assert answer["finish_reason"]["type"] == "abort"
        await until(lambda: w.serves("e0", second.version))
    assert len(engine.calls("/abort_request")) == 1
    assert (engine.pauses, engine.paused) == (0, None)


async def test_in_abort_mode_one_request_aborts_and_loads_and_an_abort_that_missed_a_request_is_repeated(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, missed, abort = w.add_engine("e0", token_seconds=0.05), list[str](), FakeEngine.abort
    first = w.publish()

    def late(self: FakeEngine, rid: str | None) -> None:
        """The first abort overtakes a request that was let in and has not reached the scheduler."""
        if missed:
            abort(self, rid)
        missed.extend(self.running)

    async with syncing(w, drain=False), httpx.AsyncClient(base_url=w.record("e0").url, timeout=30) as client:
        await until(lambda: w.serves("e0", first.version))
        monkeypatch.setattr(FakeEngine, "abort", late)
        body = {"input_ids": [5], "return_logprob": True, "return_routed_experts": True}
        body |= {"sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        engine.answer = lambda _prompt, _random: [7] * 400
        asked = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: engine.running)
        second = w.publish()
        answer = (await asked).json()
        await until(lambda: w.serves("e0", second.version))
    meta, count = answer["meta_info"], len(answer["output_ids"])
    assert missed
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < count < 400
    assert [span["version"] for span in meta["weight_versions"]] == [str(first.version)]
    assert len(meta["output_token_logprobs"]) == count
    assert meta["routed_experts"]
    assert [load["abort_all_requests"] for load in engine.calls("/update_weights_from_disk")] == [True, True]
    assert (engine.pauses, engine.continues, engine.loads) == (0, 0, 2)


async def test_an_engine_that_was_killed_is_not_routable_and_is_loaded_before_it_is_again(w: World) -> None:
    engine, written = w.add_engine("e0"), list[EngineRecord]()
    record = w.publish()
    async with syncing(w):
        await until(lambda: w.serves("e0", record.version))
        port = int(w.record("e0").url.rsplit(":", 1)[1])
        watch_writes(w, written.append)
        w.stack.close()
        await until(lambda: w.record("e0").state is EngineState.GONE)
        assert list(dict.fromkeys(r.state for r in written)) == [EngineState.QUARANTINED, EngineState.GONE]
        engine = w.add_engine("e0", port=port)
        await until(lambda: w.serves("e0", record.version))
    assert len(engine.calls("/update_weights_from_disk")) == 1


async def test_the_record_of_a_host_that_died_an_hour_ago_is_forgotten_and_no_other(w: World) -> None:
    gone = EngineRecord("e1", "http://nowhere:1", EngineState.GONE, pid=7)
    at = w.broker.server_time_ms()
    ages = {"dead": FORGOTTEN_MS + 60_000, "lately": FORGOTTEN_MS - 600_000}
    records = [replace(gone, engine_id=name, heartbeat_ms=at - age) for name, age in ages.items()]
    records += [replace(records[0], engine_id="by-hand", pid=0)]
    records += [replace(records[0], engine_id="alive", state=EngineState.QUARANTINED)]
    for record in records:
        w.broker._connection.client.hset(w.broker._keys.named("engines"), record.engine_id, engine_json(record))
    async with syncing(w):
        await until(lambda: "dead" not in {r.engine_id for r in w.broker.engines()})
    assert {r.engine_id for r in w.broker.engines()} == {"lately", "by-hand", "alive"}


async def test_an_engine_that_restarted_behind_our_back_is_found_by_the_name_of_its_weights(w: World) -> None:
    engine = w.add_engine("e0")
    record = w.publish()
    async with syncing(w) as reconciler:
        await until(lambda: w.serves("e0", record.version))
        w.violations.clear()
        engine.version, engine.model_path = "unconfirmed", "/model"
        await until(lambda: reconciler.members["e0"].figures.updates == 2)
        await until(lambda: w.record("e0").routable)
    assert w.serves("e0", record.version)


@pytest.mark.parametrize("state", [EngineState.PAUSING, EngineState.UPDATING, EngineState.VERIFYING])
async def test_an_engine_found_half_way_is_continued_and_loaded(w: World, state: EngineState) -> None:
    engine = w.add_engine("e0")
    record = w.publish()
    engine.paused = "abort"
    shown = w.record("e0")
    w.broker.register_engine(EngineRecord("e0", shown.url, state, version=record.version))
    async with syncing(w):
        await until(lambda: w.serves("e0", record.version))
    assert engine.paused is None
    assert len(engine.calls("/update_weights_from_disk")) == 1


async def test_stopping_in_the_middle_of_an_update_leaves_no_engine_paused(w: World) -> None:
    engine = w.add_engine("e0")
    w.publish()
    async with broadcasting(w, drain=False):  # the load does not answer for as long as it may
        engine.fail("/update_weights_from_distributed", "hang", seconds=3600.0)
        await until(lambda: engine.calls("/update_weights_from_distributed"))
        assert engine.paused == "abort"
    assert engine.paused is None
    assert not w.record("e0").routable


async def test_an_engine_that_leaves_the_registry_is_left_alone(w: World) -> None:
    w.add_engine("e0")
    record = w.publish()
    async with syncing(w) as reconciler:
        await until(lambda: w.serves("e0", record.version))
        w.broker.remove_engine("e0")
        await until(lambda: not reconciler.members)


def test_the_test_configuration_is_valid(tmp_path: Path) -> None:
    assert config("redis://127.0.0.1:1/0", tmp_path).weights.pause == "drain"


class SlowRegistry:
    """The broker, whose list of engines is some time old when it arrives."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def engines(self) -> tuple[EngineRecord, ...]:
        read = self._broker.engines()
        time.sleep(0.1)
        return read


async def test_a_list_of_engines_that_is_old_when_it_arrives_does_not_undo_what_was_confirmed_meanwhile(
    w: World,
) -> None:
    engine = w.add_engine("e0")
    real, w.broker = w.broker, cast("Broker", SlowRegistry(w.broker))
    async with syncing(w) as reconciler:
        w.broker = real
        for _ in range(5):
            record = w.publish()
            await until(partial(w.serves, "e0", record.version))
        looks = reconciler.totals.looks
        await until(lambda: reconciler.totals.looks > looks + 3)
    assert len(engine.calls("/update_weights_from_disk")) == 5
