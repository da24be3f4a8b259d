"""Weights between Hugging Face folders and megatron's sharded parameters, for every layout.

Invariant: export(import(w)) == w, bit for bit, in the trainer's dtype. On import a rank reads only its slices, tensor
by tensor; on export it gathers one whole tensor at a time. Import after compat.install.

| Hugging Face | megatron (local spec) | how it is cut |
|---|---|---|
| embed_tokens, lm_head | word_embeddings, output_layer | rows over tensor ranks |
| q, k, v_proj | linear_qkv: for each key-value group its query heads, key, value | groups over tensor ranks |
| o_proj, down_proj | linear_proj, linear_fc2 | columns over tensor ranks (experts: expert-tensor ranks) |
| gate_proj, up_proj | linear_fc1: this rank's rows of gate, then of up | rows |
| norms, gate (router) | layernorms, router | whole |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from torch import Tensor

from configs.load import ConfigError
from trainer.megatron.hf_files import weight_files
from trainer.megatron.model_config import ModelShape

Kind = Literal["whole", "rows", "columns", "qkv", "gate_up"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one megatron parameter is made of Hugging Face tensors. expert: cut over expert-tensor ranks."""

    kind: Kind
    names: tuple[str, ...]
    expert: bool = False


_LAYER: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "input_layernorm.weight": ("whole", ("input_layernorm",)),
    "self_attention.linear_qkv.layer_norm_weight": ("whole", ("input_layernorm",)),  # Transformer Engine's spec
    "pre_mlp_layernorm.weight": ("whole", ("post_attention_layernorm",)),
    "mlp.linear_fc1.layer_norm_weight": ("whole", ("post_attention_layernorm",)),  # Transformer Engine's spec
    "self_attention.q_layernorm.weight": ("whole", ("self_attn.q_norm",)),
    "self_attention.k_layernorm.weight": ("whole", ("self_attn.k_norm",)),
    "self_attention.linear_qkv.weight": ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "self_attention.linear_qkv.bias": ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj",)),
    "mlp.router.weight": ("whole", ("mlp.gate",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj",)),
}
_TOP: dict[str, Rule] = {
    "embedding.word_embeddings.weight": Rule("rows", ("model.embed_tokens.weight",)),
    "output_layer.weight": Rule("rows", ("lm_head.weight",)),
    "decoder.final_layernorm.weight": Rule("whole", ("model.norm.weight",)),
}


def rule_for(parameter: str, layer_offset: int, expert_offset: int) -> Rule:
    """The rule of a parameter by its local name; the offsets number this rank's first layer and first expert."""
    if parameter in _TOP:
        return _TOP[parameter]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", parameter)
    if match:
        prefix, rest = f"model.layers.{int(match[1]) + layer_offset}.", match[2]
        if rest in _LAYER:
            kind, names = _LAYER[rest]
            last = "bias" if rest.endswith(".bias") else "weight"
            return Rule(kind, tuple(f"{prefix}{name}.{last}" for name in names))
        expert = re.fullmatch(
            r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))", rest
        )
        if expert:
            prefix += f"mlp.experts.{int(expert[1] or expert[4]) + expert_offset}."
            if (expert[2] or expert[3]) == "1":
                return Rule("gate_up", (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), expert=True)
            return Rule("columns", (f"{prefix}down_proj.weight",), expert=True)
    raise ConfigError(f"the model has a parameter {parameter} for which no Hugging Face tensor is known.")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count`, and the process group over which the parts lie."""

    index: int
    count: int
    group: Any


def shard_of(rule: Rule) -> Shard:
    """This rank's part under `rule`."""
    if rule.expert:
        return Shard(
            ps.get_expert_tensor_parallel_rank(),
            ps.get_expert_tensor_parallel_world_size(),
            ps.get_expert_tensor_parallel_group(),
        )
    return Shard(
        ps.get_tensor_model_parallel_rank(),
        ps.get_tensor_model_parallel_world_size(),
        ps.get_tensor_model_parallel_group(),
    )


def parameters(model: Any, shape: ModelShape) -> Iterator[tuple[Any, Rule]]:
    """The parameters of an unwrapped GPTModel with their rules, in the same order on all ranks of one stage."""
    layer_offset = get_transformer_layer_offset(model.config)
    expert_offset = 0
    if shape.experts:
        share = shape.experts // ps.get_expert_model_parallel_world_size()
        expert_offset = ps.get_expert_model_parallel_rank() * share
    for name, parameter in model.named_parameters():
        yield parameter, rule_for(name, layer_offset, expert_offset)


class _Reader:
    """Slices of the tensors of a folder; keeps the files open that it has read from."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._where = folder, weight_files(folder)
        self._open: dict[str, Any] = {}

    def part(self, name: str, dimension: int | None, index: int, count: int) -> Tensor:
        """Part `index` of `count` along `dimension`; the whole tensor for None."""
        if name not in self._where:
            raise ConfigError(f"{self._folder}: the checkpoint has no tensor {name}.")
        file = self._where[name]
        if file not in self._open:
            self._open[file] = safe_open(str(self._folder / file), framework="pt")
        if dimension is None or count == 1:
            return self._open[file].get_tensor(name)  # type: ignore[no-any-return]
        view = self._open[file].get_slice(name)
        step = view.get_shape()[dimension] // count
        span = slice(index * step, (index + 1) * step)
        return view[span] if dimension == 0 else view[:, span]  # type: ignore[no-any-return]


def load_hf(model: Any, shape: ModelShape, folder: Path) -> None:
    """Fill every parameter of an unwrapped GPTModel from a Hugging Face folder; ConfigError if one does not fit."""
    reader = _Reader(folder)
    with torch.no_grad():
        for parameter, rule in parameters(model, shape):
            tied_copy = shape.tied and rule.names == ("lm_head.weight",)
            names = ("model.embed_tokens.weight",) if tied_copy else rule.names
            at = shard_of(rule)
            dimension = {"whole": None, "columns": 1}.get(rule.kind, 0)
            parts = [reader.part(name, dimension, at.index, at.count) for name in names]
            value = _join(rule, parts, shape, at.count)
            if value.shape != parameter.shape:
                raise ConfigError(
                    f"{folder}: {' + '.join(names)} gives {list(value.shape)}, but the model of config.json "
                    f"needs {list(parameter.shape)}."
                )
            parameter.copy_(value)


def _join(rule: Rule, parts: list[Tensor], shape: ModelShape, count: int) -> Tensor:
    if rule.kind == "gate_up":
        return torch.cat(parts)
    if rule.kind == "qkv":
        groups = shape.key_value_heads // count
        return torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)
    return parts[0]


def split(rule: Rule, shards: list[Tensor], shape: ModelShape) -> list[Tensor]:
    """The whole Hugging Face tensors, in the order of rule.names, of all ranks' parts of a parameter."""
    if rule.kind == "whole":
        return [shards[0]]
    if rule.kind == "columns":
        return [torch.cat(shards, 1)]
    if rule.kind == "rows":
        return [torch.cat(shards)]
    if rule.kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in (0, 1)]
    whole = torch.cat(shards)
    by_group = whole.view(shape.key_value_heads, -1, *whole.shape[1:])
    sizes = [by_group.shape[1] - 2 * shape.head_dim, shape.head_dim, shape.head_dim]
    return [part.reshape(-1, *whole.shape[1:]) for part in torch.split(by_group, sizes, 1)]


def whole_shapes(rule: Rule, local: tuple[int, ...], shape: ModelShape, count: int) -> list[tuple[int, ...]]:
    """Shapes of what `split` gives, from the shape of one rank's part."""
    if rule.kind == "whole":
        return [local]
    if rule.kind == "columns":
        return [(local[0], local[1] * count)]
    if rule.kind == "rows":
        return [(local[0] * count, *local[1:])]
    if rule.kind == "gate_up":
        return [(local[0] // 2 * count, local[1])] * 2
    heads = (shape.heads, shape.key_value_heads, shape.key_value_heads)
    return [(number * shape.head_dim, *local[1:]) for number in heads]


def holds_export(rule: Rule) -> bool:
    """True on the ranks that take part in gathering this parameter: those of the first data-parallel replica."""
    if rule.expert:
        return int(ps.get_expert_data_parallel_rank()) == 0
    return int(ps.get_data_parallel_rank(with_context_parallel=True)) == 0


def gather(value: Tensor, at: Shard, kind: Kind, ranks: dist.ProcessGroup) -> list[Tensor]:
    """All parts of a CPU tensor on the rank that holds the first; elsewhere, and for kind "whole", just the own one.

    ranks: a gloo group of all ranks. The parts travel point to point, so that any thread may gather while the step's
    own groups are busy.
    """
    if at.count == 1 or kind == "whole":
        return [value]
    members = dist.get_process_group_ranks(at.group)
    if at.index:
        dist.send(value.contiguous(), members[0], group=ranks)
        return [value]
    parts = [value] + [torch.empty_like(value) for _ in members[1:]]
    for part, member in zip(parts[1:], members[1:], strict=True):
        dist.recv(part, member, group=ranks)
    return parts
