"""The tensors of a checkpoint: weights through megatron's dist_checkpointing, and what belongs to one rank alone.

Invariant: what `load_tensors` restores in the layout that saved it continues bit for bit. Import after compat.install.

A save has two halves. `stage_tensors` copies what this rank owns, without a word with other ranks; `write_tensors`
writes it, on any thread and with a process group of its own, by the steps of dist_checkpointing.save (megatron-core
0.19.2): megatron's own asynchronous save forks a process and finishes with collectives of the training's group.

With the distributed optimizer each rank writes its part of the optimizer's state into a file of its own: only the same
layout reads it again, and megatron's `fully_reshardable` form would gather it over the ranks while the step waits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import _CONTENT_METADATA_KEY
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _get_failure_dict

from trainer.megatron import compat
from trainer.megatron.optimizer_state import optimizer_part, restore_optimizer_part
from trainer.megatron.policy import PolicyModel
from trainer.tensor_file import save_tensors

_METADATA = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}


@dataclass(frozen=True, slots=True, eq=False)
class StagedTensors:
    """A copy in memory of what this rank writes. tensors: megatron's entries by name. own: what it alone will read."""

    tensors: dict[str, Any]
    own: dict[str, Tensor]


def stage_tensors(policy: PolicyModel) -> StagedTensors:
    """Copy weights, optimizer state and random generators to CPU memory; the copy needs no other rank."""
    state = _sharded(policy, with_optimizer=True, loading=False)
    state[_CONTENT_METADATA_KEY] = dict(_METADATA)
    # What dist_checkpointing.save does before it writes (serialization.py:save), without its check over all ranks: the
    # structure is that of the model, and tests hold every layout against its checkpoint.
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    rank = policy.parallel.rank
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
    entries, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    for of_name in entries.values():
        for entry in of_name:
            if isinstance(entry, ShardedTensor) and entry.data is not None:
                entry.data = entry.data.detach().to("cpu", copy=True)
            elif isinstance(entry, ShardedObject):
                entry.data = copy.deepcopy(entry.data)  # among it Adam's step, which the next step adds to in place
    own = _generators(policy.parallel.device)
    if policy.config.trainer.distributed_optimizer:
        own |= {
            name: value.detach().to("cpu", copy=True)
            for name, value in optimizer_part(_inner(policy.parts.optimizer)).items()
        }
    return StagedTensors(entries, own)


def write_tensors(staged: StagedTensors, folder: Path, ranks: dist.ProcessGroup) -> None:
    """Write what was staged into an existing, empty folder. Collective over `ranks`, a gloo group; on any thread.

    Uses no GPU: a thread that trains nothing has GPU 0 as its own, and each rank would take memory there. Raises
    CheckpointException, on one rank alone, if another one could not write.
    """
    rank = dist.get_rank(ranks)
    compat.results_stay_in_this_process()
    writer = FileSystemWriterAsync(str(folder), thread_count=1)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
    tensors = mcore_to_pyt_state_dict(staged.tensors, False)
    (_, metadata, wrapper), *_ = save_state_dict_async_plan(tensors, writer, ranks, 0, planner=planner)
    write, _, arguments = writer.get_save_function_and_args()
    if write is not None:
        write(*arguments)
    results = wrapper.gather_object(writer.retrieve_write_results())
    if rank == 0:
        if failures := _get_failure_dict(results):
            raise CheckpointException("write", failures)
        writer.finish(metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    save_tensors(staged.own, folder / _own_file(rank))


def load_tensors(policy: PolicyModel, folder: Path, *, with_optimizer: bool) -> None:
    """Restore the weights; with_optimizer: also the optimizer's state and the random generators. Collective."""
    optimizer = policy.parts.optimizer
    found = dist_checkpointing.load(
        _sharded(policy, with_optimizer=with_optimizer, loading=True), str(folder), validate_access_integrity=False
    )
    policy.parts.gpt.load_state_dict(found["model"])
    if with_optimizer:
        own = load_file(str(folder / _own_file(policy.parallel.rank)))
        if policy.config.trainer.distributed_optimizer:
            restore_optimizer_part(_inner(optimizer), own)
        else:
            optimizer.load_state_dict(found["optimizer"])
        _restore_generators(own, policy.parallel.device)
    else:
        optimizer.reload_model_params()
    policy.zero_gradients()


def _own_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _sharded(policy: PolicyModel, *, with_optimizer: bool, loading: bool) -> dict[str, Any]:
    """Weights, and the optimizer's state unless it is spread, as dist_checkpointing takes them."""
    metadata: dict[str, Any] = dict(_METADATA)  # megatron adds process groups to it, which no file can hold
    model = policy.parts.gpt.sharded_state_dict(metadata=metadata)
    state: dict[str, Any] = {"model": model}
    if with_optimizer and not policy.config.trainer.distributed_optimizer:
        optimizer = policy.parts.optimizer
        _complete_optimizer_state(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return state


def _inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    """torch's optimizers inside megatron's, in an order that the layout fixes."""
    singles = getattr(optimizer, "chained_optimizers", [optimizer])
    return [single.optimizer for single in singles if not getattr(single, "is_stub_optimizer", False)]


def _complete_optimizer_state(optimizer: Any) -> None:
    """torch's Adam makes its state at the first step; a checkpoint before it needs the same entries, at zero.

    Those of Transformer Engine and apex are completed by megatron, and know no `step` of a parameter."""
    for inner in _inner(optimizer):
        if not isinstance(inner, torch.optim.Adam):
            continue
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )


def _generators(device: torch.device) -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[f"tracker/{name}"] = state if torch.is_tensor(state) else state.get_state()
    return {name: state.cpu() for name, state in states.items()}


def _restore_generators(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    tracker = get_cuda_rng_tracker()
    tracker.set_states(
        {name.removeprefix("tracker/"): state for name, state in states.items() if name.startswith("tracker/")}
    )
