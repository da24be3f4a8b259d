"""Two real SGLang engines: one serves, or goes on, while the other is updated or killed in the middle of its work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from structlog import get_logger

from broker.types import EngineState, VersionRun
from rollout.checkpoint import read_checkpoint
from rollout.client import EngineClient, Sample, Sampling
from rollout.counters import Counters
from rollout.engines import EnginePool
from rollout.sampling import Draw, draw_group
from services.weight_sync.engine_client import Timeouts
from services.weight_sync.lifecycle import Policy
from services.weight_sync.reconciler import Reconciler, Settings
from services.weight_sync.strategy import Strategy
from tests.engine_fixture import KEY, START_S, RealEngine, launch_engine, supervise, wait_until
from tests.weight_sync.live import until
from tests.weight_sync.test_real_engine import Publisher

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(1200)]
NAMES = ("engine-0", "engine-1")
PROMPT, LONG, PART = (6, 10, 4, 16), 480, 32


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, engine_redis: str) -> Iterator[RealEngine]:
    """Two engines of one run, given by the first."""
    directory = tmp_path_factory.mktemp("two") / "pair"
    settings, broker, first = launch_engine(directory, engine_redis)
    second, folder = supervise(settings, 1), directory / "model"
    try:
        wait_until(lambda: len(broker.engines()) == 2, START_S, "both engines")
        url = broker.engines()[0].url
        yield RealEngine(url, folder, read_checkpoint(folder), KEY, settings, broker, first)
    finally:
        for supervisor in (first, second):
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait(10)
        broker.close()


@dataclass
class Client:
    """Asks a routable engine again and again, as a worker does. nowhere: moments at which no engine was routable."""

    engine: RealEngine
    nowhere: int = 0
    answered: int = 0
    tokens: int = 0
    unverified_tokens: int = 0
    lost_requests: int = 0
    versions: set[str] = field(default_factory=set)

    async def run(self) -> None:
        async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
            while True:
                records = await asyncio.to_thread(self.engine.broker.engines)
                routable = [r for r in records if r.routable]
                if not routable:
                    self.nowhere += 1
                    await asyncio.sleep(0.01)
                    continue
                body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
                target = routable[self.answered % len(routable)]
                try:
                    answer = await http.post(target.url + "/generate", json=body)
                except httpx.HTTPError:
                    self.lost_requests += 1
                    continue
                self.answered += 1
                for span in answer.json()["meta_info"]["weight_versions"]:
                    count = span["end"] - span["start"]
                    self.tokens += count
                    self.unverified_tokens += count * (not span["version"].isdigit())
                    self.versions.add(span["version"])


@contextlib.asynccontextmanager
async def syncing(pair: RealEngine) -> AsyncIterator[Reconciler]:
    settings = Settings(
        Policy(),
        Strategy("rolling", 1),
        Timeouts(probe=8, load=60, pause=30, drain=30),
        interval_s=0.2,
        exact_dtype="float32",
        api_key=pair.key,
    )
    async with httpx.AsyncClient(trust_env=False) as http:
        reconciler = Reconciler(pair.broker, http, settings)
        task = asyncio.create_task(reconciler.run())
        try:
            yield reconciler
        finally:
            reconciler.stop()
            await task
    assert reconciler.totals.unexpected_errors == 0


async def test_one_serves_while_the_other_is_updated_killed_and_started_again(pair: RealEngine, tmp_path: Path) -> None:
    broker, publisher = pair.broker, Publisher(pair, tmp_path / "weights")

    def serve(version: int, names: tuple[str, ...] = NAMES) -> bool:
        records = {r.engine_id: r for r in broker.engines()}
        return all(n in records and records[n].routable and records[n].version == version for n in names)

    async with syncing(pair):
        first = await publisher.publish()
        await until(lambda: serve(first.version), 120)
        client = Client(pair)
        asking = asyncio.create_task(client.run())

        for _ in range(5):
            record = await publisher.publish()
            await until(partial(serve, record.version), 120)
        assert client.nowhere == 0
        assert client.answered > 0

        # It is stopped, so that it cannot finish the update that then begins, and killed in the middle of that.
        group = next(r.pid for r in broker.engines() if r.engine_id == "engine-1")
        os.killpg(group, signal.SIGSTOP)
        last = await publisher.publish()
        busy = (EngineState.UPDATING, EngineState.LOADING, EngineState.VERIFYING)
        await until(lambda: next(r.state for r in broker.engines() if r.engine_id == "engine-1") in busy, 60)
        os.killpg(group, signal.SIGKILL)
        killed = time.monotonic()
        await until(lambda: not serve(last.version, ("engine-1",)) and serve(last.version, ("engine-0",)), 60)
        await until(lambda: serve(last.version), START_S)
        seconds = time.monotonic() - killed
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    get_logger().info(
        "killed in an update",
        seconds_to_routable=round(seconds, 1),
        lost_requests=client.lost_requests,
        tokens=client.tokens,
        unverified_tokens=client.unverified_tokens,
    )
    assert client.nowhere == 0
    assert {v for v in client.versions if v.isdigit()} <= {str(v) for v in range(last.version + 1)}


@pytest.mark.parametrize("routed", [False, True], ids=["streamed", "in pieces with routes"])
async def test_a_generation_whose_engine_is_killed_goes_on_on_the_other_with_what_had_arrived(
    pair: RealEngine, tmp_path: Path, routed: bool
) -> None:
    broker, publisher = pair.broker, Publisher(pair, tmp_path / "weights")
    checkpoint = pair.checkpoint if routed else pair.checkpoint.without_routes()
    connect = partial(EngineClient, checkpoint=checkpoint, api_key=pair.key, timeout_s=120)
    pool = EnginePool(broker, connect, 10.0)

    def serve(version: int) -> bool:
        records = {r.engine_id: r for r in broker.engines()}
        return all(n in records and records[n].routable and records[n].version == version for n in NAMES)

    async with syncing(pair):
        record = await publisher.publish()
        await until(lambda: serve(record.version), START_S)
        draw = Draw(PROMPT, Sampling(1.0, LONG, ignore_end=True), 4, record.version, Counters(), part_tokens=PART)
        drawing = asyncio.create_task(draw_group(draw, 4, pool, "engine-0", 60.0))
        victim = next(r for r in broker.engines() if r.engine_id == "engine-0")
        async with connect(victim.url) as client:
            while not await client.running():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.02)
        await asyncio.sleep(1.5)  # some parts
        async with httpx.AsyncClient(trust_env=False, headers=pair.headers, timeout=10) as http:
            loads = (await http.get(victim.url + "/v1/loads")).json()["loads"]
        os.killpg(victim.pid, signal.SIGKILL)
        killed, totals = time.monotonic(), draw.counters.totals
        await until(lambda: {"streams_broken", "generation_retries"} & totals().keys(), 30)
        kept = sum(len(slot.partial.token_ids) for slot in draw.slots if slot.partial is not None)
        await asyncio.wait_for(drawing, 120)
        done = time.monotonic() - killed
    await pool.close()
    get_logger().info(
        "killed in a generation",
        routed=routed,
        seconds_to_the_end=round(done, 1),
        tokens_in_its_cache=sum(load["num_used_tokens"] for load in loads),
        tokens_that_went_on=kept,
        counted=totals(),
    )
    assert kept > 0
    assert draw.tokens_lost == 0
    check(draw.samples, Path(record.path), record.version, routed)


def check(samples: list[Sample], weights: Path, version: int, routed: bool) -> None:
    """Log-probs and routes are those of a forward pass of the version's weights over the whole sample."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    assert len(samples) == 4
    for sample in samples:
        assert sample.versions == (VersionRun(0, LONG, version),)
        ids = torch.tensor([[*PROMPT, *sample.token_ids.tolist()]])
        with torch.no_grad():
            out = model(ids, output_router_logits=True)
        log_probs = torch.log_softmax(out.logits[0, len(PROMPT) - 1 : -1], -1)
        expected = log_probs[torch.arange(LONG), ids[0, len(PROMPT) :]].numpy()
        np.testing.assert_allclose(sample.log_probs, expected, atol=2e-5)
        assert (sample.routes is not None) == routed
        for layer, logits in enumerate(out.router_logits if sample.routes is not None else ()):
            chosen = logits.view(ids.shape[1], -1)[:-1].topk(2, -1).indices.numpy()
            assert sample.routes is not None
            np.testing.assert_array_equal(sample.routes[:, layer], chosen)
