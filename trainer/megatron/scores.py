"""Log-probs and entropies from hidden states, chunk by chunk and shard by shard of the vocabulary.

Invariant: logits exist for one chunk of rows at a time, in the forward and in the backward pass; no process ever holds
those of a whole micro-batch.

With z = W h / temperature, p = softmax(z) and H = -sum p log p (in nats):
    log p[y] = z[y] - logsumexp(z)         d log p[y] / dz = onehot(y) - p
    H = logsumexp(z) - sum p z             dH / dz         = -p (log p + H)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits of one chunk on one rank: 64 MiB of float32."""


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: Any, chunk: int
    ) -> Tensor:
        first = dist.get_rank(group) * weight.shape[0] if group is not None else 0
        out = torch.empty(3, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part] @ weight.t()).float().div_(temperature)
            largest = logits.max(-1).values
            if group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            shifted = logits.sub_(largest[:, None])
            local = labels[part] - first
            inside = (local >= 0) & (local < weight.shape[0])
            target = shifted.gather(1, local.clamp(0, weight.shape[0] - 1)[:, None])[:, 0] * inside
            powers = shifted.exp()
            sums = torch.stack((powers.sum(-1), (powers * shifted).sum(-1), target))
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            out[0, part] = sums[2] - log_sum
            out[1, part] = log_sum - sums[1] / sums[0]
            out[2, part] = largest + log_sum
        context.save_for_backward(hidden, weight, labels, out[1], out[2])
        context.settings = temperature, first, chunk
        return out[:2]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, entropy, log_sum = context.saved_tensors
        temperature, first, chunk = context.settings
        by_log_prob, by_entropy = gradients[0]
        to_hidden, to_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        entropy_counts = bool(by_entropy.any())
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            log_p = (hidden[part] @ weight.t()).float().div_(temperature).sub_(log_sum[part, None])
            slope = log_p.exp()
            if entropy_counts:
                factor = by_log_prob[part, None] + by_entropy[part, None] * (log_p + entropy[part, None])
                slope.mul_(factor).neg_()
            else:
                slope.mul_(-by_log_prob[part, None])
            local = labels[part] - first
            inside = (local >= 0) & (local < weight.shape[0])
            slope.scatter_add_(1, local.clamp(0, weight.shape[0] - 1)[:, None], (by_log_prob[part] * inside)[:, None])
            slope.div_(temperature)
            to_hidden[part] = slope.to(hidden.dtype) @ weight
            to_weight += (slope.to(hidden.dtype).t() @ hidden[part]).float()
        return to_hidden, to_weight.to(weight.dtype), None, None, None, None


def token_scores(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: Any = None, chunk: int | None = None
) -> Tensor:
    """float32 [2, T]: log-prob of labels[t] and entropy, at `temperature`.

    hidden: [T, hidden], all rows, the same on all ranks of `group`. weight: [vocabulary / ranks, hidden], this rank's
    shard of the output layer. labels: int64 [T], over the whole vocabulary. group: tensor-parallel process group, None
    for one rank. The gradient of `hidden` is this shard's part: whoever made `hidden` sums it over the group.
    """
    rows = chunk or max(1, CHUNK_ELEMENTS // weight.shape[0])
    return _Scores.apply(hidden, weight, labels, temperature, group, rows)  # type: ignore[no-any-return, no-untyped-call]
