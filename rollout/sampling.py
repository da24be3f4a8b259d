"""Draws the samples of one group, through failures, aborts and changes of weights.

Invariant: every sample that comes out is complete and each of its tokens is of a version that is an integer, no older
than the engine's at admission; whatever was thrown away is counted. The fresh samples of a group are one request with n
(4 to 6 times faster than n requests on a CPU); each sample has its own tries. An aborted sample goes on where it was,
and so does one whose engine died, from what had arrived of it (docs/fleet.md).
An engine that cannot be reached costs no try: it is restarted, or another takes over, within the caller's patience.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from broker.errors import BrokerError
from broker.traces import NO_SPAN, Span
from broker.types import EngineRecord
from rollout.client import (
    EngineClient,
    EngineError,
    EngineUnreachable,
    InvalidAnswer,
    KeyRefused,
    RequestRefused,
    Sample,
    Sampling,
)
from rollout.continuation import Continuation, as_piece, is_complete, join, next_request
from rollout.counters import Counters
from rollout.engines import EnginePool

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
PROBLEM = 300  # characters of what a reward or an episode raised that are told on
MESSAGE_TOKENS = 64  # of a stream: so many tokens of a sample are lost at most, and a message costs little beside them


def told_on(problem: object) -> str:
    """What a reward or an episode raised, as it is told on: PROBLEM characters that can be written as UTF-8."""
    return str(problem)[:PROBLEM].encode(errors="replace").decode()


class NoEngine(Exception):
    """For too long there was no engine that may serve this group."""


class Unanswerable(Exception):
    """No engine can take this request: another try would fail in the same way."""


@dataclass(slots=True)
class Slot:
    """One sample in the making. partial: what aborted requests left; failures: tries that gave nothing."""

    partial: Sample | None = None
    failures: int = 0
    done: Sample | None = None
    span: Span = NO_SPAN


@dataclass(slots=True)
class Draw:
    """A group in the making. at_least: oldest version that counts. tokens_lost: sampled and thrown away.

    interrupted, max_versions: as rollout.interrupted and rollout.max_versions of the configuration say. interruptions:
    samples that an update cut short and that may not go on. span: of the group, in its trace.
    part_tokens, stall_s: rollout.part_tokens, 0 if a sample may not go on elsewhere, and rollout.stall_timeout_s.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    tries: int
    at_least: int
    counters: Counters
    interrupted: Literal["continue", "restart", "drop"] = "continue"
    max_versions: int = 16
    slots: list[Slot] = field(default_factory=list)
    tokens_lost: int = 0
    last_error: str = ""
    interruptions: int = 0
    engine_id: str = ""  # where its last request went: that engine has its prefix
    routes_start: int = 0  # first position whose routes are wanted: a turn of an episode has those before it
    span: Span = NO_SPAN
    part_tokens: int = 0
    stall_s: float = 60.0

    @property
    def open(self) -> list[Slot]:
        """Slots that are neither complete nor given up."""
        return [slot for slot in self.slots if slot.done is None and slot.failures < self.tries]

    @property
    def samples(self) -> list[Sample]:
        """What is complete."""
        return [slot.done for slot in self.slots if slot.done is not None]

    @property
    def tokens(self) -> int:
        """Tokens sampled for this group so far, with those thrown away."""
        kept = [slot.done or slot.partial for slot in self.slots]
        return self.tokens_lost + sum(len(sample.token_ids) for sample in kept if sample is not None)

    @property
    def oldest_allowed(self) -> int:
        """Version that an engine must have at least to go on with every open sample."""
        begun = [slot.partial.versions[-1].version for slot in self.open if slot.partial and slot.partial.versions]
        return max([self.at_least, *begun])


