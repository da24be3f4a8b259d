"""What the ranks of a test do: python -m tests.trainer_megatron.worker OUT SPEC, where SPEC is JSON.

SPEC: {"config": overrides of RunConfig by dotted name, "do": [[name, key, {arguments}], ...]}. A name is "model" (load
the model of `folder`, under further `overrides`) or a function below, whose result goes to OUT/<key>.safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tests.trainer_megatron import data
from tests.trainer_megatron.settings import run_config
from trainer.launch import run_ranks
from trainer.megatron.checkpoint import TrainingState, latest_on_all, load_checkpoint, save_checkpoint
from trainer.megatron.parallel import gather_bytes, parallel
from trainer.megatron.policy import PolicyModel
from trainer.megatron.replay import InvalidRoutes

Named = dict[str, Tensor]


def batches(policy: PolicyModel, with_routes: bool = False, unpacked: bool = False) -> list:
    """This data rank's micro-batches."""
    groups = [(i,) for group in data.MICRO_BATCHES for i in group] if unpacked else list(data.MICRO_BATCHES)
    per = len(groups) // policy.parallel.data_size
    mine = groups[policy.parallel.data_rank * per :][:per]
    return [data.micro_batch(group, with_routes, padding=i % 3) for i, group in enumerate(mine)]


def weight_tensors(policy: PolicyModel, of: Callable[[Tensor], Tensor]) -> Named:
    """`of` each parameter under Hugging Face names, whole, on every rank."""
    from trainer.megatron import weights  # noqa: PLC0415 - after compat.install

    own: Named = {}
    for parameter, rule in weights.parameters(policy.parts.gpt, policy.shape):
        at = weights.shard_of(rule)
        parts = weights.gather(of(parameter).detach(), at, rule.kind)
        own |= {
            name: value.contiguous().clone()
            for name, value in zip(rule.names, weights.split(rule, parts, policy.shape), strict=True)
        }
    out: Named = {}
    for part in gather_bytes(safetensors.torch.save(own), policy.parallel.device):
        out |= safetensors.torch.load(part)
    return out


def scores(policy: PolicyModel, with_routes: bool = False, unpacked: bool = False) -> Named:
    """Log-probs and entropies by sequence, gathered over data ranks."""
    mine = batches(policy, with_routes, unpacked)
    own: Named = {}
    for batch, got in zip(mine, policy.log_probs(mine), strict=True):
        for i in batch.sequence_index.unique().tolist():
            rows = (batch.sequence_index == i) & batch.loss_mask
            if i >= 0:
                own |= {f"log_probs/{i}": got.log_probs[rows].clone(), f"entropy/{i}": got.entropy[rows].clone()}
    out: Named = {}
    for part in gather_bytes(safetensors.torch.save(own), policy.parallel.device):
        out |= safetensors.torch.load(part)
    return out


def gradients(policy: PolicyModel, with_routes: bool = False, unpacked: bool = False) -> Named:
    """Gradients of the loss under Hugging Face names, with the summed reports."""
    mine = batches(policy, with_routes, unpacked)
    reports = policy.forward_backward(mine, data.micro_batch_loss, entropy_gradient=True)
    totals = torch.stack([torch.stack((r["loss"].double(), r["tokens"].double())) for r in reports]).sum(0)
    out = {f"grad/{k}": v for k, v in weight_tensors(policy, lambda p: p.main_grad).items()}
    out["totals"] = policy.parallel.sum_over_data(totals)
    metrics = policy.replay_metrics()
    overlap = -1 if metrics.overlap is None else metrics.overlap
    out["replay"] = torch.tensor([metrics.replayed_rows, metrics.own_rows, metrics.padding_rows, overlap])
    return out


def drop_gradients(policy: PolicyModel) -> Named:
    """Forget the gradients."""
    policy.zero_gradients()
    return {}


def step(policy: PolicyModel, poison: bool = False) -> Named:
    """One optimizer step on the gradients there; poison: with a NaN on the last rank."""
    if poison and policy.parallel.rank == policy.parallel.world - 1:
        next(iter(policy.parts.gpt.parameters())).main_grad.view(-1)[0] = float("nan")
    norm, applied = policy.optimizer_step(1e-2)
    return weight_tensors(policy, lambda p: p) | {"norm": torch.tensor(norm), "applied": torch.tensor(applied)}


