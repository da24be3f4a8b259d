"""What the client's docstring says of SGLang, on a real SGLang; and the life of its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from broker.types import EngineState, VersionRun
from configs.schema import TinyModel
from rollout.client import (
    EngineClient,
    EngineError,
    EngineTimeout,
    KeyRefused,
    RequestRefused,
    Sample,
    Sampling,
    UnconfirmedVersion,
)
from rollout.command import UNCONFIRMED_VERSION
from rollout.continuation import join, next_request
from services.local.tiny_model import write_tiny_model
from tests.engine_fixture import START_S, RealEngine, launch_engine, start_engine, stop_engine, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PROMPT = (6, 10, 4, 16)


def usable(answers: Sequence[Sample | EngineError]) -> list[Sample]:
    for answer in answers:
        assert isinstance(answer, Sample), answer
    return [answer for answer in answers if isinstance(answer, Sample)]


async def test_an_engine_that_nobody_confirmed_gives_no_usable_sample(real_engine: RealEngine) -> None:
    assert real_engine.record().state is EngineState.JOINING
    async with real_engine.client() as client:
        if (await client.model_info())["weight_version"] != UNCONFIRMED_VERSION:  # another test has loaded a version
            body: dict[str, object] = {"new_version": UNCONFIRMED_VERSION, "abort_all_requests": False}
            assert real_engine.post("/update_weight_version", body).json()["success"]
        answers = await client.generate(PROMPT, 2, Sampling(1.0, 4))
    assert all(isinstance(answer, UnconfirmedVersion) for answer in answers)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_log_probs_are_of_the_scaled_distribution_and_routes_of_the_model(
    real_engine: RealEngine,
    temperature: float,
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    real_engine.load(real_engine.folder, 0)
    async with real_engine.client() as client:
        samples = usable(await client.generate(PROMPT, 3, Sampling(temperature, 24, (2,))))
    model = transformers.AutoModelForCausalLM.from_pretrained(real_engine.folder, dtype=torch.float32).eval()
    for sample in samples:
        n = len(sample.token_ids)
        assert sample.versions == (VersionRun(0, n, 0),)
        assert sample.routes is not None
        assert sample.routes.shape == (len(PROMPT) + n - 1, 2, 2)
        ids = torch.tensor([[*PROMPT, *sample.token_ids.tolist()]])
        with torch.no_grad():
            out = model(ids, output_router_logits=True)
        scaled = torch.log_softmax(out.logits[0, len(PROMPT) - 1 : -1] / temperature, -1)
        expected = scaled[torch.arange(n), ids[0, len(PROMPT) :]].numpy()
        np.testing.assert_allclose(sample.log_probs, expected, atol=1e-5)
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.view(ids.shape[1], -1)[:-1].topk(2, -1).indices.numpy()
            np.testing.assert_array_equal(sample.routes[:, layer], chosen)


async def test_a_stream_is_a_whole_answer_and_what_arrived_of_a_broken_one_is_sound(real_engine: RealEngine) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    real_engine.load(real_engine.folder, 0)
    dense, sampling = real_engine.checkpoint.without_routes(), Sampling(1.0, 480, ignore_end=True)
    async with EngineClient(real_engine.url, dense, api_key=real_engine.key, timeout_s=60) as client:
        whole, broke = await client.stream(PROMPT, 3, replace(sampling, max_new_tokens=40), every=8, stall_s=30)
        assert broke is None
    async with EngineClient(real_engine.url, dense, api_key=real_engine.key, timeout_s=1.0) as client:
        broken, broke = await client.stream(PROMPT, 3, sampling, every=8, stall_s=30)
        assert isinstance(broke, EngineTimeout)
    model = transformers.AutoModelForCausalLM.from_pretrained(real_engine.folder, dtype=torch.float32).eval()
    assert [s.finish for s in usable(whole)] == ["length"] * 3
    assert [s.finish for s in usable(broken)] == ["abort"] * 3
    for sample in usable([*whole, *broken]):
        n = len(sample.token_ids)
        assert 0 < n < 480
        assert sample.versions == (VersionRun(0, n, 0),)
        ids = torch.tensor([[*PROMPT, *sample.token_ids.tolist()]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0, len(PROMPT) - 1 : -1], -1)
        expected = log_probs[torch.arange(n), ids[0, len(PROMPT) :]].numpy()
        np.testing.assert_allclose(sample.log_probs, expected, atol=1e-5)


async def test_an_aborted_sample_goes_on_under_other_weights_with_the_routes_of_each(
    real_engine: RealEngine,
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    write_tiny_model(TinyModel(), 1, other)
    real_engine.load(real_engine.folder, 10)
    sampling = Sampling(1.0, 480, ignore_end=True)  # ends by the abort alone
    async with real_engine.client() as client:
        first = asyncio.create_task(client.generate(PROMPT, 2, sampling))
        while not await client.running():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # some tokens
        await asyncio.to_thread(real_engine.post, "/pause_generation", {"mode": "abort"})
        partials = usable(await first)
        await asyncio.to_thread(real_engine.load, other, 11)
        await asyncio.to_thread(real_engine.post, "/continue_generation", {})
        joined = []
        for partial in partials:
            assert partial.finish == "abort"
            assert 0 < len(partial.token_ids) < 480
            ask = next_request(PROMPT, partial, Sampling(1.0, len(partial.token_ids) + 20))
            (rest,) = usable(await client.generate(ask.prompt_ids, 1, ask.sampling, routes_start=ask.routes_start))
            joined.append(join(partial, rest, len(PROMPT)))
        for partial, whole in zip(partials, joined, strict=True):
            assert [run.version for run in whole.versions] == [10, 11]
            assert whole.routes is not None
            assert partial.routes is not None
            assert len(whole.routes) == len(PROMPT) + len(whole.token_ids) - 1
            np.testing.assert_array_equal(whole.routes[: len(partial.routes)], partial.routes)
            np.testing.assert_array_equal(whole.token_ids[: len(partial.token_ids)], partial.token_ids)
    real_engine.load(real_engine.folder, 12)


async def test_requests_that_would_harm_the_engine_are_refused_before_they_are_sent(
    real_engine: RealEngine,
) -> None:
    async with real_engine.client() as client:
        for prompt in ([3, 99], [-1], [], [3] * 600):
            with pytest.raises(RequestRefused):
                await client.generate(prompt, 1, Sampling(1.0, 4))
        await client.healthy()


async def test_the_api_key_is_needed_and_is_in_no_log_or_command_line(real_engine: RealEngine) -> None:
    async with real_engine.client() as client:
        client._http.headers["Authorization"] = "Bearer wrong"
        with pytest.raises(KeyRefused):
            await client.generate(PROMPT, 1, Sampling(1.0, 4))
    folder = real_engine.config.run.folder
    assert real_engine.key not in (folder / "logs" / "sglang-0.log").read_text()
    assert real_engine.key not in (folder / "supervisor.log").read_text()
    assert stat.S_IMODE((folder / ".engine-0.yaml").stat().st_mode) == 0o600
    for process in psutil.Process(real_engine.supervisor.pid).children(recursive=True):
        assert real_engine.key not in " ".join(process.cmdline())


def test_the_engine_comes_back_after_a_kill_and_ends_with_sigterm(tmp_path: Path, engine_redis: str) -> None:
    engine = start_engine(tmp_path, engine_redis)
    try:
        first = engine.record().pid
        processes = psutil.Process(first).children(recursive=True)
        assert processes
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: engine.record().state is EngineState.GONE, 5, "GONE")
        assert "killed" in engine.record().detail
        wait_until(lambda: engine.record().state is EngineState.JOINING, START_S, "started again")
        assert engine.record().pid != first
        assert not any(alive(process) for process in processes)
        family = psutil.Process(engine.supervisor.pid).children(recursive=True)
        began = time.monotonic()
        engine.supervisor.send_signal(signal.SIGTERM)
        assert engine.supervisor.wait(10) == 0
        assert time.monotonic() - began < 5
        wait_until(lambda: not any(alive(process) for process in family), 1, "no orphan")
        assert engine.record().state is EngineState.GONE
    finally:
        stop_engine(engine)


def test_a_supervisor_killed_while_the_engine_starts_leaves_no_orphan(tmp_path: Path, engine_redis: str) -> None:
    _, broker, supervisor = launch_engine(tmp_path, engine_redis)
    ours = psutil.Process(supervisor.pid)
    try:
        # guard, server, and what the server has just started: these have not asked to die with their parent yet
        wait_until(lambda: len(ours.children(recursive=True)) >= 4, START_S, "the server starts its processes")
        family = ours.children(recursive=True)
    finally:
        supervisor.kill()
        supervisor.wait(5)
        broker.close()
    wait_until(lambda: not any(alive(process) for process in family), 5, "no orphan")


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
