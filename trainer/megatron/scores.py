"""Log-probs and entropies from hidden states, chunk by chunk and shard by shard of the vocabulary.

Invariant: logits exist for one chunk of rows at a time, in the forward and in the backward pass. Only a micro-batch
with at most KEEP_ELEMENTS of probabilities keeps them for its backward pass; the others compute them again.

With z = W h / temperature, p = softmax(z) and H = -sum p log p (in nats):
    log p[y] = z[y] - logsumexp(z)         d log p[y] / dz = onehot(y) - p
    H = logsumexp(z) - sum p z             dH / dz         = -p (log p + H)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEEP_ELEMENTS = 1 << 24
"""Probabilities that one micro-batch may keep on one rank: 64 MiB of float32."""
CHUNK_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 19}
"""Logits of one chunk on one rank, by device: few launches there, what fits into a core's cache here."""
_TINY = torch.finfo(torch.float32).tiny


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        group: Any,
        chunk: int,
        most_kept: int,
    ) -> Tensor:
        rows, size = hidden.shape[0], weight.shape[0]
        column, inside = _local(labels, dist.get_rank(group) * size if group is not None else 0, size)
        out = torch.empty(3, rows, dtype=torch.float32, device=hidden.device)
        keep = any(context.needs_input_grad) and rows * size <= most_kept
        kept = torch.empty(rows, size, dtype=torch.float32, device=hidden.device) if keep else None
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            shifted = (hidden[part] @ weight.t()).float().div_(temperature)
            largest = shifted.max(-1).values
            if group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            shifted.sub_(largest[:, None])
            target = shifted.gather(1, column[part])[:, 0] * inside[part]
            powers = torch.exp(shifted, out=kept[part]) if kept is not None else shifted.exp()
            sums = torch.stack((powers.sum(-1), shifted.mul_(powers).sum(-1), target))
            if group is not None:
                dist.all_reduce(sums, group=group)
            if kept is not None:
                powers.div_(sums[0, :, None])
            log_sum = sums[0].log()
            out[0, part] = sums[2] - log_sum
            out[1, part] = log_sum - sums[1] / sums[0]
            out[2, part] = largest + log_sum
        context.save_for_backward(hidden, weight, column, inside, out[1], out[2], kept)
        context.settings = temperature, chunk
        return out[:2]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, column, inside, entropy, log_sum, kept = context.saved_tensors
        temperature, chunk = context.settings
        by_log_prob, by_entropy = gradients[0] / temperature
        with_entropy = bool(by_entropy.any())

        def slope(p: Tensor, part: slice) -> Tensor:
            """The loss's gradient by the logits of some rows, from their probabilities, which it overwrites."""
            at_label = (by_log_prob[part] * inside[part])[:, None]
            if with_entropy:
                factor = p.clamp_min(_TINY).log_().add_(entropy[part, None]).mul_(by_entropy[part, None])
                p.mul_(factor.add_(by_log_prob[part, None])).neg_()
            else:
                p.mul_(-by_log_prob[part, None])
            return p.scatter_add_(1, column[part], at_label).to(hidden.dtype)

        if kept is not None:
            whole = slope(kept, slice(None))
            return whole @ weight, whole.t() @ hidden, None, None, None, None, None
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part] @ weight.t()).float().div_(temperature)
            by_logits = slope(logits.sub_(log_sum[part, None]).exp_(), part)
            to_hidden[part] = by_logits @ weight
            to_weight += (by_logits.t() @ hidden[part]).float()
        return to_hidden, to_weight.to(weight.dtype), None, None, None, None, None


def _local(labels: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """(column of each label in this shard [T, 1], whether it lies in it [T]); first, size: of the shard."""
    local = labels - first
    return local.clamp(0, size - 1)[:, None], (local >= 0) & (local < size)


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    group: Any = None,
    *,
    chunk: int | None = None,
    most_kept: int = KEEP_ELEMENTS,
) -> Tensor:
    """float32 [2, T]: log-prob of labels[t] and entropy, at `temperature`.

    hidden: [T, hidden], all rows, the same on all ranks of `group`. weight: [vocabulary / ranks, hidden], this rank's
    shard of the output layer. labels: int64 [T], over the whole vocabulary. group: tensor-parallel process group, None
    for one rank. chunk: rows at a time. most_kept: see KEEP_ELEMENTS. The gradient of `hidden` is this shard's part:
    whoever made `hidden` sums it over the group.
    """
    rows = chunk or max(1, CHUNK_ELEMENTS[hidden.device.type] // weight.shape[0])
    scores: Tensor = _Scores.apply(hidden, weight, labels, temperature, group, rows, most_kept)  # type: ignore[no-untyped-call]
    return scores
