"""Episodes: the engine's tokens are never changed, the environment's are masked, and everything lines up over turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.queue import Broker
from broker.types import Group, VersionRun, check_trajectory
from rollout.client import InvalidAnswer, Sample
from rollout.environments import Episode, PrefixBroken, Step
from rollout.tasks import make_task
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.fakes.model import fake_log_prob, fake_routes
from tests.rollout.helpers import make_worker, ready, ready_groups, run_with, serving, tiny_folder, until, working


def sample(prompt: int, ids: list[int], version: int, routes_start: int) -> Sample:
    rows = prompt + len(ids) - 1
    routes = np.arange(rows, dtype=np.uint8)[routes_start:, None, None].repeat(2, 1)
    log_probs = np.asarray([-float(i) for i in ids], np.float32)
    return Sample(
        np.asarray(ids, np.int32), log_probs, (VersionRun(0, len(ids), version),), routes, routes_start, "stop"
    )


TURNS = st.lists(
    st.tuples(st.lists(st.integers(3, 12), min_size=1, max_size=4), st.lists(st.integers(20, 29), max_size=3)),
    min_size=1,
    max_size=5,
)


@given(turns=TURNS, prompt=st.integers(1, 5), stays=st.integers(1, 3))
def test_everything_lines_up_over_any_turns(turns: list[tuple[list[int], list[int]]], prompt: int, stays: int) -> None:
    episode = Episode(tuple(range(prompt)))
    asked_rows = 0
    for number, (said, heard) in enumerate(turns):
        turn = episode.turn
        asked_rows += len(turn.prompt_ids) + len(said) - 1 - turn.routes_start
        answer = sample(len(turn.prompt_ids), said, number // stays, turn.routes_start)
        episode = episode.answered(turn, answer).observed(heard, reward=0.5)
    t = episode.trajectory()
    check_trajectory(t)
    spoken = [i for said, _ in turns for i in said]
    assert t.response_ids[t.loss_mask].tolist() == spoken
    assert set(t.response_ids[~t.loss_mask].tolist()) <= set(range(20, 30))
    assert t.log_probs[~t.loss_mask].sum() == 0
    assert t.log_probs[t.loss_mask].tolist() == [-float(i) for i in spoken]
    assert t.reward == pytest.approx(0.5 * len(turns))
    assert t.routes is not None
    assert t.routes[:, 0, 0].tolist() == list(range(t.tokens - 1))  # each position once, in order
    assert asked_rows == t.tokens - 1  # what was fetched grows linearly


def test_a_turn_that_was_asked_with_other_tokens_is_refused() -> None:
    episode = Episode((1, 2))
    first = episode.turn
    episode = episode.answered(first, sample(2, [3], 0, 0)).observed([20])
    with pytest.raises(PrefixBroken):
        episode.answered(first, sample(2, [3], 0, 0))
    later = episode.answered(episode.turn, sample(4, [4], 2, 2))
    with pytest.raises(InvalidAnswer, match="older"):
        later.answered(later.turn, sample(5, [4], 1, 4))
    with pytest.raises(InvalidAnswer, match="routes"):
        episode.answered(episode.turn, sample(4, [4], 0, 0))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version="0", context=512)


@pytest.fixture
def run(broker: Broker, engine: FakeEngine) -> Iterator[Run]:
    with run_with(broker, engine) as run:
        yield run


async def groups_of(name: str, run: Run, folder: Path, make_config: ConfigFactory) -> list[Group]:
    config = make_config(**{"task": {"name": name}, "rollout.max_new_tokens": 16})
    async with working(make_worker(config, run.broker, folder, task=make_task(name, 0))):
        await until(lambda: ready(run.broker) == 4, 30.0)
    return ready_groups(run, 2)


async def test_the_calculator_is_asked_and_its_answer_repeated(
    run: Run, engine: FakeEngine, tmp_path: Path, make_config: ConfigFactory
) -> None:
    folder = tiny_folder(tmp_path)
    codec = make_worker(make_config(), run.broker, folder)._codec
    ask, less, end = codec.encode("=")[0], codec.encode("<")[0], codec.encode(">")[0]

    def answer(prompt: list[int], _rng: object) -> list[int]:
        if prompt[-1] == less:
            return [ask, 2]
        return [*prompt[prompt.index(2) + 1 : prompt.index(end)], 2]  # what the tool said, again

    engine.answer = answer
    for group in await groups_of("calculator", run, folder, make_config):
        for t in group.trajectories:
            check_trajectory(t)
            assert t.reward == 1.0
            assert codec.decode(t.response_ids[~t.loss_mask].tolist()).endswith(">")
            assert t.response_ids[:2].tolist() == [ask, 2]
            places = [len(t.prompt_ids) + i for i in range(len(t.response_ids))]
            said = [fake_log_prob("0", p, i) for p, i in zip(places, t.response_ids.tolist(), strict=True)]
            np.testing.assert_allclose(t.log_probs[t.loss_mask], np.asarray(said)[t.loss_mask], rtol=1e-6)
            np.testing.assert_array_equal(t.routes, fake_routes("0", t.tokens - 1, 2, 2, 8))
    starts = {body["routed_experts_start_len"] for body in engine.calls("/generate")}
    assert len(starts) > 1  # later turns ask for the rest alone
    run.assert_closed()


async def test_guessing_by_halves_wins_within_four_turns(
    run: Run, engine: FakeEngine, tmp_path: Path, make_config: ConfigFactory
) -> None:
    folder = tiny_folder(tmp_path)
    codec = make_worker(make_config(), run.broker, folder)._codec

    def answer(prompt: list[int], _rng: object) -> list[int]:
        low, high = 0, 9
        words = codec.decode(prompt)[1:]
        for guess, said in zip(words[::2], words[1::2], strict=False):
            low, high = (int(guess) + 1, high) if said == ">" else (low, int(guess) - 1)
        return [*codec.encode(str((low + high) // 2)), 2]

    engine.answer = answer
    for group in await groups_of("guess-number", run, folder, make_config):
        assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    run.assert_closed()


@dataclass
class HalfBroken:
    """Every second environment fails at its first step."""

    inner: Any
    made: int = 0
    name: str = "calculator"
    turns: int = 1

    def prompt(self, index: int) -> Any:
        return self.inner.prompt(index)

    def reward(self, prompt: Any, response: Any) -> float:
        return 0.0

    def environment(self, prompt: Any) -> Any:
        self.made += 1
        broken = self.made % 2 == 0

        def step(text: str) -> Step:
            if broken:
                raise RuntimeError("no answer")
            return Step(reward=1.0, done=True)

        return SimpleNamespace(reset=lambda: "", step=step)


async def test_a_group_that_fails_reports_the_tokens_of_all_its_episodes(
    run: Run, engine: FakeEngine, tmp_path: Path, make_config: ConfigFactory
) -> None:
    settings = {"rollout.min_samples": 2, "rollout.max_new_tokens": 16, "rollout.concurrent_groups": 1}
    config = make_config(**{"task": {"name": "calculator"}, **settings})
    engine.answer = lambda _prompt, _rng: [5, 2]
    worker = make_worker(config, run.broker, tiny_folder(tmp_path), task=HalfBroken(make_task("calculator", 0)))
    async with working(worker):
        await until(lambda: run.broker.snapshot().groups.failed >= 2)
    seen = run.broker.snapshot()
    assert seen.tokens.failed == 4 * seen.counters["groups_failed"]  # two episodes of two tokens each
    run.assert_closed()


@pytest.mark.parametrize("interrupted", ["restart", "drop"])
async def test_an_interrupted_episode_is_played_again_from_its_start_or_left_out(
    run: Run, engine: FakeEngine, tmp_path: Path, make_config: ConfigFactory, interrupted: str
) -> None:
    folder = tiny_folder(tmp_path)
    settings = {"rollout.interrupted": interrupted, "rollout.max_new_tokens": 16, "rollout.concurrent_groups": 1}
    config = make_config(**{"task": {"name": "calculator"}, **settings})
    worker = make_worker(config, run.broker, folder, task=make_task("calculator", 0))
    ask, less = worker._codec.encode("=")[0], worker._codec.encode("<")[0]
    later = 0

    def answer(prompt: list[int], _rng: object) -> list[int]:
        nonlocal later
        if prompt[-1] == less:
            return [ask, 2]
        later += 1
        if later <= 2:  # both episodes are in their second turn: an update comes
            engine.abort(None)
        return [5, 2]

    engine.answer, engine.token_seconds = answer, 0.01
    async with working(worker):
        await until(lambda: worker.counters.totals().get("episodes_interrupted", 0) >= 2)
        await until(lambda: ready(run.broker) >= 1, 30.0)
    counted = worker.counters.totals()
    first_turns = [body for body in engine.calls("/generate") if len(body["input_ids"]) == 3]
    assert ("episode_failures" in counted) is (interrupted == "drop")
    assert len(first_turns) >= 4
    assert counted["discarded_tokens"] >= 4
    for group in ready_groups(run, 2) if ready(run.broker) >= 2 else ():
        assert all(len(t.versions) == 1 for t in group.trajectories)
    run.assert_closed()


async def test_an_episode_spans_at_most_so_many_versions(
    run: Run, engine: FakeEngine, tmp_path: Path, make_config: ConfigFactory
) -> None:
    folder = tiny_folder(tmp_path)
    url = run.broker.engines()[0].url
    run.publish()
    run.train()  # there is a version 1 now, and the engine has version 0 still
    run.broker.remove_engine("engine-1")
    serving(run.broker, url, 0)
    settings = {"rollout.max_versions": 1, "rollout.max_new_tokens": 16, "rollout.concurrent_groups": 1}
    config = make_config(**{"task": {"name": "calculator"}, **settings})
    worker = make_worker(config, run.broker, folder, task=make_task("calculator", 0))
    ask, less = worker._codec.encode("=")[0], worker._codec.encode("<")[0]

    def answer(prompt: list[int], _rng: object) -> list[int]:
        if prompt[-1] == less:
            return [ask, 2]
        if engine.version == "0":  # an update comes before the first second turn
            engine.version = "1"
            serving(run.broker, url, 1)
        return [5, 2]

    engine.answer = answer
    async with working(worker):
        await until(lambda: ready(run.broker) >= 2, 30.0)
    assert worker.counters.totals()["episodes_interrupted"] >= 1
    for group in ready_groups(run, 2):
        assert all(len(t.versions) == 1 for t in group.trajectories)
    run.assert_closed()
