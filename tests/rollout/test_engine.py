"""How a server is kept alive and what becomes of it; without a server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.queue import Broker
from broker.types import EngineRecord, EngineState
from configs.load import ConfigError
from configs.schema import RunConfig
from rollout import engine as supervising
from rollout import process as server_process
from rollout.command import Launch
from rollout.engine import Plan, Supervisor, main, make_plan
from rollout.ports import LEFT
from rollout.process import ServerProcess
from tests.conftest import ConfigFactory
from tests.rollout.helpers import tiny_folder, until


@pytest.fixture
def config(make_config: ConfigFactory, tmp_path: Path) -> RunConfig:
    folder = tiny_folder(tmp_path)
    return make_config(**{"model": {"path": folder}, "engine.python": sys.executable, "redis.url": "redis://x"})


def test_a_plan_holds_what_a_start_needs(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGRANGE_ENGINE_API_KEY", "very-secret")
    plan = make_plan(config, 2)
    assert (plan.engine_id, plan.url) == ("engine-2", f"http://127.0.0.1:{plan.port}")
    assert plan.key_file is not None
    assert stat.S_IMODE(plan.key_file.stat().st_mode) == 0o600
    assert "very-secret" in plan.key_file.read_text()
    assert not any("very-secret" in part for part in plan.launch.argv)


def broken(config: RunConfig, section: str, **changes: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def test_what_is_missing_is_named_before_anything_starts(config: RunConfig, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = {
            "engine.python": broken(config, "engine", python=tmp_path / "none"),
            "model.path": broken(config, "model", path=tmp_path / "none"),
            "engine.port": broken(config, "engine", port=taken.getsockname()[1]),
        }
        for field, case in cases.items():
            with pytest.raises(ConfigError, match=field):
                make_plan(case, 0)
    assert main(cases["engine.python"], 0) == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    with pytest.raises(ConfigError, match="safetensors"):
        make_plan(broken(config, "model", path=empty), 0)


# --- processes --------------------------------------------------------------------------------------------------------

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("key=topsecret child", child.pid, flush=True)
time.sleep(600)
"""


def python(code: str) -> Launch:
    return Launch((sys.executable, "-c", code), dict(os.environ))


async def test_stop_ends_the_whole_family_and_the_key_is_not_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "STOP_S", 60.0)  # on busy cores SIGTERM may need longer than the usual time
    log = tmp_path / "logs" / "sglang-0.log"
    server = await ServerProcess.start(python(FAMILY), log, "topsecret")
    await until(lambda: bool(server.lines))
    child = int(server.lines[-1].split()[-1])
    began = time.monotonic()
    await server.stop()
    assert time.monotonic() - began < 30
    assert server.exit_code == -signal.SIGTERM
    await until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")
    assert log.read_text().startswith("key=*** child")


async def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    server = await ServerProcess.start(python(code), tmp_path / "log", None)
    await until(lambda: bool(server.lines))
    began = time.monotonic()
    await server.stop()
    assert time.monotonic() - began < 30
    assert server.exit_code == -signal.SIGKILL


def test_the_end_is_quiet_although_a_stranger_holds_the_servers_output(tmp_path: Path) -> None:
    code = "import subprocess, time; p = subprocess.Popen(['sleep', '60'], start_new_session=True);"
    code += "print(p.pid, flush=True); time.sleep(600)"

    async def live() -> int:
        server = await ServerProcess.start(python(code), tmp_path / "log", None)
        await until(lambda: bool(server.lines))
        await server.stop()
        return int(server.lines[0])

    stranger = asyncio.run(live())
    gc.collect()  # a pipe that is still open complains here that its event loop is closed, and fails the test
    os.kill(stranger, signal.SIGKILL)


