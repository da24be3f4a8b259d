"""Evaluations by a real SGLang: the same scores again, and `lagrange eval` from a checkpoint to its record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.client import Sampling
from rollout.codec import FileCodec
from rollout.evaluation.run import Plan, evaluate, result
from rollout.rewards import ThreadJudge
from rollout.tasks import make_task
from tests.engine_fixture import RealEngine, engine_python
from tests.evaluation.smollm import write_smollm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SCORES = ("avg@2", "pass@1", "pass@2", "prompts", "samples", "missing", "mean_tokens", "truncated")


async def score(engine: RealEngine, folder: Path, version: int, temperature: float = 0.001) -> dict[str, Any]:
    """max-digit on the weights in `folder`; the engine serves them afterwards."""
    engine.load(folder, version)
    task = make_task("max-digit", 1)
    sampling, plan = Sampling(temperature, 1, engine.checkpoint.stop_ids), Plan(version, prompts=40, samples=2)
    async with engine.client() as client:
        answers = await evaluate(
            task,
            ThreadJudge(task, 30.0),
            FileCodec(engine.folder),
            lambda ids, n: client.generate(ids, n, sampling),
            plan,
        )
    return result(task.name, plan, answers, label=task.name, step=version)


async def test_a_greedy_evaluation_gives_the_same_scores_again(real_engine: RealEngine) -> None:
    first, second = [await score(real_engine, real_engine.folder, 21) for _ in range(2)]
    assert {name: first[name] for name in SCORES} == {name: second[name] for name in SCORES}
    assert (first["missing"], first["discarded_other_version"], first["prompts"]) == (0, 0, 40)


@pytest.mark.soak
def test_two_runs_of_lagrange_eval_agree(real_engine: RealEngine, tmp_path: Path) -> None:
    records = [evaluated(real_engine.folder, tmp_path, "max-digit", "rollout.max_new_tokens=1") for _ in range(2)]
    assert {name: records[0][name] for name in SCORES} == {name: records[1][name] for name in SCORES}


def evaluated(folder: Path, directory: Path, task: str, *settings: str, parameters: tuple[str, ...] = ()) -> Any:
    """What `lagrange eval` writes of a checkpoint; greedy."""
    output = directory / "record.jsonl"
    fixed = (f"engine.python={engine_python()}", "rollout.temperature=0.001", f"run.directory={directory}")
    words = ["eval", str(folder), "--task", task, "--prompts", "8", "--samples", "2", "--output", str(output)]
    words += [word for setting in (*fixed, *settings) for word in ("--set", setting)]
    words += [word for one in parameters for word in ("--parameter", one)]
    done = subprocess.run(
        [sys.executable, "-m", "services", *words], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text().splitlines()[-1])


@pytest.mark.soak
def test_a_real_model_loads_generates_and_is_scored_on_questions_of_reasoning_gym(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    write_smollm(tmp_path / "model")
    limits = ("rollout.max_new_tokens=48", "rollout.generation_timeout_s=600", "engine.max_total_tokens=4096")
    terms = "parameters={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
    record = evaluated(
        tmp_path / "model", tmp_path, "reasoning-gym", *limits, parameters=("generator=chain_sum", terms)
    )
    assert (record["prompts"], record["missing"]) == (8, 0)
    assert record["avg@2"]["value"] > 0, "not one sum of two digits was right"
    assert 1 < record["mean_tokens"] <= 48