def export(policy: PolicyModel, folder: str) -> Named:
    """Write the Hugging Face folder."""
    policy.export_hf(Path(folder))
    return {}


def save(policy: PolicyModel, root: str, step: int, keep: int = 2) -> Named:
    """Save a checkpoint; how long it took, in seconds."""
    began = time.perf_counter()
    save_checkpoint(policy, Path(root), TrainingState(step, step, (1, 2, step), 7, "hash"), keep=keep)
    return {"seconds": torch.tensor(time.perf_counter() - began)}


def load(policy: PolicyModel, root: str) -> Named:
    """Load the newest complete checkpoint."""
    folder = latest_on_all(policy.parallel, Path(root))
    assert folder is not None
    state = load_checkpoint(policy, folder)
    return weight_tensors(policy, lambda p: p) | {"step": torch.tensor(state.step)}


def refuse_routes(policy: PolicyModel) -> Named:
    """1 where a bad trace was refused before it reached the model."""
    good = data.micro_batch((0, 1), with_routes=True)
    assert good.routes is not None
    bad = {name: good.routes.clone() for name in ("range", "twice")}
    bad["range"][2, 1, 0] = data.EXPERTS
    bad["twice"][2, 1] = 3
    out: Named = {}
    for name, routes in bad.items():
        try:
            policy.forward_backward([dataclasses.replace(good, routes=routes)], data.micro_batch_loss)
        except InvalidRoutes:
            out[name] = torch.ones(1)
    return out


def own_routes(policy: PolicyModel) -> Named:
    """Record what the live router chooses for each micro-batch: uint8 [rows, layers, top_k] by micro-batch."""
    out: Named = {}
    for i, members in enumerate(data.MICRO_BATCHES):
        seen: list[Tensor] = []
        hooks = [
            layer.mlp.router.register_forward_hook(lambda _, __, result, seen=seen: seen.append(result[1]))
            for layer in policy.parts.gpt.decoder.layers
        ]
        batch = data.micro_batch(members, with_routes=False)
        policy.log_probs([batch])
        for hook in hooks:
            hook.remove()
        chosen = torch.stack([routing.int().topk(data.TOP_K).indices for routing in seen], 1)
        out[str(i)] = chosen.to(torch.uint8)
    return out


def replay_own(policy: PolicyModel) -> Named:
    """Gradients with the live router's own choices replayed."""
    recorded = own_routes(policy)
    batches = [
        dataclasses.replace(
            data.micro_batch(members, with_routes=True),
            routes=recorded[str(i)],
        )
        for i, members in enumerate(data.MICRO_BATCHES)
    ]
    policy.forward_backward(batches, data.micro_batch_loss, entropy_gradient=True)
    out = {f"grad/{k}": v for k, v in weight_tensors(policy, lambda p: p.main_grad).items()}
    out["overlap"] = torch.tensor(policy.replay_metrics().overlap)
    return out


def noise(policy: PolicyModel) -> Named:
    """What the random generators give next."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: PLC0415 - after compat.install

    with get_cuda_rng_tracker().fork():
        tracked = torch.cuda.get_rng_state()
    return {"torch": torch.rand(3), "tracked": tracked}


DO: dict[str, Callable[..., Named]] = {
    f.__name__: f
    for f in (scores, gradients, drop_gradients, step, export, save, load, noise, refuse_routes, replay_own)
}


def main(arguments: Sequence[str]) -> int:
    """Run the spec: start the ranks, or be one of them."""
    out, spec = Path(arguments[0]), json.loads(arguments[1])
    warnings.simplefilter("ignore")
    config = run_config(spec["config"])
    if config.trainer.layout.ranks > 1 and "RANK" not in os.environ:
        return run_ranks(config, "tests.trainer_megatron.worker", arguments)
    torch.set_num_threads(1)
    with parallel(config) as ranks:
        policy: PolicyModel | None = None
        for name, key, options in spec["do"]:
            if name == "model":
                chosen = run_config(spec["config"] | options.get("overrides", {}))
                policy = PolicyModel.create(chosen, ranks, Path(options["folder"]))
                continue
            assert policy is not None
            result = DO[name](policy, **options)
            if ranks.is_main:
                named = {k: v.contiguous().clone() for k, v in result.items()}
                safetensors.torch.save_file(named, str(out / f"{key}.safetensors"))
        ranks.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
