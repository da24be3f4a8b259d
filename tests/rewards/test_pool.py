"""A verifier that hangs, crashes or lies costs one counted failure; the next answer has its reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from rollout.rewards import RewardFailed, RewardTimeout
from rollout.rewards.judge import PoolJudge, make_judge
from rollout.rewards.pool import PoolLimits
from rollout.tasks import Prompt, Response, make_task
from tests.rollout.helpers import until

PROMPT = Prompt(text="?", metadata={"answer": "1"})


def said(text: str) -> Response:
    return Response(text=text, ids=(1,), finish="stop")


@pytest_asyncio.fixture
async def judge(tmp_path: Path) -> AsyncIterator[PoolJudge]:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": "1"}))
    parameters = {"path": str(path), "function": "tests.rewards.hostile:score"}
    task = make_task("function-jsonl", 0, parameters)
    limits = PoolLimits(processes=1, timeout_s=60.0, memory_mb=1024)
    made = make_judge(task, seed=0, parameters=parameters, limits=limits)
    assert isinstance(made, PoolJudge)
    yield made
    await made.close()


@contextlib.contextmanager
def time_limit(judge: PoolJudge, seconds: float) -> Iterator[None]:
    """Another limit for the answers in the body, which hang: those that have a reward may take long on busy cores."""
    kept = judge._pool._limits
    judge._pool._limits = replace(kept, timeout_s=seconds)
    yield
    judge._pool._limits = kept


async def test_whatever_a_verifier_does_costs_its_answer_alone(judge: PoolJudge) -> None:
    assert await judge.reward(PROMPT, said("0.5")) == 0.5
    assert await judge.reward(PROMPT, said("print")) == 1.0
    for text in ("raise", "nan", "inf", "crash", "exit", "memory"):
        with pytest.raises(RewardFailed):
            await judge.reward(PROMPT, said(text))
        assert await judge.reward(PROMPT, said("0.25")) == 0.25, text


async def test_a_verifier_that_hangs_is_killed_and_the_loop_goes_on(judge: PoolJudge) -> None:
    assert await judge.reward(PROMPT, said("1")) == 1.0
    began = time.monotonic()
    with time_limit(judge, 2.0):
        late, after = asyncio.create_task(judge.reward(PROMPT, said("busy"))), 0
        while not late.done():
            await asyncio.sleep(0.05)  # the loop is free while the verifier spins
            after += 1
        with pytest.raises(RewardTimeout):
            await late
    assert after >= 5
    assert time.monotonic() - began < 30
    assert await judge.reward(PROMPT, said("0.75")) == 0.75


def at_work(note: Path, how: str) -> bool:
    """Whether the folder that a note names is there, and a scribbler writes in it."""
    if not note.exists() or not (folder := note.read_text()):
        return False
    return how == "litter" or any(Path(folder).glob("program-*/100"))


def exists(note: Path) -> bool:
    """Whether the folder that a note names is there."""
    return Path(note.read_text()).exists()


@pytest.mark.parametrize("how", ["litter", "scribble"])
async def test_the_temporary_files_of_a_verifier_that_is_killed_are_removed(
    judge: PoolJudge, tmp_path: Path, how: str
) -> None:
    note = tmp_path / "note"
    answer = asyncio.create_task(judge.reward(PROMPT, said(f"{how} {note}")))
    await until(lambda: answer.done() or at_work(note, how), 60.0)
    assert exists(note)
    answer.cancel()  # kills as a time limit does, and before the files are too many for a busy disk
    with pytest.raises(asyncio.CancelledError):
        await answer
    await until(lambda: not exists(note), 60.0)


async def test_a_cancelled_answer_is_not_given_to_the_next(judge: PoolJudge) -> None:
    assert await judge.reward(PROMPT, said("1")) == 1.0
    hanging = asyncio.create_task(judge.reward(PROMPT, said("hang")))
    await asyncio.sleep(0.1)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await judge.reward(PROMPT, said("0.5")) == 0.5
