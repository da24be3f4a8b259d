"""Runs micro-batches through megatron's schedules: packing, scoring, loss, and what the last pipeline stage reports.

Invariants: the gradient buffers receive exactly the sum of the losses that the loss function returned; every rank of a
pipeline returns the same report; and a micro-batch is on the device from its forward pass to its backward pass, not
longer: the routes of a whole step would fill a GPU. Import after compat.install.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from trainer.batch import MicroBatch
from trainer.megatron.attention import packing
from trainer.megatron.model import Parts
from trainer.megatron.parallel import broadcast_bytes
from trainer.megatron.replay import RoutePlan, plan_routes
from trainer.megatron.scores import token_scores

Report = dict[str, Tensor]
OutputFunction = Callable[[MicroBatch, Tensor], tuple[Tensor, Report]]
"""(micro-batch, scores float32 [2, T]) -> (scalar loss, what to report)."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A micro-batch as the model takes it: rows filled up to a multiple of the tensor-parallel size, packed, routed.

    All on the device. batch: without its routes, which are in the plan."""

    batch: MicroBatch
    token_ids: Tensor  # int64 [1, rows]
    position_ids: Tensor  # int64 [1, rows]
    labels: Tensor  # int64 [rows]
    packing: PackedSeqParams
    routes: RoutePlan | None


def prepare(batch: MicroBatch, parts: Parts, mode: str, device: torch.device) -> Prepared:
    """Pack a micro-batch, check and lay out its routes. mode: trainer.routing_replay. Raises InvalidRoutes."""
    rows = rows_of(batch)
    fill = rows - batch.tokens
    starts = batch.sequence_starts.tolist()
    if starts[-1] < rows:
        starts.append(rows)
    shape = parts.shape
    routes = None
    if shape.experts:
        routes = plan_routes(
            batch,
            rows,
            experts=shape.experts,
            top_k=shape.top_k,
            moe_layers=shape.moe_layers,
            mode=mode,
            device=device,
        )
    if parts.rotary is None:
        edges = torch.tensor(starts, dtype=torch.int32, device=device)
        longest = int(edges.diff().max())
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=longest, max_seqlen_kv=longest
        )
    else:
        packed = packing(starts)
        packed.blocks = [block.to(device) for block in packed.blocks]
        packed.inverse = packed.inverse.to(device)
    return Prepared(
        batch=replace(batch, routes=None, routes_valid=None).to(device),
        token_ids=F.pad(batch.token_ids.to(device), (0, fill))[None],
        position_ids=F.pad(batch.position_ids.to(device), (0, fill))[None],
        labels=F.pad(batch.labels.to(device), (0, fill)),
        packing=packed,
        routes=routes,
    )


def rows_of(batch: MicroBatch) -> int:
    """Rows of a micro-batch in the model: its own, filled up; at least one on each tensor-parallel rank."""
    tensor = int(ps.get_tensor_model_parallel_world_size())
    return max(-(-batch.tokens // tensor), 1) * tensor


def run(
    parts: Parts,
    batches: Sequence[MicroBatch],
    output: OutputFunction,
    *,
    mode: str,
    temperature: float,
    training: bool,
    device: torch.device,
) -> list[Report]:
    """Forward, and backward if `training`, of all micro-batches; the reports, by micro-batch, on every rank of the
    pipeline. mode: trainer.routing_replay. Raises InvalidRoutes at the micro-batch that has them."""
    if not batches:
        raise ValueError("a step needs at least one micro-batch on every rank; fill up with empty ones")

    def forward_step(iterator: Iterator[Prepared], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        item = next(iterator)
        if parts.rotary is not None:
            parts.rotary.positions = item.position_ids[0]
        if parts.replay is not None and item.routes is not None:
            parts.replay.forward(item.routes, training=training)
        scores = model(
            item.token_ids,
            item.position_ids,
            None,
            packed_seq_params=item.packing,
            output_processor=_scores,
            output_processor_context=(item.labels, temperature),
        )
        if parts.replay is not None:
            parts.replay.forward_done()

        def loss_of(result: Tensor) -> tuple[Tensor, Tensor, Report]:
            loss, report = output(item.batch, result[:, : item.batch.tokens])
            if training and not loss.requires_grad:
                loss = loss + 0.0 * result.sum()  # an empty micro-batch still takes part in every exchange
            return loss, torch.zeros((), dtype=torch.int, device=device), report

        return scores, loss_of

    reports: list[Report] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=(prepare(batch, parts, mode, device) for batch in batches),
        model=[parts.wrapped],
        num_microbatches=len(batches),
        seq_length=rows_of(batches[0]),
        micro_batch_size=1,
        forward_only=not training,
    )
    return _from_last_stage(reports, len(batches), device)


def _scores(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, config: Any, context: Any, **_: Any
) -> Tensor:
    """megatron's output_processor: [rows, 1, hidden] of the last layer to float32 [2, rows], without the logits."""
    labels, temperature = context
    hidden = hidden_states
    group = None
    if ps.get_tensor_model_parallel_world_size() > 1:
        group = ps.get_tensor_model_parallel_group()
        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
    weight = output_layer.weight if output_weight is None else output_weight
    return token_scores(hidden[:, 0], weight, labels, temperature, group)


def _from_last_stage(reports: list[Report], count: int, device: torch.device) -> list[Report]:
    """The last stage's reports on all stages, on the CPU."""
    own = [{name: value.detach().cpu() for name, value in report.items()} for report in reports]
    if ps.get_pipeline_model_parallel_world_size() == 1:
        return own
    flat = {f"{i}/{name}": value.contiguous() for i, report in enumerate(own) for name, value in report.items()}
    payload = safetensors.torch.save(flat) if ps.is_pipeline_last_stage() else None
    source = ps.get_pipeline_model_parallel_last_rank()
    data = broadcast_bytes(payload, source, ps.get_pipeline_model_parallel_group(), device)
    result: list[Report] = [{} for _ in range(count)]
    for key, value in safetensors.torch.load(data).items():
        index, name = key.split("/", 1)
        result[int(index)][name] = value
    return result
