"""When an engine that serves may be taken out to be updated. Pure.

Invariant: an engine that does not serve is never held back (it has nothing to lose), and one that is held back goes on
serving its confirmed version: the lag bound is kept by admission, which knows each engine's version and gives an engine
that lags too far no more groups. So every strategy comes to an end: an engine without groups is idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from broker.types import EngineState

Name = Literal["all-at-once", "rolling", "on-idle"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """all-at-once: every engine as soon as a version is there. rolling: at most `at_most` engines at the same time.
    on-idle: an engine when nothing runs on it."""

    name: Name = "all-at-once"
    at_most: int = 1


def may_leave(strategy: Strategy, out: int, *, idle: bool) -> bool:
    """Whether a serving engine may be updated now. out: others that are out; idle: whether nothing runs on it."""
    if strategy.name == "rolling":
        return out < strategy.at_most
    return strategy.name == "all-at-once" or idle


def is_out(state: EngineState, version: int) -> bool:
    """Whether an engine served until its present update began; one that joins or recovers is not counted."""
    return state in (EngineState.PAUSING, EngineState.UPDATING, EngineState.VERIFYING) and version >= 0
