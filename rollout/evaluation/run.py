"""Evaluates one version on one task.

Invariant: every answer that counts was sampled by the version asked for, from its first token to its last; an answer of
any other version is thrown away, counted, and asked for again. A result with answers missing says how many.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.load import ConfigError
from configs.scores import average_name, pass_counts, pass_name
from rollout.agents import AgentTask
from rollout.client import EngineError, InvalidAnswer, Sample
from rollout.codec import Codec
from rollout.evaluation.engine import EngineFailed
from rollout.evaluation.estimates import Estimate, average_at_k, pass_rate_at_k
from rollout.rewards import Judge, RewardFailed
from rollout.tasks import Prompt, Response, Task
from rollout.tasks.prepare import encode_prompt, try_prompt

Generate = Callable[[Sequence[int], int], Awaitable[list[Sample | InvalidAnswer]]]


class Superseded(Exception):
    """The version is no longer served: its evaluation cannot be completed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked. version: of the weights that count. prompts: indexes 0 .. prompts - 1 of the task."""

    version: int
    prompts: int
    samples: int
    concurrency: int = 16
    tries: int = 4


@dataclass(slots=True)
class Answers:
    """What came of the prompts. discarded: answers of other versions; missing: samples without reward or answer."""

    rewards: dict[int, list[float]] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    counted: int = 0
    truncated: int = 0
    discarded: int = 0
    missing: int = 0
    last_error: str = ""
    seconds: float = 0.0


def check_task(task: Task, codec: Codec) -> None:
    """Raises ConfigError if the task cannot be evaluated on this model: said before an engine is started."""
    if isinstance(task, AgentTask):
        raise ConfigError(f"task {task.name!r}: an agent cannot be evaluated, only trained (docs/agents.md).")
    try_prompt(task, codec)


async def evaluate(task: Task, judge: Judge, codec: Codec, generate: Generate, plan: Plan) -> Answers:
    """Answers of all prompts; fewer prompts if the task ends before. generate: (prompt ids, n) -> n answers.

    Raises Superseded and EngineFailed if `generate` does.
    """
    out, places, began = Answers(), asyncio.Semaphore(plan.concurrency), time.monotonic()

    async def one(index: int) -> None:
        async with places:
            try:
                prompt = task.prompt(index)
                prompt_ids = encode_prompt(prompt, codec)
            except IndexError:
                return
            except Exception as error:  # a task's code may fail in any way; it costs this prompt alone
                out.last_error = f"prompt {index}: {type(error).__name__}: {error}"
                out.missing += plan.samples
                return
            samples = await _samples(generate, prompt_ids, plan, out)
            rewards = await asyncio.gather(*(_reward(judge, codec, prompt, sample, out) for sample in samples))
            out.rewards[index] = [reward for reward in rewards if reward is not None]
            out.sources[index] = prompt.source
            out.missing += plan.samples - len(out.rewards[index])

    try:
        async with asyncio.TaskGroup() as group:
            for index in range(plan.prompts):
                group.create_task(one(index))
    except* (Superseded, EngineFailed) as errors:
        raise errors.exceptions[0] from None
    out.seconds = time.monotonic() - began
    return out


def result(task: str, plan: Plan, answers: Answers, **tags: Any) -> dict[str, Any]:
    """One record: scores with intervals, by source if there are several, and what they rest on. tags: step, lag, ...

    Raises ValueError if no answer counts.
    """
    order = sorted(answers.rewards)
    rewards = [answers.rewards[i] for i in order]
    record: dict[str, Any] = {"task": task, "version": plan.version, **tags}
    record |= _scores(rewards, plan.samples)
    by_source: dict[str, list[Sequence[float]]] = defaultdict(list)
    for i in order:
        by_source[answers.sources[i]].append(answers.rewards[i])
    if len(by_source) > 1:
        record["sources"] = {name: _scores(of, plan.samples) for name, of in sorted(by_source.items())}
    return record | {
        "prompts": len(order),
        "samples": plan.samples,
        "missing": answers.missing,
        "discarded_other_version": answers.discarded,
        "mean_tokens": answers.tokens / max(answers.counted, 1),
        "truncated": answers.truncated / max(answers.counted, 1),
        "seconds": round(answers.seconds, 3),
        "last_error": answers.last_error,
    }


def scores_of(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The scores of a record by name: value, low, high."""
    return {k: v for k, v in record.items() if isinstance(v, dict) and {"value", "low", "high"} <= v.keys()}


def in_words(record: Mapping[str, Any]) -> str:
    """A result in a line: "aime24 avg@8 0.250 (0.180 to 0.340), version 7"."""
    said = [f"{k} {v['value']:.3f} ({v['low']:.3f} to {v['high']:.3f})" for k, v in scores_of(record).items()]
    return f"{record['label']} {', '.join(said[:1])}, version {record['version']}"


def _scores(rewards: Sequence[Sequence[float]], samples: int) -> dict[str, Any]:
    scores: dict[str, Estimate] = {average_name(samples): average_at_k(rewards)}
    for k in pass_counts(samples):
        if any(len(of) >= k for of in rewards):
            scores[pass_name(k)] = pass_rate_at_k(rewards, k)
    return {name: asdict(score) for name, score in scores.items()}


async def _samples(generate: Generate, prompt_ids: Sequence[int], plan: Plan, out: Answers) -> list[Sample]:
    kept: list[Sample] = []
    for attempt in range(plan.tries):
        if attempt:
            await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
        try:
            answers = await generate(prompt_ids, plan.samples - len(kept))
        except EngineError as error:
            out.last_error = f"{type(error).__name__}: {error}"
            if not error.retriable:
                break
            continue
        for answer in answers:
            if isinstance(answer, InvalidAnswer) or answer.finish == "abort":
                out.last_error = str(answer) if isinstance(answer, InvalidAnswer) else "aborted"
            elif any(run.version != plan.version for run in answer.versions):
                out.discarded += 1
            else:
                kept.append(answer)
        if len(kept) >= plan.samples:
            break
    return kept


async def _reward(judge: Judge, codec: Codec, prompt: Prompt, sample: Sample, out: Answers) -> float | None:
    ids = sample.token_ids.tolist()
    try:
        reward = await judge.reward(prompt, Response(codec.decode(ids), tuple(ids), sample.finish))
    except RewardFailed as error:
        out.last_error = str(error)
        return None
    out.tokens += len(ids)
    out.counted += 1
    out.truncated += sample.finish == "length"
    return reward if math.isfinite(reward) else None
