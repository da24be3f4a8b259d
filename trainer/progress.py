"""Where a trainer is, and how it ends when it cannot go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.losses.sat import Gate
from trainer.ports import Ranks


class RunFailed(Exception):
    """The run cannot go on, and starting the trainer again would not help; the message is meant for the user."""


@dataclass(slots=True)
class Progress:
    """Where this trainer is. version: of the weights it holds. published, checkpointed: the newest version and step
    that were handed in to be written. consumed: groups trained since the last checkpoint that was handed in. began:
    when the run began, in seconds since the epoch as the system's clock was set at the last step."""

    epoch: int = -1
    step: int = 0
    version: int = -1
    published: int = -1
    checkpointed: int = 0
    consumed: list[int] = field(default_factory=list)
    gate: Gate | None = None
    began: float = 0.0


def share_numbers(ranks: Ranks, numbers: Sequence[int]) -> tuple[int, ...]:
    """The main rank's numbers on every rank. Collective."""
    payload = " ".join(map(str, numbers)).encode() if ranks.is_main else None
    return tuple(map(int, ranks.broadcast_bytes(payload).split()))
