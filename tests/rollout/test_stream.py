"""A dead engine costs what had not arrived of its samples; the rest goes on elsewhere, as it was sampled."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.queue import Broker
from broker.types import VersionRun
from rollout import engines
from rollout.client import (
    EngineClient,
    EngineDropped,
    EngineError,
    EngineTimeout,
    InvalidAnswer,
    Sample,
    Sampling,
    UnconfirmedVersion,
    parse_sample,
)
from rollout.counters import Counters
from rollout.engines import EnginePool
from rollout.sampling import Draw, draw_group
from rollout.stream import Arrivals, BadMessage, ErrorMessage
from tests.broker.helpers import Run
from tests.fakes.engine import FakeEngine
from tests.fakes.model import fake_log_prob, fake_routes, is_fake_log_prob
from tests.rollout.helpers import CHECKPOINT, serving

DENSE = CHECKPOINT.without_routes()
PROMPT = (3, 4, 5)
TOKENS = 40
SAMPLING = Sampling(1.0, TOKENS, ignore_end=True)


def token_at(position: int) -> int:
    """The fakes sample this there, so that a token which is lost, doubled or in a wrong place shows."""
    return 3 + position * position % 11


def answer(prompt: list[int], _random: object) -> list[int]:
    return [token_at(len(prompt) + i) for i in range(TOKENS)]


@dataclass
class Two:
    """Two engines of one version, and the registry that knows them."""

    engines: list[FakeEngine]
    urls: list[str]
    broker: Broker
    first_stall_s: float | None = None  # for streams of the first engine alone; None: as for the other

    def client(self, url: str, checkpoint: Any) -> EngineClient:
        client = EngineClient(url, checkpoint, api_key=None, timeout_s=20)
        if url == self.urls[0] and self.first_stall_s is not None:
            stream, stall_s = client.stream, self.first_stall_s

            async def impatient(*arguments: Any, **named: Any) -> Any:
                return await stream(*arguments, **{**named, "stall_s": stall_s})

            client.stream = impatient  # type: ignore[method-assign]
        return client

    async def draw(self, *, checkpoint: Any = DENSE, samples: int = 2, **options: Any) -> Draw:
        made = Draw(PROMPT, SAMPLING, 3, 0, Counters(), **{"part_tokens": 8, "stall_s": 20.0, **options})
        pool = EnginePool(self.broker, lambda u: self.client(u, checkpoint), 10.0)
        pool._asked = float("inf")  # no load is asked for: on a machine that is overloaded the answer may be late
        try:
            await draw_group(made, samples, pool, "engine-0", 20.0)
        finally:
            await pool.close()
        return made


@pytest.fixture
def two(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(engines, "SUSPECT_S", 60.0)
    Run(broker).start()
    broker.remove_engine("engine-1")
    with ExitStack() as stack:
        fakes = [FakeEngine(version="0", answer=answer, token_seconds=0.001) for _ in range(2)]
        urls = [stack.enter_context(fake.serve()) for fake in fakes]
        for i, url in enumerate(urls):
            serving(broker, url, 0, f"engine-{i}")
        yield Two(fakes, urls, broker)


def check(samples: list[Sample], versions: dict[int, str] | None = None) -> None:
    """Every token is the one that its place has, with the log-prob that its version gives it there."""
    for sample in samples:
        n = len(sample.token_ids)
        assert n == len(sample.log_probs) == sum(run.length for run in sample.versions)
        for run in sample.versions:
            for i in range(run.start, run.start + run.length):
                token, place = int(sample.token_ids[i]), len(PROMPT) + i
                assert token == token_at(place)
                assert is_fake_log_prob(float(sample.log_probs[i]), str(run.version), place, token)


# --- through sampling: what a group becomes


@pytest.mark.parametrize("kind", ["cut", "noise", "stall"])
@pytest.mark.parametrize("messages", [1, 4])
@pytest.mark.parametrize("incremental", [False, True])
async def test_what_arrived_before_the_stream_broke_goes_on_on_another_engine(
    two: Two, kind: str, messages: int, incremental: bool
) -> None:
    two.engines[0].incremental = two.engines[1].incremental = incremental
    two.engines[0].fail("/generate", kind, messages=2 * messages)  # of two samples
    two.first_stall_s = 1.0 if kind == "stall" else None
    began = time.monotonic()
    made = await two.draw()
    assert time.monotonic() - began < 15  # less than the second engine's limit
    check(made.samples)
    assert [len(s.token_ids) for s in made.samples] == [TOKENS] * 2
    assert made.tokens_lost == 0
    assert made.counters.totals()["streams_broken"] == 1
    assert "generation_retries" not in made.counters.totals()
    asked = [call["input_ids"] for call in two.engines[1].calls("/generate")]
    assert len(asked) == 2
    assert all(len(PROMPT) < len(ids) < len(PROMPT) + TOKENS for ids in asked)
    # The first token of each comes at once, then eight with each message.
    assert sum(len(ids) - len(PROMPT) for ids in asked) >= 2 + 8 * 2 * (messages - 1)


async def test_a_stream_that_breaks_before_its_first_message_is_a_failed_try(two: Two) -> None:
    two.engines[0].fail("/generate", "cut", messages=0)
    made = await two.draw()
    check(made.samples)
    assert made.counters.totals()["generation_retries"] == 2


async def test_a_stream_goes_on_under_a_newer_version_and_each_token_keeps_its_own(two: Two) -> None:
    two.engines[0].fail("/generate", "cut", messages=3)
    two.engines[1].version = "5"
    serving(two.broker, two.urls[1], 5, "engine-1")
    made = await two.draw(samples=1)
    check(made.samples)
    kept = made.samples[0].versions[0].length
    assert kept >= 17
    assert made.samples[0].versions == (VersionRun(0, kept, 0), VersionRun(kept, TOKENS - kept, 5))


async def test_short_answers_and_samples_that_may_not_go_on_are_not_streamed(two: Two) -> None:
    for options in ({"part_tokens": 0}, {"part_tokens": TOKENS}):
        made = await two.draw(**options)
        assert [len(s.token_ids) for s in made.samples] == [TOKENS] * 2
    assert not any("stream" in call for call in two.engines[0].calls("/generate"))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    deaths=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["cut", "noise", "status", "drop"]), st.integers(1, 9)), max_size=5
    ),
    incremental=st.booleans(),
    routed=st.booleans(),
)
def test_after_any_number_of_deaths_a_sample_is_what_the_engines_sampled(
    two: Two, monkeypatch: pytest.MonkeyPatch, deaths: list[tuple[int, str, int]], incremental: bool, routed: bool
) -> None:
    monkeypatch.setattr(engines, "SUSPECT_S", 0.02)  # both may be suspects
    for fake in two.engines:
        fake.faults.clear()
        fake.incremental = incremental
    for which, kind, messages in deaths:
        two.engines[which].fail("/generate", "cut" if routed and kind == "noise" else kind, messages=messages)
    made = asyncio.run(two.draw(checkpoint=CHECKPOINT if routed else DENSE))
    check(made.samples)
    for sample in made.samples:
        assert len(sample.token_ids) == TOKENS
        if routed:
            assert sample.routes is not None
            np.testing.assert_array_equal(sample.routes, fake_routes("0", len(PROMPT) + TOKENS - 1, 2, 2, 8))
    assert made.tokens == made.tokens_lost + sum(len(s.token_ids) for s in made.samples)


# --- routes: parts are answers of their own


async def test_where_routes_are_needed_a_long_answer_is_asked_for_in_pieces_and_a_death_costs_one(two: Two) -> None:
    kept = two.engines[0].answer
    made = await two.draw(checkpoint=CHECKPOINT, samples=1)
    assert [c["sampling_params"]["max_new_tokens"] for c in two.engines[0].calls("/generate")] == [8] * 5
    assert not any("stream" in call for call in two.engines[0].calls("/generate"))
    two.engines[0].requests.clear()

    def die_in_the_third(prompt: list[int], random: Any) -> list[int]:
        if len(prompt) == len(PROMPT) + 16:
            two.engines[0].fail("/generate", "drop", times=2)
        return kept(prompt, random)

    two.engines[0].answer = die_in_the_third
    made = await two.draw(checkpoint=CHECKPOINT, samples=1)
    check(made.samples)
    sample = made.samples[0]
    assert (len(sample.token_ids), sample.finish) == (TOKENS, "length")
    np.testing.assert_array_equal(sample.routes, fake_routes("0", len(PROMPT) + TOKENS - 1, 2, 2, 8))


async def test_an_update_between_two_pieces_gives_each_its_own_version_and_routes(two: Two) -> None:
    def update(prompt: list[int], random: Any) -> list[int]:
        version = len(prompt) // 16
        two.engines[0].version = str(version)
        serving(two.broker, two.urls[0], version, "engine-0")
        return answer(prompt, random)

    two.engines[0].answer = update
    made = await two.draw(checkpoint=CHECKPOINT, samples=1)
    check(made.samples)
    sample = made.samples[0]
    assert sample.versions == (VersionRun(0, 16, 0), VersionRun(16, 16, 1), VersionRun(32, 8, 2))
    assert sample.routes is not None
    for run in sample.versions:
        rows = slice(len(PROMPT) + run.start - 1, len(PROMPT) + run.start + run.length - 1)
        expected = fake_routes(str(run.version), len(PROMPT) + TOKENS - 1, 2, 2, 8)
        np.testing.assert_array_equal(sample.routes[rows], expected[rows])


async def test_a_response_that_ends_within_a_piece_is_complete(two: Two) -> None:
    two.engines[0].answer = lambda prompt, _random: [7, 8, 2] if len(prompt) > 3 else [9] * 8
    made = Draw(PROMPT, replace(SAMPLING, ignore_end=False), 3, 0, Counters(), part_tokens=8)
    pool = EnginePool(two.broker, lambda u: EngineClient(u, CHECKPOINT, api_key=None, timeout_s=20), 10.0)
    await draw_group(made, 1, pool, "engine-0", 20.0)
    await pool.close()
    assert made.samples[0].token_ids.tolist() == [9] * 8 + [7, 8, 2]
    assert made.samples[0].finish == "stop"


# --- the client alone


async def stream(
    url: str, n: int = 1, *, checkpoint: Any = DENSE, stall_s: float = 20.0
) -> tuple[list[Sample | EngineError], EngineError | None]:
    async with EngineClient(url, checkpoint, api_key=None, timeout_s=20) as client:
        samples, broke = await client.stream(PROMPT, n, SAMPLING, every=8, stall_s=stall_s)
        return list(samples), broke


async def test_a_stream_that_ends_well_is_what_a_whole_answer_would_have_been(two: Two) -> None:
    for incremental in (False, True):
        two.engines[0].incremental = incremental
        samples, broke = await stream(two.urls[0], 3, checkpoint=CHECKPOINT)
        assert broke is None
        usable = [s for s in samples if isinstance(s, Sample)]
        check(usable)
        assert [(len(s.token_ids), s.finish) for s in usable] == [(TOKENS, "length")] * 3
        for sample in usable:
            np.testing.assert_array_equal(sample.routes, fake_routes("0", len(PROMPT) + TOKENS - 1, 2, 2, 8))


async def test_nothing_is_kept_of_a_broken_stream_whose_routes_are_needed(two: Two) -> None:
    two.engines[0].fail("/generate", "cut", messages=3)
    (answer,), broke = await stream(two.urls[0], checkpoint=CHECKPOINT)
    assert isinstance(broke, EngineDropped)
    assert isinstance(answer, InvalidAnswer)


async def test_a_silent_stream_is_given_up_within_its_limit_and_the_engine_is_told(two: Two) -> None:
    two.engines[0].fail("/generate", "stall", messages=2)
    began = time.monotonic()
    (answer,), broke = await stream(two.urls[0], stall_s=1.0)
    assert time.monotonic() - began < 10
    assert isinstance(broke, EngineTimeout)
    assert isinstance(answer, Sample)
    assert len(answer.token_ids) >= 9
    assert answer.finish == "abort"
    end = time.monotonic() + 10
    while two.engines[0].running:
        assert time.monotonic() < end, "the engine still samples for a client that is gone"
        await asyncio.sleep(0.01)


async def test_a_wait_before_the_first_message_is_no_silence(two: Two) -> None:
    two.engines[0].paused = "abort"
    two.engines[0].answer = lambda _prompt, _random: [7]  # the first message is the last: none can be late
    waiting = asyncio.create_task(stream(two.urls[0], stall_s=0.05))
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        assert not waiting.done()
        await asyncio.sleep(0.01)
    two.engines[0].paused = None
    samples, broke = await waiting
    assert broke is None, samples


# --- messages alone


def message(ids: list[int], total: int, *, finish: str | None = None, version: str = "4", **more: Any) -> str:
    start = total - len(ids)
    entries = [[fake_log_prob(version, len(PROMPT) + start + i, t), t, None] for i, t in enumerate(ids)]
    meta = {
        "completion_tokens": total,
        "weight_version": version,
        "output_token_logprobs": entries,
        "finish_reason": finish and {"type": finish},
    }
    return "data: " + json.dumps({"output_ids": ids, "meta_info": meta, **more})


def change(line: str, change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(line.removeprefix("data: "))
    change(data)
    return "data: " + json.dumps(data)


@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6), cumulative=st.booleans(), ended=st.booleans())
def test_messages_add_up_in_either_form(cuts: list[int], cumulative: bool, ended: bool) -> None:
    ids, arrivals, at = list(range(3, 3 + sum(cuts))), Arrivals(1), 0
    for i, size in enumerate(cuts):
        last = ended and i == len(cuts) - 1
        given_ids = ids[: at + size] if cumulative else ids[at : at + size]
        arrivals.add(message(given_ids, at + size, finish="length" if last else None))
        arrivals.add("")
        at += size
    made = arrivals.samples[0].answer()
    assert made is not None
    assert made["output_ids"] == ids == [entry[1] for entry in made["meta_info"]["output_token_logprobs"]]
    assert arrivals.complete == ended
    assert made["meta_info"]["finish_reason"]["type"] == ("length" if ended else "abort")


def test_what_a_message_says_beyond_its_count_waits_for_the_next() -> None:
    """In the cumulative form SGLang hands out its own growing lists, which may be ahead of the count beside them."""
    arrivals = Arrivals(1)
    arrivals.add(message([3, 4], 2))
    ahead = json.loads(message([3, 4, 5, 6, 7], 5).removeprefix("data: "))
    ahead["meta_info"]["completion_tokens"] = 4
    arrivals.add("data: " + json.dumps(ahead))
    made = arrivals.samples[0].answer()
    assert made is not None
    assert made["output_ids"] == [3, 4, 5, 6] == [entry[1] for entry in made["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize(
    "line",
    [
        "data: <html>",
        "data: []",
        "data: null",
        'data: {"output_ids": [1]}',
        "data: " + "[" * 5,
        message([5, 6], 2, index=7),
        message([6], 3),
        message([9, 9, 9], 3),
        change(message([6], 2), lambda m: m["meta_info"].pop("output_token_logprobs")),
        change(message([6], 2), lambda m: m["meta_info"]["output_token_logprobs"].clear()),
        change(message([6], 2), lambda m: m.update(output_ids=None)),
        'data: {"error": {"message": "no code"}}',
    ],
)
def test_a_line_that_is_no_message_or_does_not_go_on_ends_the_stream(line: str) -> None:
    arrivals = Arrivals(2)
    arrivals.add(message([5], 1, index=0))
    arrivals.add(message([5], 1, index=1))
    with pytest.raises(BadMessage):
        arrivals.add(line)
    assert arrivals.samples[1].answer() is not None, "what the other sample has is sound"


def test_an_error_in_place_of_a_message_says_its_code() -> None:
    with pytest.raises(ErrorMessage) as caught:
        Arrivals(1).add('data: {"error": {"message": "too long", "type": "x", "code": 400}}')
    assert (caught.value.code, str(caught.value)) == (400, "too long")


@pytest.mark.parametrize("versions", [("unverified-4", "unverified-4"), ("unverified-4", "4"), ("4", "5")])
def test_tokens_under_no_version_or_of_weights_whose_name_changed_are_not_kept(versions: tuple[str, str]) -> None:
    arrivals = Arrivals(1)
    for i, version in enumerate(versions):
        arrivals.add(message([5 + i], 1 + i, version=version))
    with pytest.raises(UnconfirmedVersion):
        parse_sample(arrivals.samples[0].answer(), DENSE, len(PROMPT), 0)


def test_comments_and_the_end_are_no_messages() -> None:
    arrivals = Arrivals(1)
    for line in ("", ": ping", "event: message", "data: [DONE]", "data:[DONE]"):
        arrivals.add(line)
    assert arrivals.samples[0].answer() is None
