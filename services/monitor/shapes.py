"""What answers share: their head, and policy lag as buckets and distributions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from broker.types import LagCount, Snapshot
from services.monitor.figures import Distribution, distribution


class Answer(BaseModel):
    """What every answer begins with. time_ms: Redis server time of the snapshot; version: the trainer's then."""

    run: str = Field(examples=["local-1129-2030"])
    time_ms: int = Field(examples=[1795984726000])
    version: int = Field(examples=[42])


class LagBucket(BaseModel):
    """Groups and trainable tokens at one lag, in versions."""

    lag: int
    groups: int
    tokens: int


class Lags(BaseModel):
    """Policy lag of some groups: by lag, and as distributions over groups and over tokens (null: there are none)."""

    by_lag: list[LagBucket]
    groups: Distribution | None
    tokens: Distribution | None


def base(s: Snapshot) -> dict[str, Any]:
    """The head of an answer."""
    return {"run": s.run, "time_ms": s.time_ms, "version": s.version}


def lags(by_lag: Mapping[int, LagCount]) -> Lags:
    """Lag -> what has it, as buckets by rising lag and distributions."""
    return Lags(
        by_lag=[
            LagBucket(lag=k, groups=c.groups, tokens=c.tokens)
            for k, c in sorted(by_lag.items())
            if c.groups or c.tokens
        ],
        groups=distribution({lag: count.groups for lag, count in by_lag.items()}),
        tokens=distribution({lag: count.tokens for lag, count in by_lag.items()}),
    )
