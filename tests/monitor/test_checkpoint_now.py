"""An operator's "checkpoint now" from the request over HTTP to the event, with the trainer's own loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from broker.queue import Broker
from configs.schema import RunConfig
from services.monitor.app import create_app
from services.monitor.source import Source
from tests.conftest import ConfigFactory
from tests.trainer.sim import MemoryCheckpoints, World, trainer_of
from trainer.loop import Trainer


@pytest.fixture
def config(make_config: ConfigFactory) -> RunConfig:
    """A run that would not save by itself before its end."""
    return make_config(**{"run.steps": 50, "trainer.checkpoint": {"interval_steps": 50}})


@pytest.fixture
def broker(redis_url: str, config: RunConfig) -> Iterator[Broker]:
    handle = Broker.connect(redis_url, config.run.id, timeout_s=5)
    handle.initialise(config)
    yield handle
    handle.close()


@pytest.fixture
async def http(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(Source(broker, fresh_s=0.0), steer=broker, token="s3cret")
    headers = {"authorization": "Bearer s3cret"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://monitor", headers=headers
    ) as client:
        yield client


async def test_a_checkpoint_asked_for_over_http_is_saved_after_the_next_step_and_said_in_an_event(
    config: RunConfig, broker: Broker, http: httpx.AsyncClient
) -> None:
    checkpoints, world = MemoryCheckpoints(), World(config, broker)

    def begun() -> contextlib.closing[Trainer]:
        trainer = trainer_of(config, broker, world, checkpoints)
        trainer.attach()
        return contextlib.closing(trainer)

    with begun() as trainer:
        for _ in range(2):
            trainer.step()
        answer = await http.post("/v1/checkpoint", json={"by": "ada", "reason": "the node will be drained"})
        assert (answer.status_code, answer.json()["version"]) == (200, 2)
        asked = (await http.get("/v1/run")).json()
        assert (asked["checkpoint_asked"], asked["durable_step"]) == (True, 0)
        for _ in range(2):
            trainer.step()
    assert [state.step for state, _, _ in checkpoints.kept] == [3]
    kept = (await http.get("/v1/run")).json()
    assert (kept["checkpoint_asked"], kept["step"], kept["durable_step"]) == (False, 4, 3)
    events = [(e["kind"], e["text"]) for e in (await http.get("/v1/events")).json()["events"]]
    assert ("checkpoint", "step 3, as asked") in events
    assert any(kind == "steer" and "by ada: the node will be drained" in text for kind, text in events)
    with begun() as again:  # as after a kill: it goes on from what was asked for
        assert again.progress.step == 3
