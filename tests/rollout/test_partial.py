"""What becomes of samples that an update, a drain or an abort interrupts, and of unusual lengths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broker.queue import Broker
from broker.types import VersionRun
from rollout.client import EngineClient, RequestRefused, Sample, Sampling
from rollout.counters import Counters
from rollout.engines import EnginePool
from rollout.sampling import Draw, Unanswerable, draw_group
from tests.broker.helpers import Run
from tests.fakes.engine import FakeEngine
from tests.fakes.model import is_fake_log_prob
from tests.rollout.helpers import CHECKPOINT, ENGINE, serving, until

PROMPT = (3, 4, 5)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version="0", token_seconds=0.01)


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with engine.serve() as address:
        yield address


@pytest.fixture
async def pool(broker: Broker, url: str) -> AsyncIterator[EnginePool]:
    Run(broker).start()
    broker.remove_engine("engine-1")
    serving(broker, url, 0)
    made = EnginePool(broker, lambda u: EngineClient(u, CHECKPOINT, api_key=None, timeout_s=30), 10.0)
    yield made
    await made.close()


def draw(tokens: int = 30, **options: Any) -> Draw:
    return Draw(PROMPT, Sampling(1.0, tokens), 4, 0, Counters(), **options)


async def interrupted(made: Draw, pool: EnginePool, engine: FakeEngine, broker: Broker, times: int) -> None:
    """Draw two samples, and `times` times abort both after two tokens and go on under the next version."""
    engine.most_tokens = 2  # of each request: neither ends before it was interrupted so often
    task = asyncio.create_task(draw_group(made, 2, pool, ENGINE, 20.0))
    for version in range(1, times + 1):
        await until(lambda: task.done() or engine.held(2))
        assert not task.done()
        engine.paused = "abort"
        engine.abort(None)
        await until(lambda: not engine.running)
        engine.version = str(version)
        serving(broker, engine_url(pool), version)
        engine.most_tokens = 2 if version < times else None
        engine.paused = None
    await task


def engine_url(pool: EnginePool) -> str:
    return pool._records[0].url


def check(made: Draw) -> None:
    """Every sample is complete: lengths agree, each log-prob is that of the version which its token names."""
    for sample in made.samples:
        n = len(sample.token_ids)
        assert len(sample.log_probs) == n
        assert sum(run.length for run in sample.versions) == n
        assert sample.routes is not None
        assert len(sample.routes) == len(PROMPT) + n - 1
        for run in sample.versions:
            for place in range(run.start, run.start + run.length):
                token = int(sample.token_ids[place])
                value = float(sample.log_probs[place])
                assert is_fake_log_prob(value, str(run.version), len(PROMPT) + place, token)


@pytest.mark.parametrize("times", [1, 4])
async def test_a_sample_goes_on_after_every_interruption_and_keeps_what_it_had(
    broker: Broker, pool: EnginePool, engine: FakeEngine, times: int
) -> None:
    made = draw()
    await interrupted(made, pool, engine, broker, times)
    check(made)
    assert [len(s.token_ids) for s in made.samples] == [30, 30]
    assert [len(s.versions) for s in made.samples] == [times + 1] * 2
    assert made.tokens_lost == 0


async def test_restart_draws_an_interrupted_sample_from_the_start_under_one_version(
    broker: Broker, pool: EnginePool, engine: FakeEngine
) -> None:
    made = draw(interrupted="restart")
    await interrupted(made, pool, engine, broker, 1)
    check(made)
    assert [[run.version for run in s.versions] for s in made.samples] == [[1], [1]]
    assert made.tokens_lost >= 2
    assert made.counters.totals()["samples_restarted"] == 2


async def test_drop_leaves_an_interrupted_sample_out(broker: Broker, pool: EnginePool, engine: FakeEngine) -> None:
    made = draw(interrupted="drop")
    await interrupted(made, pool, engine, broker, 1)
    assert made.samples == []
    assert made.counters.totals()["samples_given_up"] == 2
    assert made.counters.totals()["discarded_tokens"] == made.tokens_lost >= 2


async def test_what_a_sample_had_is_counted_as_lost_when_aborts_without_progress_use_up_its_tries(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def aborted(tokens: int) -> Sample:
        versions = (VersionRun(0, tokens, 0),) if tokens else ()
        ids, log_probs = np.full(tokens, 7, np.int32), np.zeros(tokens, np.float32)
        return Sample(ids, log_probs, versions, None, 0, "abort")

    answers = iter([aborted(3), *[aborted(0)] * 4])

    async def generate(*_: object, **__: object) -> list[Sample]:
        return [next(answers)]

    client = SimpleNamespace(checkpoint=CHECKPOINT, generate=generate)
    monkeypatch.setattr(pool, "client", lambda record: client)
    made = draw()
    await draw_group(made, 1, pool, ENGINE, 20.0)
    assert made.samples == []
    assert "aborted before its first token" in made.last_error
    counted = made.counters.totals()
    assert (counted["discarded_tokens"], made.tokens_lost, made.tokens) == (3, 3, 3)
    assert (counted["generation_retries"], counted["samples_given_up"]) == (3, 1)


async def test_no_sample_spans_more_versions_than_allowed(broker: Broker, pool: EnginePool, engine: FakeEngine) -> None:
    made = draw(max_versions=2)
    await interrupted(made, pool, engine, broker, 4)
    check(made)
    assert len(made.samples) == 2
    assert max(len(s.versions) for s in made.samples) <= 2
    assert made.counters.totals()["samples_restarted"] >= 1
    assert made.tokens_lost > 0


async def test_one_new_token_is_a_whole_response(pool: EnginePool) -> None:
    made = draw(1)
    await draw_group(made, 2, pool, ENGINE, 20.0)
    check(made)
    assert [(len(s.token_ids), s.finish) for s in made.samples] == [(1, "length")] * 2


async def test_a_stop_token_ends_a_response_and_is_part_of_it(pool: EnginePool, engine: FakeEngine) -> None:
    engine.answer = lambda _prompt, _random: [7, 8, 2, 9]
    made = draw(8)
    made.sampling = replace(made.sampling, stop_ids=(2,))
    await draw_group(made, 2, pool, ENGINE, 20.0)
    check(made)
    assert [(s.token_ids.tolist(), s.finish) for s in made.samples] == [([7, 8, 2], "stop")] * 2


async def test_a_response_that_is_a_stop_token_alone_counts_and_one_without_tokens_does_not(
    pool: EnginePool, engine: FakeEngine
) -> None:
    engine.answer = lambda _prompt, _random: [2]
    made = draw(8)
    await draw_group(made, 1, pool, ENGINE, 20.0)
    check(made)
    assert [s.token_ids.tolist() for s in made.samples] == [[2]]
    engine.answer = lambda _prompt, _random: []
    empty = draw(8)
    await draw_group(empty, 1, pool, ENGINE, 20.0)
    assert empty.samples == []
    assert "without tokens" in empty.last_error


async def test_a_prompt_that_fills_the_context_up_to_the_last_token_is_drawn_and_one_more_is_refused(
    pool: EnginePool, engine: FakeEngine
) -> None:
    engine.token_seconds = 0.0
    made = draw(4)
    made.prompt_ids = (5,) * (CHECKPOINT.context - 4)
    await draw_group(made, 2, pool, ENGINE, 20.0)
    assert [len(s.token_ids) for s in made.samples] == [4, 4]
    assert all(s.routes is not None and len(s.routes) == CHECKPOINT.context - 1 for s in made.samples)
    made = draw(4)
    made.prompt_ids = (5,) * (CHECKPOINT.context - 3)
    with pytest.raises(Unanswerable, match="exceed the context"):
        await draw_group(made, 2, pool, ENGINE, 20.0)
    with pytest.raises(RequestRefused):
        await pool.client(pool._records[0]).generate(made.prompt_ids, 1, made.sampling)


async def test_a_long_response_is_complete(pool: EnginePool, engine: FakeEngine) -> None:
    engine.token_seconds = 0.0
    engine.answer = lambda _prompt, rng: [rng.randrange(3, 13) for _ in range(500)]
    made = draw(CHECKPOINT.context - len(PROMPT))
    await draw_group(made, 2, pool, ENGINE, 20.0)
    check(made)
    assert all(s.log_probs.dtype == np.float32 for s in made.samples)
    assert min(len(s.token_ids) for s in made.samples) == 500
