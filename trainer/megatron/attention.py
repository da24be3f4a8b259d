"""What the local layer spec lacks on a CPU: attention over packed sequences, rotary angles by position, a sharded norm.

Invariant: a packed micro-batch gives each sequence exactly what it would get alone. Import after compat.install.

Packing: query, key and value keep megatron's [T, 1, heads, dim] form ("sbhd" with a batch of one); `Packing` rides
along as packed_seq_params and tells the attention where sequences begin. megatron's own "thd" form would rotate
sequence by sequence in a Python loop, which costs more than the model when sequences are short.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Where the sequences of a packed micro-batch are.

    blocks: for each bucket of sequences of similar length, int64 [sequences, length] row numbers, the last row repeated
    to fill up. inverse: int64 [T], the place of each row in the concatenated, flattened blocks.
    """

    blocks: list[Tensor] = field(default_factory=list)
    inverse: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def packing(starts: list[int]) -> Packing:
    """The packing of sequences [starts[i], starts[i + 1]); starts begins with 0 and ends with T; empty ones may be.

    Lengths are rounded up to 8 values per octave, so at most 1/8 of the attention's rows is filling.
    """
    buckets: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(starts):
        if length := end - start:
            step = 1 << max(0, length.bit_length() - 4)
            buckets.setdefault(-(-length // step) * step, []).append((start, length))
    blocks, inverse, offset = [], torch.empty(starts[-1], dtype=torch.int64), 0
    for length, members in sorted(buckets.items()):
        begin = torch.tensor([start for start, _ in members])[:, None]
        count = torch.tensor([n for _, n in members])[:, None]
        column = torch.arange(length)[None]
        rows = begin + torch.minimum(column, count - 1)
        blocks.append(rows)
        place = offset + torch.arange(rows.numel()).view_as(rows)
        inside = column < count
        inverse[rows[inside]] = place[inside]
        offset += rows.numel()
    longest = max((end - start for start, end in pairwise(starts)), default=0)
    return Packing(qkv_format="sbhd", max_seqlen_q=longest, max_seqlen_kv=longest, blocks=blocks, inverse=inverse)


class PackedAttention(nn.Module):
    """Causal attention, sequence by sequence, in place of megatron's DotProductAttention (which refuses packing)."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, packed_seq_params: Packing, **_: object
    ) -> Tensor:
        """query [T, 1, heads, dim], key and value [T, 1, groups, dim]; returns [T, 1, heads * dim]."""
        outputs = []
        for rows in packed_seq_params.blocks:
            q, k, v = (
                x[:, 0].index_select(0, rows.flatten()).view(*rows.shape, *x.shape[2:]) for x in (query, key, value)
            )
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,  # filling stands at the end, so no real row sees it
                scale=self.scale,
                enable_gqa=q.shape[2] != k.shape[2],
            )
            outputs.append(out.transpose(1, 2).reshape(rows.numel(), -1))
        packed = torch.cat(outputs).index_select(0, packed_seq_params.inverse)
        return packed[:, None]


class PositionRotary(nn.Module):
    """Rotary angles of each row's own position, in place of megatron's RotaryEmbedding (positions 0 to T).

    `positions`, int64 [T], is set before each forward pass; the angles are computed in the model's preamble and passed
    down, so a recomputed layer sees those of its own micro-batch.
    """

    def __init__(self, inverse_frequency: Tensor) -> None:
        super().__init__()
        self.inverse_frequency = inverse_frequency
        self.positions = torch.empty(0, dtype=torch.int64)

    def get_rotary_seq_len(self, *_: object) -> int:
        """Number of rows."""
        return int(self.positions.shape[0])

    def forward(self, *_: object, **__: object) -> Tensor:
        """float32 [T, 1, 1, dim]."""
        angles = torch.outer(self.positions.float(), self.inverse_frequency)
        return torch.cat((angles, angles), dim=-1)[:, None, None]


class ShardedRMSNorm(nn.RMSNorm):
    """RMSNorm that may stand in a sequence-parallel region, which megatron's torch norm refuses (torch_norm.py:50)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def adapt_spec(spec: Any) -> Any:
    """megatron's local block spec with the attention and the norm above; changes and returns `spec`."""
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    _replace_norms(spec)
    return spec


def _replace_norms(node: Any) -> None:
    if isinstance(node, (list, tuple)):
        for item in node:
            _replace_norms(item)
    elif dataclasses.is_dataclass(node):
        for each in dataclasses.fields(node):
            value = getattr(node, each.name)
            if value is WrappedTorchNorm:
                setattr(node, each.name, ShardedRMSNorm)
            else:
                _replace_norms(value)
