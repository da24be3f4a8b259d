"""The ranks of one trainer: set-up, tear-down, seeds and the few collectives that the training loop needs.

Invariant: every collective has a finite time-out, so a rank that dies ends the others instead of hanging them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Parallel:
    """Where this process stands in the layout.

    rank, world: over all ranks. data_rank, data_size: which share of a step's micro-batches this rank trains (ranks
    that differ only in tensor or pipeline position have the same data_rank and are given the same micro-batches).
    device: where tensors live.
    """

    rank: int
    world: int
    data_rank: int
    data_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that talks to Redis, writes metrics and publishes."""
        return self.rank == 0

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Sum of `values` (any shape, float64 or int64) over the data-parallel ranks; the same on each of them."""
        raise NotImplementedError

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's payload (bytes there, None elsewhere) on every rank."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait until every rank is here, at most trainer.collective_timeout_s."""
        raise NotImplementedError


@contextmanager
def parallel(config: RunConfig) -> Iterator[Parallel]:
    """Join the ranks named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (absent: a world of one); leave at the end.

    gloo on cpu, NCCL on cuda. Seeds torch and megatron from run.seed. Raises ConfigError if the world's size is not
    that of trainer.layout, or if trainer.device is cuda and there is none.
    """
    raise NotImplementedError
    yield
