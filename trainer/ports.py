"""What the training loop needs from the model and from the other ranks, as Protocols.

Invariant: `trainer/loop.py` knows the model, the process group and the sink of metrics only through these; the tests'
fakes and the Megatron model implement the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from broker.types import (
    Delivery,
    EngineRecord,
    Group,
    Outcome,
    PromptCursor,
    Refused,
    TrainerState,
    VersionRecord,
)
from trainer.batch import MicroBatch

LossFunction = Callable[[MicroBatch, Tensor, Tensor], Tensor]
"""(micro_batch, log_probs [T] float32 of `labels`, entropy [T] float32) -> scalar.

The scalar is this micro-batch's share of the step's loss, already divided by the global denominators: the loss of the
step is the SUM over micro-batches and data-parallel ranks. So gradients are summed over data-parallel ranks, not
averaged, and not divided by the number of micro-batches. It is called once per micro-batch, in order, on ranks that hold
logits (the last pipeline stage; under tensor parallelism on each with the same values). A micro-batch may hold padding
alone."""


class PolicyPort(Protocol):
    """The model as one rank sees it. All methods are collective: every rank calls them in the same order."""

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Forward without gradient: float32 [T] of each micro-batch, log-prob of `labels` at the run's temperature."""
        ...

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction) -> float:
        """Zero the gradients, accumulate those of all micro-batches, reduce them. Returns the local sum of losses."""
        ...

    def gradients_finite(self) -> bool:
        """Whether every gradient on every rank is finite, after forward_backward; the same answer on all ranks."""
        ...

    def optimizer_step(self, learning_rate: float) -> tuple[float, bool]:
        """Clip and apply. Returns the global gradient norm before clipping, and whether the step was applied."""
        ...

    def export_hf(self, folder: Path) -> str:
        """Write Hugging Face weights, whole or not at all; the same on all ranks. Returns the manifest's checksum."""
        ...


class CheckpointPort(Protocol):
    """Checkpoints of weights, optimizer, random state and the trainer's own JSON state. Collective."""

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`; it is durable when this returns. Older ones beyond `keep` are removed."""
        ...

    def load_newest(self) -> dict[str, Any] | None:
        """Load the newest good checkpoint into the model and return its state; None if there is none."""
        ...


class Collectives(Protocol):
    """Small exchanges between ranks; the identity on one."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the batch."""
        ...

    @property
    def data_size(self) -> int: ...

    @property
    def holds_logits(self) -> bool:
        """Whether this rank is counted in sums over tokens: one rank of each data-parallel share, on the last stage."""
        ...

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over the data-parallel shares, the same on all ranks (int64 and float64)."""
        ...

    def max_(self, value: int) -> int: ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in order of rank, on every rank."""
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
    ) -> PromptCursor: ...
    def commit(self, epoch: int, step: int) -> int: ...
    def name_version(self, epoch: int) -> int: ...
    def publish(self, epoch: int, record: VersionRecord) -> None: ...
    def renew_trainer(self, epoch: int) -> None: ...
    def return_leased(self, epoch: int) -> int: ...
    def set_status(self, status: str) -> None: ...
    def engines(self) -> tuple[EngineRecord, ...]: ...
    def versions(self) -> tuple[VersionRecord, ...]: ...
    def forget_version(self, v: int) -> object: ...
    def server_time_ms(self) -> int: ...


class MetricsSink(Protocol):
    """Takes one record a step."""

    def write(self, record: Mapping[str, object]) -> None: ...
    def close(self) -> None: ...
