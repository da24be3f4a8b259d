"""What every loss is made of: the tokens of a micro-batch, sums by sequence, clipping and aggregation.

Invariant: a position outside `active` contributes exactly zero to every value and gradient, whatever it holds, inf and
NaN included; and the denominators are those of the whole optimizer step, so the loss is the same under every layout and
micro-batching.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batch import MicroBatch
from trainer.losses.catalogue import Aggregation

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """One micro-batch as the losses see it; all tensors [T] on one device.

    log_probs: float32, log pi, with gradient; zero where not active. log_ratio: float32, log pi - log mu with gradient,
    unclamped; zero where not active. behaviour: float32, log mu; zero where not active. advantages: float32, zero where
    not active. active: bool, trainable positions whose log-ratio is finite. segments: int64, sequence of each row, S
    for padding. sequences: S. entropy: float32, of pi; zero where not active. nonfinite: int64 scalar, trainable
    positions that left because their log-ratio is not finite.
    """

    log_probs: Tensor
    log_ratio: Tensor
    behaviour: Tensor
    advantages: Tensor
    active: Tensor
    segments: Tensor
    sequences: int
    entropy: Tensor
    nonfinite: Tensor


@dataclass(frozen=True, slots=True)
class Denominators:
    """Over the whole optimizer step and all data-parallel ranks: active tokens, and sequences that have any."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """What a loss function returns, all [T].

    values: J of each token, to be maximised, with gradient. clipped: bool, positions whose gradient the loss has set to
    zero. radius_low, radius_high: the clip radii used, None for losses without them. newly_clipped: bool, clipped by
    SAT and not by the plain radii; None without SAT. gated: bool, above the staleness gate; None without SAT.
    contraction: the share of the radius kept, smaller of both sides; None without SAT.
    """

    values: Tensor
    clipped: Tensor
    radius_low: Tensor | None = None
    radius_high: Tensor | None = None
    newly_clipped: Tensor | None = None
    gated: Tensor | None = None
    contraction: Tensor | None = None


def as_float(x: Tensor) -> Tensor:
    """float32, or float64 if it already is (oracles)."""
    return x if x.dtype == torch.float64 else x.float()


def tokens_of(batch: MicroBatch, log_probs: Tensor, entropy: Tensor | None = None) -> Tokens:
    """Prepare a micro-batch: mask first, so that nothing behind the mask can leak.

    log_probs: [T], any float dtype, log pi of labels (cast to float32 before the subtraction). entropy: [T] or None.
    """
    pi, mu = as_float(log_probs), as_float(batch.behaviour_log_probs)
    active = batch.loss_mask & torch.isfinite(pi.detach()) & torch.isfinite(mu)
    zero = torch.zeros((), dtype=pi.dtype, device=pi.device)
    pi = torch.where(active, pi, zero)
    mu = torch.where(active, mu.to(pi.dtype), zero)
    measured = torch.zeros_like(pi) if entropy is None else torch.where(active, as_float(entropy).to(pi.dtype), zero)
    return Tokens(
        log_probs=pi,
        log_ratio=pi - mu,
        behaviour=mu,
        advantages=torch.where(active, as_float(batch.advantages).to(pi.dtype), zero),
        active=active,
        segments=batch.segments(),
        sequences=batch.sequences,
        entropy=measured,
        nonfinite=(batch.loss_mask & ~active).sum(),
    )


def sequence_sum(values: Tensor, tokens: Tokens) -> Tensor:
    """Sum of [T] values over each sequence: [S + 1], the last for padding."""
    out = torch.zeros(tokens.sequences + 1, dtype=values.dtype, device=values.device)
    return out.index_add(0, tokens.segments, values)


def active_counts(tokens: Tokens) -> Tensor:
    """Active tokens of each sequence: [S + 1], of log_probs' dtype."""
    return sequence_sum(tokens.active.to(tokens.log_probs.dtype), tokens)


def sequence_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Mean of [T] values (zero where not active) over the active tokens of each sequence: [S + 1]; 0 where none is."""
    return sequence_sum(values, tokens) / active_counts(tokens).clamp_min(1)


def spread(per_sequence: Tensor, tokens: Tokens) -> Tensor:
    """[S + 1] -> [T]: each row gets its sequence's number."""
    return per_sequence.index_select(0, tokens.segments)


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to [-20, 20]; no gradient where the clamp acts."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clip_min(r: Tensor, advantages: Tensor, low: Tensor, high: Tensor, dual: float = 0.0) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, low, high) A) and where its gradient is zero because of the clip.

    r, advantages: [T]. low, high: [T], detached. dual: if above 0, J >= dual A where A < 0 (dual clip, arXiv
    1912.09729). Written out by cases rather than with torch.minimum, whose gradient is halved between equal arguments.
    """
    above = (advantages > 0) & (r > high)
    below = (advantages < 0) & (r < low)
    value = torch.where(above, high * advantages, torch.where(below, low * advantages, r * advantages))
    clipped = above | below
    if dual > 0:
        too_far = (advantages < 0) & (r > dual)
        value = torch.where(too_far, dual * advantages, value)
        clipped = clipped | too_far
    return value, clipped


def aggregate(values: Tensor, tokens: Tokens, denominators: Denominators, how: Aggregation, length: int) -> Tensor:
    """This micro-batch's share of the mean of [T] values over the step; scalar.

    token-mean: sum / active tokens. sequence-mean: mean over non-empty sequences of their token mean. constant: sum /
    (non-empty sequences x length). A step without active tokens gives 0.
    """
    masked = torch.where(tokens.active, values, torch.zeros_like(values))
    if how == "token-mean":
        return masked.sum() / max(denominators.tokens, 1)
    if how == "sequence-mean":
        return sequence_mean(masked, tokens).sum() / max(denominators.sequences, 1)
    return masked.sum() / (max(denominators.sequences, 1) * length)
