"""The service as a process and over HTTP: killed at the worst moment, asked by strangers, without Redis."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker.types import EngineRecord, EngineState
from configs import save_config
from configs.schema import RunConfig
from services.weight_sync import lifecycle as lc
from services.weight_sync.app import create_app
from services.weight_sync.engine_client import Timeouts
from services.weight_sync.lifecycle import Policy
from services.weight_sync.reconciler import Reconciler, Settings
from tests.weight_sync.live import PATIENT, World, accepts, config, free_port, syncing, until, wait_for

COMMAND = """
import sys, pathlib, configs, services.weight_sync.main as main
sys.exit(main.run(configs.load_config(pathlib.Path(sys.argv[1]))))
"""


@contextlib.asynccontextmanager
async def serving(w: World, token: str | None = None, timeouts: Timeouts = PATIENT) -> AsyncIterator[httpx.AsyncClient]:
    """The application with its loop, reached in-process."""
    policy = Policy(tries=2, back_off_s=0.05, back_off_max_s=0.2, gone_after_s=1.0)
    engines = httpx.AsyncClient(trust_env=False)
    settings = Settings(policy=policy, timeouts=timeouts, interval_s=0.03, exact_dtype="float32")
    app = create_app(Reconciler(w.broker, engines, settings), token, http=engines)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://sync") as client,
    ):
        yield client


async def test_sync_answers_200_only_when_every_engine_is_confirmed_with_the_newest_version(w: World) -> None:
    async with serving(w) as http:
        assert (await http.post("/v1/sync", json={"timeout_s": 5})).status_code == 409
        engines = [w.add_engine("e0"), w.add_engine("e1")]
        record = w.publish()
        answer = await http.post("/v1/sync", json={"timeout_s": 20})
        assert (answer.status_code, answer.json()) == (200, {"version": record.version, "engines": ["e0", "e1"]})
        engines[1].fail("/update_weights_from_disk", "status", times=10**6)
        record = w.publish()
        await until(lambda: w.serves("e0", record.version))
        answer = await http.post("/v1/sync", json={"timeout_s": 0.5})
        assert (answer.status_code, answer.json()["lagging"]) == (504, ["e1"])
        shown = (await http.get("/v1/engines")).json()
        assert {e["engine_id"]: e["routable"] for e in shown["engines"]} == {"e0": True, "e1": False}
        versions = (await http.get("/v1/versions")).json()["versions"]
        assert [v["engines"] for v in versions] == [[], ["e0"]]
        assert str(w.folder) not in str(versions)


async def test_writes_need_the_token_and_bodies_are_bounded(w: World) -> None:
    async with serving(w, token="s3cret") as http:
        assert (await http.post("/v1/sync")).status_code == 401
        assert (await http.post("/v1/sync", headers={"authorization": "Bearer s3cre"})).status_code == 401
        good = {"authorization": "Bearer s3cret"}
        assert (await http.post("/v1/sync", headers=good)).status_code == 409
        assert (await http.post("/v1/sync", headers=good, json={"timeout_s": -1})).status_code == 422
        assert (await http.post("/v1/sync", headers=good, json={"x": 1})).status_code == 422
        assert (await http.post("/v1/sync", headers=good, content=b"x" * 70_000)).status_code == 413
        elsewhere = {**good, "sec-fetch-site": "cross-site"}
        assert (await http.post("/v1/sync", headers=elsewhere)).status_code == 403
        answer = await http.get("/v1/engines")
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_without_redis_the_service_is_not_ready_and_touches_no_engine(w: World) -> None:
    engine = w.add_engine("e0")
    record = w.publish()
    async with serving(w) as http:
        assert (await http.post("/v1/sync", json={"timeout_s": 20})).status_code == 200
        assert (await http.get("/readyz")).status_code == 200
        w.broker._connection.timeout_s = 1.0
        w.broker._connection.client.shutdown(nosave=True)
        assert (await http.get("/v1/versions")).status_code == 503
        assert (await http.post("/v1/sync", json={"timeout_s": 0.3})).status_code in (503, 504)
        assert (await http.get("/healthz")).status_code == 200
    assert engine.paused is None
    assert engine.version == str(record.version)
    assert len(engine.calls("/update_weights_from_disk")) == 1


async def test_the_metrics_are_those_of_the_documentation(w: World) -> None:
    w.add_engine("e0")
    w.publish()
    async with serving(w) as http:
        assert (await http.post("/v1/sync", json={"timeout_s": 20})).status_code == 200
        text = (await http.get("/metrics")).text
    assert 'lagrange_weight_sync_engine_state{engine="e0",state="serving"} 1.0' in text
    assert 'lagrange_weight_sync_engine_exact_verifications_total{engine="e0"} 1.0' in text
    families = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert families == set(re.findall(r"^\| `(lagrange_weight_sync_\w+)`", page, re.M))


@contextlib.contextmanager
def process(file: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`lagrange weight-sync` as a process of its own."""
    with log.open("ab") as out:
        child = subprocess.Popen([sys.executable, "-c", COMMAND, str(file)], stderr=out, stdout=out)
        try:
            yield child
        finally:
            child.kill()
            child.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "mode"), [("disk", "abort"), ("disk", "drain"), ("distributed", "drain")])
