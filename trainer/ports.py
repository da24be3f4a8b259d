"""What the training loop needs from the model and from the other ranks, as Protocols.

Invariant: `trainer/loop.py` knows the model, the process group and the sink of metrics only through these; the tests'
fakes and the Megatron model implement the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from broker.types import (
    Delivery,
    EngineRecord,
    Group,
    Outcome,
    PromptCursor,
    Refused,
    Snapshot,
    TrainerState,
    VersionRecord,
)
from trainer.batch import MicroBatch

LossFunction = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, log_probs float32 [T], entropy float32 [T]) -> (scalar loss, named tensors to report).

log_probs carry a gradient; the entropy carries one only if forward_backward was asked for it. The loss is this
micro-batch's additive share of the step's loss: already divided by the step's global denominator.
"""


class Scores(Protocol):
    """log_probs, entropy: float32 [T] of one micro-batch."""

    @property
    def log_probs(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor: ...


class Replay(Protocol):
    """What routing replay did in one forward_backward (trainer.megatron.policy.ReplayMetrics)."""

    @property
    def overlap(self) -> float | None: ...


class PolicyPort(Protocol):
    """The model as one rank sees it (trainer.megatron.policy.PolicyModel). All methods are collective."""

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> Sequence[Scores]: ...
    def reference_log_probs(self, micro_batches: Sequence[MicroBatch]) -> Sequence[Scores]: ...
    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, *, entropy_gradient: bool = False
    ) -> list[dict[str, Tensor]]: ...
    def replay_metrics(self) -> Replay: ...
    def gradients_finite(self) -> bool: ...
    def optimizer_step(self, learning_rate: float) -> tuple[float, bool]: ...
    def stage_export(self, folder: Path) -> Callable[[], object]:
        """Copy the weights now; what is returned writes them to `folder`: on any thread, in one order on all ranks."""
        ...


class Ranks(Protocol):
    """The ranks of one trainer (trainer.megatron.parallel.Parallel)."""

    @property
    def data_rank(self) -> int: ...
    @property
    def data_size(self) -> int: ...
    @property
    def is_main(self) -> bool: ...
    def sum_over_data(self, values: Tensor) -> Tensor: ...
    def broadcast_bytes(self, payload: bytes | None) -> bytes: ...
    def barrier(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedState:
    """The part of a checkpoint that is not tensors. version: of the saved weights. consumed: ids of groups whose effect
    is in the weights and whose commit is not yet recorded. extra: anything else that JSON can hold. epoch: of the
    trainer that saves it."""

    step: int
    version: int
    consumed: tuple[int, ...]
    cursor: PromptCursor
    extra: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = -1


class CheckpointPort(Protocol):
    """Checkpoints of the policy that it was made for. Collective."""

    def stage(self, state: SavedState) -> Callable[[], object]:
        """Copy weights, optimizer and random state now; what is returned writes them and `state`, on any thread, in the
        same order on all ranks. Durable when that returns; it raises OSError."""
        ...

    def load_newest(self) -> SavedState | None:
        """Restore the newest good checkpoint and return its state; None if there is none: nothing was changed."""
        ...

    def take_over(self, epoch: int, step: int) -> None:
        """No trainer of another epoch finishes a checkpoint from here on; those after `step` are set aside, and what
        was unfinished goes. On the main rank, once the broker has given this trainer its epoch."""
        ...


class TrainerBroker(Protocol):
    """The part of broker.queue.Broker that a trainer calls (errors: Fenced, CorruptPayload, BrokerUnavailable)."""

    def attach_trainer(
        self, *, checkpoint_step: int, checkpoint_version: int, consumed: Sequence[int], cursor: PromptCursor | None
    ) -> TrainerState: ...
    def pull(self, epoch: int, version: int, groups: int) -> tuple[Delivery, ...] | Refused: ...
    def fetch(self, group_ids: Sequence[int]) -> list[Group]: ...
    def reject(self, epoch: int, group_id: int, reason: str) -> object: ...
    def step(
        self,
        epoch: int,
        version: int,
        outcomes: Sequence[Outcome],
        lag_tokens: Mapping[int, int],
        metrics: Mapping[str, object],
    ) -> None: ...
    def prompt_cursor(self, epoch: int, step: int) -> PromptCursor: ...
    def commit(self, epoch: int, step: int) -> int: ...
    def checkpoint_asked(self) -> int: ...
    def name_version(self, epoch: int) -> int: ...
    def publish(self, epoch: int, record: VersionRecord) -> None: ...
    def renew_trainer(self, epoch: int) -> None: ...
    def return_leased(self, epoch: int) -> int: ...
    def set_status(self, status: Literal["starting", "running", "draining", "finished", "stopped"]) -> None: ...
    def snapshot(self, detail: int = 0) -> Snapshot: ...
    def engines(self) -> tuple[EngineRecord, ...]: ...
    def versions(self) -> tuple[VersionRecord, ...]: ...
    def forget_version(self, version: int) -> None: ...
    def server_time_ms(self) -> int: ...


class MetricsSink(Protocol):
    """Takes one record a step."""

    def write(self, record: Mapping[str, object]) -> None: ...
    def close(self) -> None: ...
