"""Engines that the configuration names by URL: all addresses of a name join, and leave with their address."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from broker.types import EngineRecord, EngineState
from services.weight_sync import fleet
from services.weight_sync.discovery import Discovery, addresses_of, engines_at, plan
from tests.weight_sync.live import Engine, World, syncing, until

NAME = "http://engine.lagrange.svc:30000"


def record(engine_id: str, url: str, pid: int = 0) -> EngineRecord:
    return EngineRecord(engine_id, url, EngineState.SERVING, 3, pid=pid)


def test_a_name_stands_for_each_of_its_addresses() -> None:
    assert engines_at(NAME, ["10.0.0.7", "fd00::8"]) == {
        "engine.lagrange.svc@10.0.0.7:30000": "http://10.0.0.7:30000",
        "engine.lagrange.svc@fd00::8:30000": "http://[fd00::8]:30000",
    }


@pytest.mark.parametrize("url", ["http://10.0.0.7:30000", "https://engine.example:443", "http://[fd00::8]:30000"])
def test_an_address_or_a_name_with_a_certificate_is_one_engine(url: str) -> None:
    assert engines_at(url, ["1.2.3.4", "1.2.3.5"]) == {url.split("//")[1]: url}


def test_what_appears_joins_and_what_left_the_name_is_forgotten() -> None:
    found = {NAME: engines_at(NAME, ["10.0.0.7", "10.0.0.8"])}
    old = record("engine.lagrange.svc@10.0.0.6:30000", "http://10.0.0.6:30000")
    kept = record("engine.lagrange.svc@10.0.0.7:30000", "http://10.0.0.7:30000")
    todo = plan(found, [old, kept, record("engine-7", "http://10.0.0.9:30000")])
    assert todo.join == {"engine.lagrange.svc@10.0.0.8:30000": "http://10.0.0.8:30000"}
    assert todo.forget == (old.engine_id,)


def test_a_lookup_that_failed_forgets_nobody() -> None:
    assert plan({}, [record("engine.lagrange.svc@10.0.0.6:30000", "http://10.0.0.6:30000")]).forget == ()


def test_an_engine_with_a_supervisor_is_the_supervisors() -> None:
    found = {NAME: engines_at(NAME, ["10.0.0.7"])}
    supervised = record("engine-0@pod", "http://10.0.0.7:30000", pid=12)
    twice = record("engine.lagrange.svc@10.0.0.7:30000", "http://10.0.0.7:30000")
    assert plan(found, [supervised]).join == {}
    assert plan(found, [supervised, twice]).forget == (twice.engine_id,)


async def test_a_name_for_this_machine_is_one_address() -> None:
    assert len(await addresses_of("localhost", 80)) == 1


async def test_engines_come_and_go_with_their_addresses(w: World) -> None:
    engine = Engine(version="unconfirmed")
    port = int(w.stack.enter_context(engine.serve()).rsplit(":", 1)[1])
    engine_id, names = f"engines@127.0.0.1:{port}", {"engines": ["127.0.0.1"]}
    w.engines[engine_id] = engine
    published = w.publish()

    async def resolve(host: str, _port: int) -> Sequence[str]:
        if host not in names:
            raise OSError("the name server is out of order")
        return names[host]

    async with syncing(w) as reconciler:
        discovery = Discovery(reconciler, [f"http://engines:{port}"], resolve)
        await discovery.look()
        await until(lambda: w.serves(engine_id, published.version))
        del names["engines"]
        await discovery.look()
        assert w.record(engine_id).routable
        names["engines"] = ["127.0.0.2"]  # where nobody listens
        await discovery.look()
        assert w.broker.engines() == ()
        names["engines"] = ["127.0.0.1", "127.0.0.2"]
        await discovery.look()
        assert [r.engine_id for r in w.broker.engines()] == [engine_id]
        await until(lambda: w.serves(engine_id, published.version))


async def test_an_engine_that_was_told_to_leave_stays_out(w: World) -> None:
    engine = Engine(version="unconfirmed")
    url = w.stack.enter_context(engine.serve())
    engine_id = url.removeprefix("http://")
    w.engines[engine_id] = engine
    published = w.publish()
    async with syncing(w) as reconciler:
        discovery = Discovery(reconciler, [url])
        await discovery.look()
        await until(lambda: w.serves(engine_id, published.version))
        await fleet.leave(reconciler, engine_id, 1.0)
        await discovery.look()
        assert w.record(engine_id).state is EngineState.GONE


async def test_only_the_process_that_leads_lets_engines_join(w: World) -> None:
    engine = Engine(version="unconfirmed")
    url = w.stack.enter_context(engine.serve())
    w.engines[url.removeprefix("http://")] = engine
    looks: list[str] = []

    async def resolve(host: str, _port: int) -> Sequence[str]:
        looks.append(host)
        return ["127.0.0.1"]

    named = url.replace("127.0.0.1", "engines")
    async with syncing(w) as leader:
        await until(leader.lease.leads)
        async with asyncio.timeout(60), syncing(w) as other:
            await until(lambda: other.lease.leader == leader.lease.identity)
            standby = asyncio.create_task(Discovery(other, [named], resolve, interval_s=0.01).run())
            leading = asyncio.create_task(Discovery(leader, [url], interval_s=0.01).run())
            await until(lambda: len(w.broker.engines()) == 1)
            for task in (standby, leading):
                task.cancel()
            await asyncio.gather(standby, leading, return_exceptions=True)
    assert looks == []