def test_killed_in_the_middle_of_an_update_and_started_again_it_continues_and_loads(
    w: World, tmp_path: Path, transport: str, mode: str
) -> None:
    port, file, log = free_port(), tmp_path / "config.yaml", tmp_path / "log"
    tree = config(w.url, tmp_path, transport=transport, pause=mode, update_timeout_s=30).model_dump()
    tree["weight_sync"]["port"] = port
    tree["engine"]["python"] = tmp_path / "none"  # without a sender a broadcast is a load, in the pause that it needs
    save_config(RunConfig.model_validate(tree), file)
    engine = w.add_engine("e0")
    first = w.publish()
    with process(file, log) as child:
        wait_for(lambda: w.serves("e0", first.version), 40)
        engine.fail("/update_weights_from_disk", "hang", seconds=3600.0)
        second = w.publish()
        wait_for(lambda: len(engine.calls("/update_weights_from_disk")) == 2)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    # No write falls into a pause: its record says "pausing" until it is over. One request needs no pause.
    paused = transport == "distributed"
    assert w.record("e0").state is (EngineState.PAUSING if paused else EngineState.UPDATING)
    assert engine.paused == ("abort" if paused else None)
    with process(file, log) as child:
        wait_for(lambda: w.serves("e0", second.version), 40)
        assert engine.paused is None
        wait_for(lambda: accepts(port))
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0


def test_a_port_in_use_is_one_message_and_an_exit_code(w: World, tmp_path: Path) -> None:
    taken = int(w.url.rsplit(":", 1)[1].split("/")[0])
    settings, file = config(w.url, tmp_path), tmp_path / "config.yaml"
    section = settings.weight_sync.model_copy(update={"port": taken})
    save_config(settings.model_copy(update={"weight_sync": section}), file)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert "Set another port" in done.stderr
    assert "Traceback" not in done.stderr


async def test_an_engine_that_its_supervisor_registers_again_during_an_update_is_loaded_from_the_start(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, state = w.add_engine("e0"), list[EngineState]()
    checksum, record = engine.checksum, w.publish()

    def meanwhile() -> dict[str, Any]:
        if not state:
            shown = w.record("e0")
            state.append(shown.state)
            w.broker.register_engine(EngineRecord("e0", shown.url, EngineState.JOINING, pid=os.getpid() + 1))
        return checksum()

    async with serving(w, timeouts=Timeouts(probe=20, load=20, pause=20, drain=20)) as http:
        assert (await http.post("/v1/sync", json={"timeout_s": 20})).status_code == 200
        monkeypatch.setattr(engine, "checksum", meanwhile)
        second = w.publish()
        await until(lambda: w.serves("e0", second.version))
        assert state == [EngineState.VERIFYING]
        assert len(engine.calls("/update_weights_from_disk")) == 3
    assert record.version < second.version


async def test_of_two_processes_one_leads_and_the_other_takes_over_when_it_ends(w: World) -> None:
    engine = w.add_engine("e0")
    async with syncing(w) as first:
        record = w.publish()
        await until(lambda: w.serves("e0", record.version))
        async with syncing(w) as second:
            await until(lambda: second.lease.leader == first.lease.identity)
            record = w.publish()
            await until(lambda: w.serves("e0", record.version))
            assert (first.lease.leads(), second.lease.leads(), len(second.members)) == (True, False, 0)
            first.stop()
            await until(second.lease.leads)
            record = w.publish()
            await until(lambda: w.serves("e0", record.version))
    assert engine.paused is None


async def test_a_process_that_stands_by_says_so(w: World) -> None:
    async with syncing(w) as leader:
        await until(leader.lease.leads)
        async with serving(w) as http:
            answer = await http.post("/v1/sync", json={"timeout_s": 5})
            assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "standby")
            assert (await http.get("/v1/engines")).json()["leader"] == leader.lease.identity


async def test_without_the_lease_nothing_is_sent_to_an_engine(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = w.add_engine("e0")
    async with syncing(w) as reconciler:
        await until(lambda: w.record("e0").state is EngineState.JOINING and "e0" in reconciler.members)
        member = reconciler.members["e0"]
        assert (await member._show(reconciler, member.life, lc.Load(1)))[1] is not None
        monkeypatch.setattr(reconciler.lease, "leads", lambda: False)
        assert (await member._show(reconciler, member.life, lc.Load(1)))[1] is None
        assert (await member._show(reconciler, member.life, lc.Continue()))[1] == lc.Continue()
        reconciler.lease.leader = "another"
        assert (await member._show(reconciler, member.life, lc.Continue()))[1] is None
    assert not engine.calls("/update_weights_from_disk")
