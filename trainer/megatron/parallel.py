"""The ranks of one trainer: set-up, tear-down, seeds and the few collectives that the training loop needs.

Invariant: every collective has a finite time-out, so a rank that dies ends the others instead of hanging them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from configs.load import ConfigError
from configs.ports import free_port
from configs.schema import RunConfig
from trainer.megatron import compat


@dataclass(frozen=True, slots=True)
class Parallel:
    """Where this process stands in the layout.

    rank, world: over all ranks. data_rank, data_size: which share of a step's micro-batches this rank trains (ranks
    that differ only in tensor or pipeline position have the same data_rank and are given the same micro-batches).
    device: where tensors live. writers: all ranks again, over gloo and CPU tensors, for what runs beside the training
    (weights and checkpoints being written): its collectives never meet those of the step.
    """

    rank: int
    world: int
    data_rank: int
    data_size: int
    device: torch.device
    data_group: dist.ProcessGroup
    writers: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        """True on the one rank that talks to Redis, writes metrics and publishes."""
        return self.rank == 0

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Sum of `values` (any shape, float64 or int64) over the data-parallel ranks; the same on each of them."""
        total = values.to(self.device, copy=True)
        if self.data_size > 1:
            dist.all_reduce(total, group=self.data_group)
        return total

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's payload (bytes there, None elsewhere) on every rank."""
        if self.world == 1:
            return payload or b""
        return broadcast_bytes(payload, 0, None, self.device)

    def barrier(self) -> None:
        """Wait until every rank is here, at most trainer.collective_timeout_s."""
        if self.world > 1:
            dist.barrier()


def broadcast_bytes(payload: bytes | None, source: int, group: dist.ProcessGroup | None, device: torch.device) -> bytes:
    """The payload of global rank `source` on every rank of `group` (None: all ranks)."""
    here = dist.get_rank() == source
    size = torch.tensor([len(payload or b"") if here else 0], dtype=torch.int64, device=device)
    dist.broadcast(size, source, group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if here and payload:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    if int(size):
        dist.broadcast(data, source, group=group)
    return data.cpu().numpy().tobytes()


def gather_bytes(payload: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's payload, by rank, on every rank of `group`, a gloo group of all ranks."""
    world = dist.get_world_size(group)
    if world == 1:
        return [payload]
    sizes = torch.zeros(world, dtype=torch.int64)
    sizes[dist.get_rank(group)] = len(payload)
    dist.all_reduce(sizes, group=group)
    mine = torch.zeros(max(int(sizes.max()), 1), dtype=torch.uint8)
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    out = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(out, mine, group=group)
    return [part[:size].numpy().tobytes() for part, size in zip(out, sizes.tolist(), strict=True)]


@contextmanager
def parallel(config: RunConfig) -> Iterator[Parallel]:
    """Join the ranks named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (absent: a world of one); leave at the end.

    gloo on cpu, NCCL on cuda, whose groups are left to the end of the process after an error. Seeds torch and megatron
    from run.seed. Raises ConfigError if the world's size is not that of trainer.layout, or if trainer.device is cuda
    and there is none.
    """
    layout = config.trainer.layout
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world != layout.ranks:
        raise ConfigError(
            f"trainer.layout needs data x tensor x pipeline = {layout.ranks} ranks, but WORLD_SIZE is {world}. "
            "Start the trainer with `lagrange trainer`, or torchrun with that many processes."
        )
    device = _device(config)
    compat.install()
    from megatron.core import parallel_state  # after compat.install
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    timeout = timedelta(seconds=config.trainer.collective_timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=_meeting_point(world),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    well = False
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor or layout.tensor,
            distributed_timeout_minutes=max(1, round(config.trainer.collective_timeout_s / 60)),
        )
        torch.manual_seed(config.run.seed)
        model_parallel_cuda_manual_seed(config.run.seed)
        yield Parallel(
            rank=rank,
            world=world,
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
            device=device,
            data_group=parallel_state.get_data_parallel_group(),
            writers=dist.new_group(backend="gloo", timeout=timeout),
        )
        well = True
    finally:
        # NCCL takes groups down together, and ranks that wait for one that failed never come: it ends without that.
        if well or device.type == "cpu":
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _meeting_point(world: int) -> str:
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "0")) or (free_port() if world == 1 else 0)
    if not port:
        raise ConfigError(
            "MASTER_PORT is not set: the ranks cannot find each other. Start the trainer with `lagrange trainer`."
        )
    return f"tcp://{address}:{port}"


def _device(config: RunConfig) -> torch.device:
    if config.trainer.device == "cpu":
        if torch.cuda.is_available():
            raise ConfigError(
                "trainer.device is cpu on a machine with a GPU: set CUDA_VISIBLE_DEVICES='' to hide it, or cuda."
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("trainer.device is cuda, but torch sees no GPU. Set trainer.device: cpu.")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    # cuDNN plans each new shape of its attention anew, for tens of milliseconds; packed batches are hardly ever alike.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device