async def draw_group(draw: Draw, samples: int, pool: EnginePool, engine_id: str, patience_s: float) -> None:
    """Fill `draw` with up to `samples` complete samples; fewer if some ran out of tries.

    engine_id: that has the prefix, or of the admission; see rollout.engines.choose. patience_s: longest wait for an
    engine, in seconds.
    Raises NoEngine and Unanswerable.
    """
    draw.engine_id = engine_id
    draw.slots = [Slot(span=draw.span.child("generate", sample=number)) for number in range(samples)]
    try:
        await _fill(draw, pool, patience_s)
    finally:
        for slot in draw.slots:  # those that are not complete
            slot.span.end(draw.last_error or "not waited for")


async def _fill(draw: Draw, pool: EnginePool, patience_s: float) -> None:
    pause = FIRST_PAUSE_S
    reached = time.monotonic()
    while draw.open:
        engine = await _wait_for_engine(draw, pool, reached + patience_s)
        draw.engine_id = engine.engine_id
        failures = sum(slot.failures for slot in draw.slots)
        if not await _round(draw, pool, engine):
            continue
        reached = time.monotonic()
        if sum(slot.failures for slot in draw.slots) == failures:
            pause = FIRST_PAUSE_S
            continue
        if draw.open:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)


async def _wait_for_engine(draw: Draw, pool: EnginePool, until: float) -> EngineRecord:
    while True:
        engine = None
        try:
            engine = await pool.pick(at_least=draw.oldest_allowed, prefer=draw.engine_id)
        except (BrokerError, TimeoutError) as error:  # without the registry no engine counts as confirmed
            draw.last_error = str(error)
        if engine is not None:
            return engine
        if time.monotonic() > until:
            reason = draw.last_error or "none is routable"
            raise NoEngine(f"no engine answers at version {draw.oldest_allowed} or newer: {reason}")
        began = time.monotonic()
        await pool.changed(0.1)
        draw.counters.add("engine_wait_seconds", time.monotonic() - began)


async def _round(draw: Draw, pool: EnginePool, engine: EngineRecord) -> bool:
    """One request for all fresh slots and one for each that goes on; False if the engine is out of reach."""
    client = pool.client(engine)
    for slot in draw.open:
        spans = slot.partial.versions if slot.partial else ()
        if len(spans) >= draw.max_versions and engine.version > spans[-1].version:
            _restart(draw, slot)
        slot.span.event("request", engine=engine.engine_id, version=engine.version, goes_on=slot.partial is not None)
    fresh = [slot for slot in draw.open if slot.partial is None]
    begun = [slot for slot in draw.open if slot.partial is not None]
    batches = ([fresh] if fresh else []) + [[slot] for slot in begun]
    pool.started(engine.engine_id, len(fresh) + len(begun))
    try:
        async with asyncio.TaskGroup() as group:
            requests = [group.create_task(_request(draw, client, batch)) for batch in batches]
    except* Unanswerable as errors:
        raise errors.exceptions[0] from None
    finally:
        pool.started(engine.engine_id, -len(fresh) - len(begun))
    outcomes = [request.result() for request in requests]
    if "answered" not in outcomes:
        pool.suspect(engine.engine_id)
    return outcomes.count("unreachable") < len(outcomes)


async def _request(
    draw: Draw, client: EngineClient, batch: Sequence[Slot]
) -> Literal["answered", "broke off", "unreachable"]:
    """Send one request, put its answers where they belong, and say what became of it."""
    # Routes come at the end of an answer: where they are needed, a part has to be an answer of its own.
    piece = draw.part_tokens if client.checkpoint.routed else 0
    ask = next_request(draw.prompt_ids, batch[0].partial, draw.sampling, draw.routes_start, piece or None)
    began = time.monotonic()
    broke: EngineError | None = None
    try:
        answers, broke = await _answers(draw, client, ask, len(batch))
    except RequestRefused as error:
        raise Unanswerable(str(error)) from error
    except (EngineUnreachable, KeyRefused) as error:
        draw.last_error = str(error)
        draw.counters.add("engine_unreachable")
        return "unreachable"
    except EngineError as error:
        for slot in batch:
            _failed(draw, slot, error)
        return "answered"
    finally:
        draw.counters.add("generation_seconds", time.monotonic() - began)
    if broke is not None:
        draw.last_error = f"{type(broke).__name__}: {broke}"
        draw.counters.add("streams_broken")
    for slot, answer in zip(batch, answers, strict=True):
        _settle(draw, slot, answer, ask)
    return "answered" if broke is None else "broke off"


