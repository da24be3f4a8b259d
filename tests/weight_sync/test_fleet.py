"""Engines that join and leave over HTTP while the service runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from broker.types import NO_SERVER, EngineRecord, EngineState
from rollout.ports import LEFT
from services.weight_sync.fleet import FleetRefusal, checked_url
from tests.weight_sync.live import Engine, World, syncing, until
from tests.weight_sync.test_service import serving

TOKEN = {"authorization": "Bearer s3cret"}


@pytest.fixture
async def http(w: World) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(w, token="s3cret") as client:
        client.headers.update(TOKEN)
        yield client


def elsewhere(w: World, name: str, **options: Any) -> tuple[Engine, dict[str, str]]:
    """A fake engine that listens and is not registered, and the body that lets it join."""
    engine = Engine(version="unconfirmed", **options)
    url = w.stack.enter_context(engine.serve())
    w.engines[name] = engine
    return engine, {"engine_id": name, "url": url}


async def test_an_engine_joins_by_one_request_and_repeating_it_changes_nothing(
    w: World, http: httpx.AsyncClient
) -> None:
    engine, body = elsewhere(w, "e9")
    record = w.publish()
    answer = await http.post("/v1/engines", json=body)
    assert (answer.status_code, answer.json()["created"]) == (201, True)
    await until(lambda: w.serves("e9", record.version))
    again = await http.post("/v1/engines", json={**body, "url": body["url"] + "/"})
    assert (again.status_code, again.json()) == (200, {"engine_id": "e9", "state": "serving", "created": False})
    assert len(engine.calls("/update_weights_from_disk")) == 1
    _, other = elsewhere(w, "e8")
    taken = await http.post("/v1/engines", json={**other, "engine_id": "e9"})
    assert (taken.status_code, taken.json()["error"]["reason"]) == (409, "taken")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"engine_id": "e1", "url": "http://127.0.0.1:1"}, 502),
        ({"engine_id": "e1", "url": "file:///etc/passwd"}, 422),
        ({"engine_id": "e1", "url": "http://user:word@host:1"}, 422),
        ({"engine_id": "e 1", "url": "http://host:1"}, 422),
        ({"engine_id": "e1"}, 422),
    ],
)
async def test_what_cannot_join_is_refused_and_not_registered(
    w: World, http: httpx.AsyncClient, body: dict[str, str], status: int
) -> None:
    assert (await http.post("/v1/engines", json=body)).status_code == status
    assert w.broker.engines() == ()


async def test_joining_and_leaving_need_the_token(w: World, http: httpx.AsyncClient) -> None:
    w.add_engine("e0")
    del http.headers["authorization"]
    assert (await http.post("/v1/engines", json={"engine_id": "e1", "url": "http://host:1"})).status_code == 401
    assert (await http.delete("/v1/engines/e0")).status_code == 401
    assert w.record("e0").state is not EngineState.GONE


async def test_an_engine_leaves_after_its_requests_ended_and_stays_out_until_it_joins_again(
    w: World, http: httpx.AsyncClient
) -> None:
    engine, body = elsewhere(w, "e9", token_seconds=0.01)
    record = w.publish()
    assert (await http.post("/v1/engines", json=body)).status_code == 201
    await until(lambda: w.serves("e9", record.version))
    async with httpx.AsyncClient(base_url=body["url"], timeout=20) as client:
        ask = {"input_ids": [5], "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
        asked = asyncio.create_task(client.post("/generate", json=ask))
        await until(lambda: engine.running)
        answer = await http.delete("/v1/engines/e9", params={"drain_s": 20})
        assert (answer.status_code, answer.json()) == (200, {"engine_id": "e9", "drained": True, "reachable": True})
        assert (await asked).json()["meta_info"]["finish_reason"]["type"] == "length"
    shown = w.record("e9")
    assert (shown.state, shown.detail, shown.routable) == (EngineState.GONE, LEFT, False)
    newer = w.publish()
    assert (await http.delete("/v1/engines/e9")).status_code == 200
    assert (await http.post("/v1/sync", json={"timeout_s": 5})).status_code == 409  # no engine is left
    assert len(engine.calls("/update_weights_from_disk")) == 1
    assert (await http.post("/v1/engines", json=body)).status_code == 201
    await until(lambda: w.serves("e9", newer.version))
    assert (await http.delete("/v1/engines/nobody")).status_code == 404


async def test_what_still_runs_when_an_engine_leaves_is_aborted_with_its_tokens(
    w: World, http: httpx.AsyncClient
) -> None:
    engine, body = elsewhere(w, "e9", token_seconds=0.05)
    record = w.publish()
    await http.post("/v1/engines", json=body)
    await until(lambda: w.serves("e9", record.version))
    async with httpx.AsyncClient(base_url=body["url"], timeout=20) as client:
        ask = {"input_ids": [5], "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        asked = asyncio.create_task(client.post("/generate", json=ask))
        await until(lambda: any(s.tokens for s in list(engine.running.values())))
        answer = await http.delete("/v1/engines/e9", params={"drain_s": 0})
        assert (answer.status_code, answer.json()["drained"]) == (200, False)
        partial = (await asked).json()
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    assert partial["output_ids"]


async def test_an_engine_that_is_dead_leaves_at_once(w: World, http: httpx.AsyncClient) -> None:
    w.broker.register_engine(EngineRecord("e0", "http://127.0.0.1:1", EngineState.SERVING, 0))
    answer = await http.delete("/v1/engines/e0")
    assert (answer.status_code, answer.json()["reachable"]) == (200, False)
    assert w.broker.engines()[0].detail == LEFT


async def test_a_server_that_its_supervisor_has_not_probed_yet_gets_no_weights(w: World) -> None:
    """It answers as soon as it listens; whether it gives log-probs and routes, the supervisor finds out first."""
    engine, record = w.add_engine("e0"), w.publish()
    async with syncing(w) as reconciler:
        await until(lambda: w.serves("e0", record.version))
        before = w.record("e0")
        down = replace(before, state=EngineState.GONE, version=-1, checksum="", detail="killed", pid=NO_SERVER)
        assert w.broker.update_engine(down, None)
        looks = reconciler.totals.looks
        await until(lambda: reconciler.totals.looks > looks + 5)
        assert w.record("e0").down
        assert reconciler.lagging() == []
        w.broker.register_engine(EngineRecord("e0", before.url, EngineState.JOINING, pid=before.pid))
        await until(lambda: w.serves("e0", record.version))
        assert reconciler.members["e0"].figures.updates == 2
    assert len(engine.calls("/update_weights_from_disk")) == 2


async def test_a_process_that_takes_over_shows_an_engine_that_is_down(w: World) -> None:
    engine = w.add_engine("e0")
    down = EngineRecord("e0", w.record("e0").url, EngineState.GONE, detail="killed", pid=NO_SERVER)
    assert w.broker.update_engine(down, None)
    async with syncing(w) as reconciler:
        await until(lambda: "e0" in reconciler.members)
        assert reconciler.members["e0"].shown.detail == "killed"
    assert engine.calls("/model_info") == []


async def test_the_openapi_document_has_an_example_for_every_field_that_one_sends(
    w: World, http: httpx.AsyncClient
) -> None:
    document = (await http.get("/openapi.json")).json()
    assert {"get", "post"} <= set(document["paths"]["/v1/engines"])
    assert "delete" in document["paths"]["/v1/engines/{engine_id}"]
    fields = document["components"]["schemas"]["JoinRequest"]["properties"]
    assert all(field.get("examples") for field in fields.values())


def test_addresses_that_are_not_plain_are_refused() -> None:
    assert checked_url("http://10.0.0.7:30000/") == "http://10.0.0.7:30000"
    for url in ("http://h:99999", "http://h:1/x", "http://h?q", "ftp://h", "h:1", "http://"):
        with pytest.raises(FleetRefusal):
            checked_url(url)