async def test_an_interpreter_that_cannot_be_run_ends_with_127(tmp_path: Path) -> None:
    server = await ServerProcess.start(Launch(("/no/such/python",), {}), tmp_path / "log", None)
    assert await server.wait() == 127
    assert "/no/such/python" in server.lines[-1]
    await server.stop()


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from rollout.command import Launch
from rollout.process import ServerProcess
async def go():
    server = await ServerProcess.start(Launch((sys.executable, "-c", sys.argv[1]), {}), Path(sys.argv[2]), None)
    while not server.lines:
        await asyncio.sleep(0.01)
    print(server.lines[-1].split()[-1], flush=True)
    await asyncio.sleep(600)
asyncio.run(go())
"""


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("victim", ["supervisor", "guard"])
def test_no_process_of_the_server_outlives_its_supervisor(tmp_path: Path, victim: str) -> None:
    arguments = [sys.executable, "-c", SUPERVISOR, FAMILY, str(tmp_path / "log")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        try:
            grandchild = int(supervisor.stdout.readline())  # it has not asked to die with its parent
            family = psutil.Process(supervisor.pid).children(recursive=True)
            assert [process.pid for process in family][-1] == grandchild
            if victim == "guard":  # then the server itself dies, and the supervisor's stop sees to the group
                family = family[:2]
                family[0].kill()
            else:
                supervisor.kill()
            end = time.monotonic() + 30
            while not all(gone(process.pid) for process in family):
                assert time.monotonic() < end, "an orphan"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(family[0].pid, signal.SIGKILL)
        finally:
            supervisor.kill()  # whatever was found: its output would be waited for


# --- the supervisor, with a fake server -------------------------------------------------------------------------------

SERVER = """
import sys, uvicorn
from tests.fakes.engine import FakeEngine
uvicorn.run(FakeEngine(version="unconfirmed").app, port=int(sys.argv[1]), log_level="critical")
"""


def fake_plan(config: RunConfig, code: str = SERVER) -> Plan:
    plan = make_plan(config, 0)
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return replace(plan, launch=Launch((sys.executable, "-c", code, str(plan.port)), here))


async def test_a_server_is_joining_after_the_probe_gone_when_it_dies_and_started_again(
    config: RunConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(supervising, "BEAT_S", 0.05)
    stop = asyncio.Event()
    life = asyncio.create_task(Supervisor(fake_plan(config), config, broker).run(stop))
    await until(lambda: any(r.state is EngineState.JOINING for r in broker.engines()))
    (first,) = broker.engines()
    assert (first.version, first.url.startswith("http://127.0.0.1:")) == (-1, True)
    assert broker.update_engine(replace(first, state=EngineState.SERVING, version=5), EngineState.JOINING)
    os.kill(first.pid, signal.SIGKILL)
    seen = []
    await until(lambda: seen.append(broker.engines()[0]) or seen[-1].state is EngineState.GONE)  # type: ignore[func-returns-value]
    assert {r.version for r in seen if r.state is EngineState.SERVING} <= {5}
    assert "killed" in seen[-1].detail
    assert seen[-1].down
    await until(lambda: broker.engines()[0].state is EngineState.JOINING)
    assert broker.engines()[0].pid != first.pid
    stop.set()
    assert await asyncio.wait_for(life, 30) == 0
    assert broker.engines()[0].state is EngineState.GONE


async def test_heartbeats_leave_what_weight_sync_wrote_alone(
    config: RunConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "BEAT_S", 0.02)
    stop = asyncio.Event()
    life = asyncio.create_task(Supervisor(fake_plan(config), config, broker).run(stop))
    await until(lambda: bool(broker.engines()))
    serving = replace(broker.engines()[0], state=EngineState.SERVING, version=3, checksum="sum")
    assert broker.update_engine(serving, None)
    end = time.monotonic() + 0.3
    await until(lambda: time.monotonic() > end)
    assert (broker.engines()[0].version, broker.engines()[0].checksum) == (3, "sum")
    broker.remove_engine("engine-0")  # as after a loss of Redis' data
    await until(lambda: bool(broker.engines()))
    assert broker.engines()[0].state is EngineState.JOINING
    stop.set()
    assert await asyncio.wait_for(life, 30) == 0


async def test_an_engine_that_was_told_to_leave_stays_out_even_when_its_server_starts_again(
    config: RunConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(supervising, "BEAT_S", 0.02)
    stop = asyncio.Event()
    supervisor = Supervisor(fake_plan(config), config, broker)
    life = asyncio.create_task(supervisor.run(stop))
    await until(lambda: bool(broker.engines()))
    first = broker.engines()[0]
    assert broker.update_engine(replace(first, state=EngineState.GONE, detail=LEFT), None)
    await until(lambda: supervisor._left)
    before = broker.engines()[0].heartbeat_ms
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: broker.engines()[0].heartbeat_ms > before + 500)  # its next server lives
    assert (broker.engines()[0].state, broker.engines()[0].detail) == (EngineState.GONE, LEFT)
    broker.register_engine(EngineRecord(first.engine_id, first.url, EngineState.JOINING))  # it joins again
    await until(lambda: not supervisor._left)
    assert broker.engines()[0].state is EngineState.JOINING
    stop.set()
    assert await asyncio.wait_for(life, 30) == 0


async def test_a_server_that_never_starts_is_given_up_after_some_tries(
    config: RunConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervising, "LONGEST_PAUSE_S", 0.02)
    count = config.run.folder / "starts"
    code = f"import sys, pathlib; pathlib.Path({str(count)!r}).open('a').write('x'); sys.exit(3)"
    assert await Supervisor(fake_plan(config, code), config, broker).run(asyncio.Event()) == 1
    assert count.read_text() == "x" * supervising.MAX_FAILURES
    assert [(r.state, r.detail) for r in broker.engines()] == [
        (EngineState.GONE, "the engine ended with code 3; last line: it printed nothing")
    ]


# As SGLang 0.5.23, which says that it cannot listen, and lives on.
LIVES_ON = """
import sys, time, uvicorn
from tests.fakes.engine import FakeEngine
try:
    uvicorn.run(FakeEngine(version="unconfirmed").app, port=int(sys.argv[1]), log_level="error")