async def _answers(
    draw: Draw, client: EngineClient, ask: Continuation, n: int
) -> tuple[Sequence[Sample | EngineError], EngineError | None]:
    """As EngineClient.stream; a short answer comes at once, which is cheaper."""
    if client.checkpoint.routed or not 0 < draw.part_tokens < ask.sampling.max_new_tokens:
        return await client.generate(ask.prompt_ids, n, ask.sampling, routes_start=ask.routes_start), None
    every = min(MESSAGE_TOKENS, draw.part_tokens)
    return await client.stream(ask.prompt_ids, n, ask.sampling, every=every, stall_s=draw.stall_s)


def _settle(draw: Draw, slot: Slot, answer: Sample | EngineError, ask: Continuation) -> None:
    """Put one answer where it belongs: complete, to be continued, or a failure."""
    if isinstance(answer, EngineError):
        _failed(draw, slot, answer)
        return
    answer = as_piece(answer, ask.sampling, len(slot.partial.token_ids) if slot.partial else 0, draw.sampling)
    draw.counters.add("generated_tokens", len(answer.token_ids))
    draw.counters.add("prompt_tokens", len(ask.prompt_ids))
    draw.counters.add("cached_prompt_tokens", answer.cached_tokens)
    try:
        if answer.versions and answer.versions[0].version < draw.at_least:
            raise InvalidAnswer(f"sampled by version {answer.versions[0].version}, admitted at {draw.at_least}")
        sample = join(slot.partial, answer, len(draw.prompt_ids))
    except InvalidAnswer as error:
        _lose(draw, len(answer.token_ids))
        _failed(draw, slot, error)
        return
    if len(sample.versions) > draw.max_versions:  # the engine was updated while the request was on its way
        slot.partial = sample
        _restart(draw, slot)
        return
    if is_complete(sample, draw.sampling):
        slot.done, slot.partial = sample, None
        slot.span.end(tokens=len(sample.token_ids), versions=len(sample.versions))
        return
    if answer.finish == "piece":
        slot.partial = sample
        return
    draw.counters.add("aborted_samples")
    slot.span.event("interrupted", tokens=len(sample.token_ids))
    if draw.interrupted != "continue":
        slot.failures = draw.tries if draw.interrupted == "drop" else slot.failures + 1
        draw.interruptions += 1
        draw.last_error = "interrupted by an update"
        slot.partial = sample
        _restart(draw, slot)
        return
    if len(sample.token_ids):
        slot.partial = sample
    if not len(answer.token_ids):  # an abort without progress is a try, or constant aborts would never end
        _failed(draw, slot, InvalidAnswer("aborted before its first token"))


def _restart(draw: Draw, slot: Slot) -> None:
    """Forget what a slot has so far; it is drawn from the start unless its tries are used up."""
    _lose(draw, len(slot.partial.token_ids) if slot.partial else 0)
    draw.counters.add("samples_given_up" if slot.failures >= draw.tries else "samples_restarted")
    slot.partial = None


def _failed(draw: Draw, slot: Slot, error: EngineError) -> None:
    slot.failures += 1
    draw.last_error = f"{type(error).__name__}: {error}"
    slot.span.event("failed", problem=draw.last_error)
    draw.counters.add("generation_retries" if slot.failures < draw.tries else "samples_given_up")
    if slot.failures >= draw.tries and slot.partial is not None:
        _lose(draw, len(slot.partial.token_ids))
        slot.partial = None


def _lose(draw: Draw, tokens: int) -> None:
    draw.tokens_lost += tokens
    draw.counters.add("discarded_tokens", tokens)
