"""The live curriculum passes over what is too easy or too hard by now, shared by all workers, and loses no prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.queue import Broker
from configs.schema import CurriculumSection
from rollout.curriculum import draw_of, prompt_name, wanted
from rollout.tasks import Prompt, Response
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import make_worker, ready, run_with, tiny_folder, until, working

SETTINGS = CurriculumSection()


@dataclass(frozen=True)
class TwoPrompts:
    """Even prompts are always solved, odd ones by every other sample."""

    name: str = "two-prompts"

    def prompt(self, index: int) -> Prompt:
        return Prompt(text=str(index % 2), metadata={"easy": index % 2 == 0})

    def reward(self, prompt: Prompt, response: Response) -> float:
        return float(prompt.metadata["easy"] or response.text == "1")


@pytest.fixture
def run(broker: Broker) -> Iterator[Run]:
    turn = iter(range(10**9))
    engine = FakeEngine(version="0", answer=lambda _prompt, _rng: [3 + next(turn) % 2, 2])
    with run_with(broker, engine) as run:
        yield run


@given(st.floats(0, 1), st.integers(1, 64), st.floats(0, 1, exclude_max=True))
def test_a_prompt_within_the_limits_is_always_wanted_and_one_beyond_them_sometimes(
    share: float, samples: int, draw: float
) -> None:
    inside = SETTINGS.low <= share * samples / samples <= SETTINGS.high
    assert wanted(SETTINGS, share * samples, samples, draw) is (inside or draw < SETTINGS.again)
    assert wanted(SETTINGS, 0, 0, draw)


def test_the_same_share_of_prompts_comes_again_on_every_worker() -> None:
    draws = [draw_of(3, index) for index in range(2000)]
    assert draws == [draw_of(3, index) for index in range(2000)]
    assert 0.07 < sum(draw < SETTINGS.again for draw in draws) / 2000 < 0.13


def test_what_is_known_of_a_prompt_fades(broker: Broker) -> None:
    name = prompt_name((1, 2, 3))
    assert broker.pass_rate(name) == (0.0, 0.0)
    assert broker.pass_rate(name, 8, 8, 0.5) == (8.0, 8.0)
    assert broker.pass_rate(name, 0, 8, 0.5) == (4.0, 12.0)
    assert broker.pass_rate(name) == (4.0, 12.0)
    assert broker.pass_rate(prompt_name((1, 2))) == (0.0, 0.0)


async def test_a_prompt_that_is_always_solved_is_passed_over_and_the_ledger_closes(
    run: Run, tmp_path: Path, make_config: ConfigFactory
) -> None:
    settings = {"task": {"name": "two-prompts", "curriculum": {"again": 0.01}}, "rollout.concurrent_groups": 1}
    worker = make_worker(make_config(**settings), run.broker, tiny_folder(tmp_path), task=TwoPrompts())
    async with working(worker):
        await until(lambda: ready(run.broker) == 4)
    prompts = [record.prompt_index for record in run.broker.groups("ready")]
    assert [index % 2 for index in sorted(prompts)] == [0, 1, 1, 1]
    assert worker.counters.totals()["prompts_passed_over"] >= 2
    assert run.broker.snapshot().groups.filtered >= 2
    run.assert_closed()
