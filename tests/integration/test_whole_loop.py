"""The whole system with its real parts: Redis, SGLang, Megatron-core, started by the command that users start."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.engine_fixture import RealEngine
from tests.evaluation.test_real_engine import score
from tests.integration.running import processes_of, running_loop

pytestmark = [pytest.mark.engine, pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 400.0  # an engine takes half a minute to start, several times that on a busy machine
CONFIG = "configs/local.yaml"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_reward_rises_within_the_bound_through_kills_of_every_part_and_a_resume(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One run: learn, lose each process once by kill -9, stop by Ctrl-C, go on, finish; then hold the books.

    An evaluation of the first and the last weights, on prompts of another seed, says that it has learned.
    """
    max_lag, steps = 1, 150
    settings = ["--set", f"run.steps={steps}", "--set", f"lag.max={max_lag}", "--set", f"run.directory={tmp_path}"]
    settings += ["--set", "rollout.lease_s=5", "--set", "trainer.checkpoint.interval_steps=10"]
    with running_loop(tmp_path, CONFIG, *settings) as loop:
        loop.wait_for_step(5, START_S)
        loop.kill("worker")
        loop.wait_for_step(15, 120)
        loop.kill("weight-sync")
        loop.wait_for_step(25, 120)
        loop.kill("trainer")
        loop.wait_for_step(35, 180)
        loop.kill("sglang")
        loop.wait_for_step(45, START_S)
        loop.kill("monitor")
        seen = loop.wait_for_step(55, 120)
        assert seen.groups.closes
        assert seen.tokens.closes
        loop.process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        loop.ends(30)
        assert time.monotonic() - asked < 12, "Ctrl-C took too long"
        assert not processes_of(loop.folder), "a process was left behind"
        folder = loop.folder
    with running_loop(tmp_path, "--resume", str(folder)) as loop:
        assert loop.ends(START_S + 300) == 0, loop.said()
        records = loop.metrics()
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert max(record["lag_max"] for record in records) <= max_lag
    assert min(record["lag_min"] for record in records) >= 0
    rewards = [record["reward_mean"] for record in records]
    assert mean(rewards[-10:]) > 0.7, rewards
    assert mean(rewards[-10:]) > mean(rewards[:10]) + 0.4
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "model-final" / "model.safetensors").is_file()
    assert not processes_of(folder)
    engine: RealEngine = request.getfixturevalue("real_engine")  # not before: the run is busy enough
    before, after = (asyncio.run(score(engine, folder / name, 30))["avg@2"] for name in ("model", "model-final"))
    engine.load(engine.folder, 31)
    assert after["low"] > before["high"], (before, after)


def test_a_synchronous_run_trains_every_token_at_lag_zero(tmp_path: Path) -> None:
    settings = ["--set", "run.steps=6", "--set", "lag.max=0", "--set", f"run.directory={tmp_path}"]
    with running_loop(tmp_path, CONFIG, *settings) as loop:
        assert loop.ends(START_S + 120) == 0, loop.said()
        records = loop.metrics()
    assert [record["lag_max"] for record in records] == [0] * 6
