"""What the ranks of a test do: python -m tests.trainer_megatron.worker OUT SPEC, where SPEC is JSON.

SPEC: a list of {"config": overrides of RunConfig by dotted name, "do": [[name, key, {arguments}], ...]}. The ranks join
anew for each, in the same processes: starting one costs more than most of what it is asked. A name is "model" (load the
model of `folder`, under further `overrides`) or a function below, whose result goes to OUT/<key>.safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from configs.ports import free_port
from tests.trainer_megatron import data
from tests.trainer_megatron.settings import run_config
from trainer.background import Worker
from trainer.batch import MicroBatch
from trainer.launch import run_ranks
from trainer.megatron.checkpoint import (
    TrainingState,
    latest_on_all,
    load_checkpoint,
    stage_checkpoint,
)
from trainer.megatron.parallel import gather_bytes, parallel
from trainer.megatron.policy import PolicyModel
from trainer.megatron.replay import InvalidRoutes

Named = dict[str, Tensor]


def batches(policy: PolicyModel, with_routes: bool = False, unpacked: bool = False) -> list[MicroBatch]:
    """This data rank's micro-batches."""
    groups = [(i,) for group in data.MICRO_BATCHES for i in group] if unpacked else list(data.MICRO_BATCHES)
    per = len(groups) // policy.parallel.data_size
    mine = groups[policy.parallel.data_rank * per :][:per]
    return [data.micro_batch(group, with_routes, padding=i % 3) for i, group in enumerate(mine)]


def main_group() -> dist.ProcessGroup:
    """All ranks, for the thread that trains: the writers' group belongs to the one that writes."""
    group = dist.group.WORLD
    assert group is not None
    return group


def weight_tensors(policy: PolicyModel, of: Callable[[Tensor], Tensor]) -> Named:
    """`of` each parameter under Hugging Face names, whole, on every rank."""
    from trainer.megatron import weights  # after compat.install

    own: Named = {}
    for parameter, rule in weights.parameters(policy.parts.gpt, policy.shape):
        at = weights.shard_of(rule)
        parts = weights.gather(of(parameter).detach().cpu(), at, rule.kind, main_group())
        if at.index:
            continue  # whoever holds the first part holds the whole now
        own |= {
            name: value.contiguous().clone()
            for name, value in zip(rule.names, weights.split(rule, parts, policy.shape), strict=True)
        }
    out: Named = {}
    for part in gather_bytes(safetensors.torch.save(own), main_group()):
        out |= safetensors.torch.load(part)
    return out


def main_gradient(parameter: Tensor) -> Tensor:
    """What Megatron sums a parameter's gradients in."""
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's own attribute
    return gradient


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
    for part in gather_bytes(safetensors.torch.save(own), main_group()):
        out |= safetensors.torch.load(part)
    return out


def gradients(policy: PolicyModel, with_routes: bool = False, unpacked: bool = False) -> Named:
    """Gradients of the loss under Hugging Face names, with the summed reports."""
    mine = batches(policy, with_routes, unpacked)
    reports = policy.forward_backward(mine, data.micro_batch_loss, entropy_gradient=True)
    totals = torch.stack([torch.stack((r["loss"].double(), r["tokens"].double())) for r in reports]).sum(0)
    out = {f"grad/{k}": v for k, v in weight_tensors(policy, main_gradient).items()}
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
    policy.stage_export(Path(folder))()
    return {}


def beside(policy: PolicyModel, folder: str, root: str) -> Named:
    """Export and checkpoint by the background thread while the next step is computed and applied.

    Seconds that each took of the step, and whether both were still unfinished when the next step began (by rank 0).
    """
    background = Worker(60)
    state = TrainingState(9, 9, (), 0, "hash")
    marks = [time.perf_counter()]
    background.submit("export", lambda: policy.stage_export(Path(folder)))
    marks.append(time.perf_counter())
    background.submit("checkpoint", lambda: stage_checkpoint(policy, Path(root), state, keep=2))
    marks.append(time.perf_counter())
    out = gradients(policy, with_routes=True)
    policy.optimizer_step(1e-2)
    background.wait()
    marks.append(time.perf_counter())
    assert background.close(10)
    return {"seconds": torch.tensor(marks).diff()} | {k: v for k, v in out.items() if k == "totals"}


def recompute(policy: PolicyModel, file: str) -> Named:
    """Log-probs of each next token of the sequence in `file`, and the overlap of its routes with the live router's."""
    given = safetensors.torch.load_file(file)
    ids = given["ids"]
    labels = torch.cat((ids[1:], ids.new_zeros(1)))
    empty = torch.zeros(len(ids))
    batch = MicroBatch(
        token_ids=ids,
        position_ids=torch.arange(len(ids)),
        sequence_starts=torch.tensor([0, len(ids)], dtype=torch.int32),
        labels=labels,
        loss_mask=torch.arange(len(ids)) < len(ids) - 1,
        behaviour_log_probs=empty,
        advantages=empty,
        versions=torch.zeros(len(ids), dtype=torch.int32),
        sequence_index=torch.zeros_like(ids),
        routes=given["routes"],
        routes_valid=given["valid"],
    )
    scored = policy.log_probs([batch])[0].log_probs[:-1].clone()
    policy.forward_backward([batch], data.micro_batch_loss)
    policy.zero_gradients()
    return {"log_probs": scored, "overlap": torch.tensor(policy.replay_metrics().overlap, dtype=torch.float64)}


