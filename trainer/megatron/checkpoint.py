"""Checkpoints: what a restart begins from.

Invariant: a checkpoint that `latest` names was written completely: its files have the sizes and checksums of its
marker, which is written last. A torn or corrupt one is passed over for the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.megatron.policy import PolicyModel


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The part of a checkpoint that is not tensors.

    step: optimizer steps done. version: of the saved weights. consumed: group ids whose effect is in the weights and
    that are not yet committed. prompt_cursor: the trained frontier of the prompts. config_hash: of the configuration
    that trained. extra: anything else that JSON can hold.
    """

    step: int
    version: int
    consumed: tuple[int, ...]
    prompt_cursor: int
    config_hash: str
    extra: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(policy: PolicyModel, root: Path, state: TrainingState, *, keep: int) -> Path:
    """Write root/step-<step>: weights, optimizer, RNG and state; durable (fsync) on return; remove all but `keep`.

    Collective. Returns the folder. Raises OSError with nothing changed if it cannot be written.
    """
    raise NotImplementedError


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint of root, or None. Broken ones are logged and passed over. Not collective."""
    raise NotImplementedError


def load_checkpoint(policy: PolicyModel, folder: Path) -> TrainingState:
    """Restore weights, optimizer and RNG; collective. In the same layout training continues bit for bit."""
    raise NotImplementedError


def read_state(folder: Path) -> TrainingState:
    """The JSON part alone, without tensors and without megatron."""
    raise NotImplementedError
