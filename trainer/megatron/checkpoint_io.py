"""The tensors of a checkpoint, through megatron's dist_checkpointing, and each rank's random generators.

Invariant: what `load_tensors` restores in the layout that saved it continues bit for bit. Import after compat.install.

The save is synchronous and in this process: torch_dist's file format, without the helper process that megatron starts
for its results (compat.py), whose start costs more than a small model's whole checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.megatron.policy import PolicyModel

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


def save_tensors(policy: PolicyModel, folder: Path) -> None:
    """Write weights, optimizer state and random generators into an existing, empty folder. Collective."""
    _complete_optimizer_state(policy.parts.optimizer)
    state = _sharded(policy, with_optimizer=True, loading=False)
    dist_checkpointing.save(state, str(folder), content_metadata=_METADATA)
    save_file(_generators(policy.parallel.device), str(folder / f"rng-{policy.parallel.rank:05d}.safetensors"))
    policy.parallel.barrier()


def load_tensors(policy: PolicyModel, folder: Path, *, with_optimizer: bool) -> None:
    """Restore the weights; with_optimizer: also the optimizer's state and the random generators. Collective."""
    optimizer = policy.parts.optimizer
    if with_optimizer:
        _complete_optimizer_state(optimizer)
    found = dist_checkpointing.load(
        _sharded(policy, with_optimizer=with_optimizer, loading=True), str(folder), validate_access_integrity=False
    )
    policy.parts.gpt.load_state_dict(found["model"])
    if with_optimizer:
        optimizer.load_state_dict(found["optimizer"])
        states = load_file(str(folder / f"rng-{policy.parallel.rank:05d}.safetensors"))
        _restore_generators(states, policy.parallel.device)
    else:
        optimizer.reload_model_params()
    policy.zero_gradients()


def _sharded(policy: PolicyModel, *, with_optimizer: bool, loading: bool) -> dict[str, Any]:
    model = policy.parts.gpt.sharded_state_dict(metadata=_METADATA)
    state: dict[str, Any] = {"model": model}
    if with_optimizer:
        state["optimizer"] = policy.parts.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_METADATA)
    return state


def _complete_optimizer_state(optimizer: Any) -> None:
    """torch's Adam makes its state at the first step; a checkpoint before it needs the same entries, at zero."""
    for single in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(single, "is_stub_optimizer", False):
            continue
        inner = single.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
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
