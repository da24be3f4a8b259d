"""Trajectories for people to read, as the workers wrote them down in the run's folder (rollout/samples.py).

Invariant: bounded: at most SHOWN groups, none of a version that the snapshot does not know yet; a folder that this host
does not see gives none, which is no error, and a record that does not read as one is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from broker.types import Snapshot
from rollout.samples import read_samples
from services.monitor.figures import unrewarded
from services.monitor.shapes import Answer, base

SHOWN = 24


class Piece(BaseModel):
    """Text of one version; null: of an environment or agent."""

    version: int | None
    text: str


class SampleAnswer(BaseModel):
    """One trajectory."""

    reward: float
    finish: str
    tokens: int
    pieces: list[Piece]


class GroupAnswer(BaseModel):
    """Some samples of a group, which may wait, have been trained or dropped. trace: its id, "" if it has none."""

    group_id: str = Field(description="As text: it may be larger than JSON numbers are exact.")
    prompt_index: int
    task: str
    trace: str = Field(examples=["4bf92f3577b34da6a3ce929d0e0e4736"])
    version: int = Field(description="The oldest that sampled of it.")
    lag: int = Field(description="The trainer's version now less its own: not the lag at which it was trained.")
    prompt: str
    rewards: list[float]
    missing: int = Field(description="Samples that were left out of the group: without an answer or a reward.")
    samples: list[SampleAnswer]


class UnrewardedAnswer(BaseModel):
    """Of the samples that the workers judged since each began: those without a reward, which are in no group below."""

    judged: int
    failed: int = Field(description="It, or the episode, raised or was late.")
    newest: str = Field(examples=["ValueError: no answer in it"], description='The newest failure; "": there was none.')


class SamplesAnswer(Answer):
    """The newest versions first."""

    unrewarded: UnrewardedAnswer
    groups: list[GroupAnswer]


def samples(s: Snapshot, folder: Path | None, limit: int) -> SamplesAnswer:
    """GET /v1/samples. folder: of the run; None: there is none."""
    newest = read_samples(folder, 4 * SHOWN) if folder is not None else ()
    read = (_group(s, record) for record in reversed(newest))
    known = [group for group in read if group is not None and group.lag >= 0]
    told = unrewarded(s.workers)
    failures = UnrewardedAnswer(judged=told.samples, failed=told.failed, newest=told.newest)
    return SamplesAnswer(**base(s), unrewarded=failures, groups=known[:limit])


def _group(s: Snapshot, record: Mapping[str, Any]) -> GroupAnswer | None:
    try:
        version = int(record.get("version") or 0)
        return GroupAnswer(
            group_id=str(record.get("group", "")),
            prompt_index=int(record.get("prompt_index") or 0),
            task=str(record.get("task", "")),
            trace=str(record.get("trace") or ""),
            version=version,
            lag=s.version - version,
            prompt=str(record.get("prompt", "")),
            rewards=record.get("rewards", []),
            missing=int(record.get("missing") or 0),
            samples=[_sample(one) for one in record["samples"]],
        )
    except (KeyError, TypeError, AttributeError, ValueError):  # pydantic's error is a ValueError
        return None


def _sample(one: Mapping[str, Any]) -> SampleAnswer:
    pieces = [Piece(version=version, text=text) for version, text in one.get("pieces", [])]
    tokens, finish = int(one.get("tokens") or 0), str(one.get("finish", ""))
    return SampleAnswer(reward=float(one.get("reward") or 0.0), finish=finish, tokens=tokens, pieces=pieces)