def stage_alone(policy: PolicyModel, root: str) -> Named:
    """Copy weights and checkpoint on the last rank while the others do nothing: the copies may not wait for them."""
    if policy.parallel.rank == policy.parallel.world - 1:
        policy.stage_export(Path(root) / "never")
        stage_checkpoint(policy, Path(root), TrainingState(1, 1, (), 0, "hash"), keep=2)
    return {}


def save(policy: PolicyModel, root: str, step: int, keep: int = 2) -> Named:
    """Save a checkpoint; how long it took, in seconds."""
    began = time.perf_counter()
    stage_checkpoint(policy, Path(root), TrainingState(step, step, (1, 2, step), 7, "hash"), keep=keep)()
    return {"seconds": torch.tensor(time.perf_counter() - began)}


def save_late(policy: PolicyModel, root: str, step: int) -> Named:
    """Stage a checkpoint, take the next step, and write what was staged only then."""
    write = stage_checkpoint(policy, Path(root), TrainingState(step, step, (), 0, "hash"), keep=2)
    gradients(policy, with_routes=True)
    policy.optimizer_step(1e-2)
    write()
    return {}


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
    out = {f"grad/{k}": v for k, v in weight_tensors(policy, main_gradient).items()}
    out["overlap"] = torch.tensor(policy.replay_metrics().overlap)
    return out


def noise(policy: PolicyModel) -> Named:
    """What the random generators give next."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # after compat.install

    with get_cuda_rng_tracker().fork():
        tracked = torch.cuda.get_rng_state()
    return {"torch": torch.rand(3), "tracked": tracked}


def whole_logits(policy: PolicyModel) -> Named:
    """How often the output layer itself, which makes the logits of all rows, ran in a forward and backward."""
    calls: list[int] = []
    hook = policy.parts.gpt.output_layer.register_forward_hook(lambda *_: calls.append(1))
    policy.forward_backward([data.micro_batch((0, 1), with_routes=False)], data.micro_batch_loss)
    hook.remove()
    policy.zero_gradients()
    return {"calls": torch.tensor(len(calls))}


def frugal(policy: PolicyModel) -> Named:
    """most: micro-batches of a step that are on the device at once. at_once: 1 where the optimizer works on all
    parameters together, which takes a temporary as large as a moment."""
    from trainer.megatron import schedule  # after compat.install

    prepare = schedule.prepare
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(*arguments: Any) -> Any:
        alive.append(1 + sum(item() is not None for item in made))
        item = prepare(*arguments)
        made.append(weakref.ref(item.token_ids))
        return item

    with patch.object(schedule, "prepare", watched):
        policy.forward_backward(batches(policy), data.micro_batch_loss)
    policy.zero_gradients()
    at_once = any(group["foreach"] is not False for group in policy.parts.optimizer.param_groups)
    return {"most": torch.tensor(alive).max(), "at_once": torch.tensor(int(at_once))}


def fused_state(policy: PolicyModel) -> Named:
    """How many entries the checkpoint gives to an optimizer that counts its steps by group, before its first step."""
    from trainer.megatron import checkpoint_io  # after compat.install

    class Fused(torch.optim.Optimizer):
        pass

    fused = Fused([torch.nn.Parameter(torch.zeros(2))], {"lr": 1.0})
    checkpoint_io._complete_optimizer_state(SimpleNamespace(optimizer=fused))
    return {"entries": torch.tensor(sum(len(state) for state in fused.state.values()))}


DO: dict[str, Callable[..., Named]] = {
    f.__name__: f
    for f in (
        scores,
        gradients,
        drop_gradients,
        step,
        export,
        beside,
        save,
        save_late,
        load,
        noise,
        refuse_routes,
        replay_own,
        recompute,
        stage_alone,
        whole_logits,
        frugal,
        fused_state,
    )
}


def main(arguments: Sequence[str]) -> int:
    """Run the spec: start the ranks, or be one of them."""
    out, spec = Path(arguments[0]), json.loads(arguments[1])
    warnings.simplefilter("ignore")
    first = run_config(spec[0]["config"])
    if first.trainer.layout.ranks > 1 and "RANK" not in os.environ:
        return run_ranks(first, "tests.trainer_megatron.worker", arguments)
    torch.set_num_threads(1)
    for part in spec:
        port = work(out, part["config"], part["do"])
        if "MASTER_PORT" in os.environ:
            os.environ["MASTER_PORT"] = str(port)
    return 0


def work(out: Path, config: dict[str, object], do: list[tuple[str, str, dict[str, Any]]]) -> int:
    """Join as one layout and do what is asked; a free port, on which all ranks can meet again."""
    with parallel(run_config(config)) as ranks:
        policy: PolicyModel | None = None
        for name, key, options in do:
            if name == "model":
                chosen = run_config(config | options.get("overrides", {}))
                policy = PolicyModel.create(chosen, ranks, Path(options["folder"]))
                continue
            assert policy is not None
            result = DO[name](policy, **options)
            if ranks.is_main:
                named = {k: v.cpu().contiguous().clone() for k, v in result.items()}
                safetensors.torch.save_file(named, str(out / f"{key}.safetensors"))
        ranks.barrier()
        return int(ranks.broadcast_bytes(str(free_port()).encode() if ranks.is_main else None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
