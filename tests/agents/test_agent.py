"""Agents against a fake engine and a real Redis: what their calls become, and what becomes of bad ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.queue import Broker
from broker.types import Group, check_group
from configs.load import ConfigError
from rollout.agents import AgentTask
from rollout.codec import FileCodec
from rollout.evaluation.run import check_task
from rollout.tasks import make_task
from rollout.tasks.prepare import try_prompt
from rollout.worker import Worker
from tests.agents.players import TEMPLATE
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.fakes.model import fake_log_prob, fake_routes
from tests.rollout.helpers import make_worker, ready, ready_groups, run_with, tiny_folder, until, working


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version="0", answer=lambda prompt, rng: [3 + rng.randrange(10), 3 + len(prompt) % 10, 2])


@pytest.fixture
def run(broker: Broker, engine: FakeEngine) -> Iterator[Run]:
    with run_with(broker, engine) as run:
        yield run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tiny_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def agent(name: str, directory: Path, **parameters: Any) -> dict[str, Any]:
    """Parameters of `agent-jsonl` for an agent of players.py."""
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": str(i), "answer": "0"}) + "\n" for i in range(10)))
    return {"function": f"tests.agents.players:{name}", "path": str(rows), **parameters}


@pytest.fixture
def worker_of(run: Run, folder: Path, make_config: ConfigFactory, tmp_path: Path) -> Any:
    def make(name: str, parameters: dict[str, Any] | None = None, **settings: Any) -> Worker:
        chosen = agent(name, tmp_path, **(parameters or {}))
        config = make_config(**{"task": {"name": "agent-jsonl", "parameters": chosen}, **settings})
        return make_worker(config, run.broker, folder, task=make_task("agent-jsonl", 0, chosen))

    return make


async def groups_of(worker: Worker, run: Run) -> list[Group]:
    async with working(worker):
        await until(lambda: ready(run.broker) == 4, 90.0)
    groups = ready_groups(run, 2)
    for group in groups:
        check_group(group)
    run.assert_closed()
    return groups


async def test_a_conversation_by_openais_client_is_one_trajectory_with_all_that_the_engine_said(
    run: Run, engine: FakeEngine, worker_of: Any, folder: Path
) -> None:
    codec = FileCodec(folder)
    for group in await groups_of(worker_of("conversation"), run):
        assert [t.reward for t in group.trajectories] == [3.0, 3.0]
        for t in group.trajectories:
            assert codec.decode(t.response_ids[~t.loss_mask].tolist()) == "<0=<1="
            assert (t.response_ids == 2).sum() == 3  # the end tokens that no client has seen
            places = len(t.prompt_ids) + np.arange(len(t.response_ids))
            said = [fake_log_prob("0", int(p), int(i)) for p, i in zip(places, t.response_ids, strict=True)]
            np.testing.assert_allclose(t.log_probs[t.loss_mask], np.asarray(said)[t.loss_mask], rtol=1e-6)
            np.testing.assert_array_equal(t.routes, fake_routes("0", t.tokens - 1, 2, 2, 8))
    assert {body["routed_experts_start_len"] for body in engine.calls("/generate")} == {0, 4, 10}  # the rest alone


async def test_branches_and_fresh_questions_are_trajectories_of_their_own(run: Run, worker_of: Any) -> None:
    for group in await groups_of(worker_of("branches"), run):
        assert len(group.trajectories) == 2 * 3
        longest = max(group.trajectories, key=lambda t: len(t.response_ids))
        assert not longest.loss_mask.all()
        assert {t.reward for t in group.trajectories} == {1.0}


async def test_what_cannot_be_trained_is_refused_and_a_strange_key_too(run: Run, worker_of: Any) -> None:
    for group in await groups_of(worker_of("refused"), run):
        assert [t.reward for t in group.trajectories] == [6.0, 6.0]


@pytest.mark.parametrize(
    ("name", "parameters"), [("silent", {}), ("failing", {}), ("late", {"timeout_s": 0.05}), ("branches", {"calls": 1})]
)
async def test_an_agent_that_fails_costs_its_episode_and_is_counted(
    run: Run, worker_of: Any, name: str, parameters: dict[str, Any]
) -> None:
    worker = worker_of(name, parameters)
    async with working(worker):
        await until(lambda: worker.counters.totals().get("failed_groups", 0) >= 2)
        await until(lambda: run.broker.snapshot().dead_letters >= 1)
    assert all("samples, 1 needed; an episode failed: " in letter["reason"] for letter in run.broker.dead_letters())
    assert worker.counters.totals()["episode_failures"] >= 4
    assert "worker_faults" not in worker.counters.totals()
    run.assert_closed()


async def test_an_agent_without_engine_hands_its_group_back(run: Run, engine: FakeEngine, worker_of: Any) -> None:
    worker = worker_of("conversation", {}, **{"lag.straggler_wait_s": 1.0, "rollout.lease_s": 1.0})
    engine.fail("/generate", "status", times=10_000, code=401)
    async with working(worker):
        await until(lambda: worker.counters.totals().get("engine_unreachable", 0) >= 2)
        await until(lambda: run.broker.snapshot().counters.get("groups_released", 0) >= 1)
    assert "worker_faults" not in worker.counters.totals()
    run.assert_closed()


def test_a_model_without_a_chat_template_and_a_function_that_is_not_async_are_found_at_the_start(
    tmp_path: Path,
) -> None:
    folder = tiny_folder(tmp_path)
    task = make_task("agent-jsonl", 0, agent("silent", tmp_path, chat=False))
    with pytest.raises(ConfigError, match="chat template"):
        try_prompt(task, FileCodec(folder))
    with pytest.raises(ConfigError, match="async def"):
        make_task("agent-jsonl", 0, {**agent("silent", tmp_path), "function": "json:loads"})
    with pytest.raises(ConfigError, match="only trained"):
        check_task(task, FileCodec(folder))
    assert isinstance(task, AgentTask)
    assert asyncio.iscoroutinefunction(task.run)
