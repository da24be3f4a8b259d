"""Which engines are taken out for an update at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.types import EngineRecord, EngineState
from services.weight_sync.strategy import Strategy, is_out, may_leave
from tests.weight_sync.live import PATIENT, World, hold_loads, syncing, until


@given(st.integers(0, 8), st.integers(1, 4), st.booleans())
def test_rolling_never_has_more_engines_out_than_allowed(out: int, at_most: int, idle: bool) -> None:
    assert may_leave(Strategy("rolling", at_most), out, idle=idle) is (out < at_most)
    assert may_leave(Strategy("all-at-once"), out, idle=idle)
    assert may_leave(Strategy("on-idle"), out, idle=idle) is idle


def test_an_engine_that_joins_or_recovers_does_not_hold_back_those_that_serve() -> None:
    states = [(EngineState.LOADING, -1), (EngineState.VERIFYING, -1), (EngineState.QUARANTINED, -1)]
    assert not any(is_out(*state) for state in states)
    assert is_out(EngineState.UPDATING, 3)


@pytest.mark.parametrize("at_most", [1, 2])
async def test_a_rolling_update_brings_all_engines_to_the_newest_version_a_few_at_a_time(
    w: World, monkeypatch: pytest.MonkeyPatch, at_most: int
) -> None:
    engines = [w.add_engine(f"e{i}") for i in range(3)]
    first, update, out = w.publish(), w.broker.update_engine, [0]

    def counted(record: EngineRecord, expected: EngineState | None = None) -> bool:
        written = update(record, expected)
        out.append(sum(not r.routable for r in w.broker.engines()))
        return written

    timeouts = replace(PATIENT, load=60)
    async with syncing(w, strategy=Strategy("rolling", at_most), timeouts=timeouts) as reconciler:
        for i in range(3):
            await until(partial(w.serves, f"e{i}", first.version))
        go = hold_loads(*engines)
        monkeypatch.setattr(w.broker, "update_engine", counted)
        second = w.publish()
        await until(lambda: max(out) >= at_most)
        looks = reconciler.totals.looks
        await until(lambda: reconciler.totals.looks > looks + 3)  # time for one too many
        assert max(out) == at_most
        go.set()
        for i in range(3):
            await until(partial(w.serves, f"e{i}", second.version))
    assert max(out) == at_most


async def test_on_idle_waits_for_running_requests_and_then_updates_without_being_told(w: World) -> None:
    engine = w.add_engine("e0", token_seconds=0.02)
    first = w.publish()
    async with (
        syncing(w, strategy=Strategy("on-idle"), timeouts=replace(PATIENT, drain=20)) as reconciler,
        httpx.AsyncClient(base_url=w.record("e0").url, timeout=20) as client,
    ):
        await until(lambda: w.serves("e0", first.version))
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
        asked = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: engine.running)
        second = w.publish()
        await until(lambda: reconciler.staged is not None and reconciler.staged.version == second.version)
        if engine.running:
            assert w.serves("e0", first.version)
        answer = (await asked).json()["meta_info"]
        assert answer["finish_reason"]["type"] == "length"
        await until(lambda: w.serves("e0", second.version))
    assert not engine.calls("/abort_request")