except SystemExit:
    time.sleep(600)
"""


async def test_a_port_that_is_taken_before_the_server_listens_is_told_at_once_and_another_chosen(
    config: RunConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "FIRST_PAUSE_S", 0.05)
    stop = asyncio.Event()
    seen: list[EngineRecord] = []
    plan = fake_plan(config, LIVES_ON)
    with socket.socket() as thief:  # it accepts connections and answers none, as a rank of the trainer did
        thief.bind(("127.0.0.1", plan.port))
        thief.listen()
        supervisor = Supervisor(plan, config, broker, partial(fake_plan, config, LIVES_ON))
        life = asyncio.create_task(supervisor.run(stop))
        await until(lambda: seen.extend(broker.engines()) or bool(seen))  # type: ignore[func-returns-value]
        assert (seen[0].state, seen[0].down) == (EngineState.GONE, True)
        assert f"another process took port {plan.port}" in seen[0].detail
        await until(lambda: broker.engines()[0].state is EngineState.JOINING)
    assert broker.engines()[0].url != plan.url
    stop.set()
    assert await asyncio.wait_for(life, 30) == 0


def test_engines_of_a_run_choose_none_of_its_other_ports_and_none_of_each_other(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def choose(*arguments: Any) -> int:
        asked.append(arguments)
        return 20000

    monkeypatch.setattr(supervising, "free_port", choose)
    two = broken(broken(config, "engine", replicas=2), "monitor", port=12345)
    assert [make_plan(two, index).port for index in (0, 1)] == [20000, 20000]
    assert [share for _, _, share in asked] == [(0, 2), (1, 2)]
    assert all(12345 in avoid for _, avoid, _ in asked)


async def test_a_hopeless_start_is_tried_once(config: RunConfig, broker: Broker) -> None:
    plan = replace(make_plan(config, 0), launch=Launch(("/no/such/python",), {}))
    assert await Supervisor(plan, config, broker).run(asyncio.Event()) == 1
