"""An engine in a container: how others reach it, and how it leaves."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from broker.queue import Broker
from configs.load import ConfigError
from configs.schema import RunConfig
from rollout.engine import Supervisor, make_plan
from tests.conftest import ConfigFactory
from tests.rollout.helpers import tiny_folder, until
from tests.rollout.test_engine import fake_plan


@pytest.fixture
def config(make_config: ConfigFactory, tmp_path: Path) -> RunConfig:
    here = {"model": {"path": tiny_folder(tmp_path)}, "engine.python": Path("/usr/bin/env"), "redis.url": "redis://x"}
    return make_config(**here, **{"engine.host": "0.0.0.0"})


def test_an_engine_that_is_reached_from_elsewhere_is_named_after_its_host(config: RunConfig) -> None:
    plan = make_plan(config, 0)
    assert plan.engine_id == f"engine-0@{socket.gethostname()}"
    assert plan.url == f"http://{socket.gethostname()}:{plan.port}"


@pytest.mark.parametrize(
    ("host", "url"), [("10.1.2.3", "http://10.1.2.3:{}"), ("fd00::7", "http://[fd00::7]:{}"), ("", None)]
)
def test_an_orchestrator_may_say_how_it_is_reached(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, host: str, url: str | None
) -> None:
    monkeypatch.setenv("LAGRANGE_ADVERTISE_HOST", host)
    plan = make_plan(config, 0)
    assert plan.url == (url or f"http://{socket.gethostname()}:{{}}").format(plan.port)


def test_key_and_log_go_to_the_scratch_folder(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAGRANGE_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("LAGRANGE_ENGINE_API_KEY", "key")
    plan = make_plan(config, 0)
    assert plan.key_file is not None
    assert plan.key_file.parent == tmp_path / "scratch"
    assert plan.log.is_relative_to(tmp_path / "scratch")


def test_a_drain_time_that_is_no_number_is_refused(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGRANGE_DRAIN_S", "soon")
    with pytest.raises(ConfigError, match="LAGRANGE_DRAIN_S"):
        make_plan(config, 0)


async def test_an_engine_that_drains_leaves_the_registry_before_its_server_ends(
    config: RunConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = config.model_copy(update={"engine": config.engine.model_copy(update={"host": "127.0.0.1"})})
    stop, seen = asyncio.Event(), []
    supervisor = Supervisor(replace(fake_plan(local), drain_s=5.0), local, broker)

    async def running(_client: object) -> int:
        seen.append(broker.engines())
        return 0 if len(seen) > 2 else 1

    monkeypatch.setattr("rollout.client.EngineClient.running", running)
    life = asyncio.create_task(supervisor.run(stop))
    await until(lambda: bool(broker.engines()))
    stop.set()
    assert await asyncio.wait_for(life, 10) == 0
    assert seen == [(), (), ()]
    assert broker.engines() == ()
