"""The loss functions of the registry: each one idea on one screen, on packed [T] tokens.

Invariant: pure; J is to be maximised and is aggregated elsewhere, so a function never divides by a count of the
micro-batch. Notation: l = log pi (gradient), m = log mu (the engine's), A advantage, sg = stop-gradient,
r = exp(l - m), w = sg(r). One optimizer step is taken per batch, so pi_old = sg(pi): where a paper writes
(pi_old/mu) (pi/pi_old) A, its gradient is that of w l A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.catalogue import LossSettings
from trainer.losses.sat import OFF, Gate, contraction, measure_gate, staleness
from trainer.losses.tokens import (
    Denominators,
    Objective,
    Tokens,
    clip_min,
    ratio,
    sequence_mean,
    spread,
)


@dataclass(frozen=True, slots=True)
class StepContext:
    """What is known of the whole optimizer step before the first backward.

    gate: SAT's; None: each micro-batch measures its own. threshold: of losses with `batch_threshold`; None likewise.
    """

    denominators: Denominators
    gate: Gate | None = None
    threshold: float | None = None


LossKernel = Callable[[Tokens, LossSettings, StepContext], Objective]


def clipped(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """PPO's clip, with GRPO's or GSPO's ratio, with or without SAT.

    J = min(r A, clip(r, 1 - eps_low c-, 1 + eps_high c+) A); r = exp(l - m) by token, or s = exp(mean (l - m)) by
    sequence (GSPO: gradient through s, dJ/dl_t = s A / |y|). c = 1 without SAT. Sources: GRPO arXiv 2402.03300, GSPO
    2507.18071, SAT 2607.18722; Dr.GRPO 2503.20783 and DAPO 2503.14476 are this with other advantages, radii and means.
    """
    sequence = settings.entry.sequence
    log_ratio = spread(sequence_mean(tokens.log_ratio, tokens), tokens) if sequence else tokens.log_ratio
    r = ratio(log_ratio)
    gate = OFF
    if settings.entry.sat:
        gate = measure_gate([tokens], settings.sat, sequence=sequence) if context.gate is None else context.gate
    c_minus, c_plus, gated = contraction(staleness(tokens, sequence=sequence), gate, settings.sat)
    radius_low, radius_high = settings.clip_low * c_minus, settings.clip_high * c_plus
    dual = settings.parameters["dual_clip"]
    values, cut = clip_min(r, tokens.advantages, 1 - radius_low, 1 + radius_high, dual)
    if not settings.entry.sat:
        return Objective(values, cut & tokens.active, radius_low, radius_high)
    plain = torch.ones_like(c_minus)
    low, high = 1 - settings.clip_low * plain, 1 + settings.clip_high * plain
    _, plainly_cut = clip_min(r.detach(), tokens.advantages, low, high, dual)
    return Objective(
        values,
        cut & tokens.active,
        radius_low,
        radius_high,
        newly_clipped=cut & ~plainly_cut & tokens.active,
        gated=gated & tokens.active,
        contraction=torch.minimum(c_minus, c_plus),
    )


def gspo_token(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """GSPO-token: ratio sg(s) pi / sg(pi). Equal in value to GSPO; the gradient is by token: dJ/dl_t = s A_t.

    Source: arXiv 2507.18071, section 4.3.
    """
    log_s = spread(sequence_mean(tokens.log_ratio.detach(), tokens), tokens)
    r = ratio(log_s) * torch.exp(tokens.log_probs - tokens.log_probs.detach())
    low, high = torch.full_like(r, 1 - settings.clip_low), torch.full_like(r, 1 + settings.clip_high)
    values, cut = clip_min(r, tokens.advantages, low, high)
    return Objective(values, cut & tokens.active)


def cispo(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """CISPO: J = sg(clip(r, 1 - eps_low, 1 + eps_high)) A l. No token loses its gradient. arXiv 2506.13585."""
    w = ratio(tokens.log_ratio.detach()).clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return _weighted(tokens, w)


def truncated(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """TIS: J = min(w, C) A l, C = parameters.cap."""
    return _weighted(tokens, ratio(tokens.log_ratio.detach()).clamp_max(settings.parameters["cap"]))


def banded(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """IcePop, MIS: J = w A l inside the band low <= w <= high, else 0 (the denominator stays)."""
    w = ratio(tokens.log_ratio.detach())
    kept = (w >= settings.parameters["low"]) & (w <= settings.parameters["high"])
    return _weighted(tokens, w, kept)


def geometric_rejection(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """Geo-RS: a sequence is kept iff low <= exp(mean log w) <= high; unweighted, or by w if parameters.weight.

    The denominator stays as it was.
    """
    w = ratio(tokens.log_ratio.detach())
    geometric = ratio(spread(sequence_mean(tokens.log_ratio.detach(), tokens), tokens))
    kept = (geometric >= settings.parameters["low"]) & (geometric <= settings.parameters["high"])
    return _weighted(tokens, w if settings.parameters["weight"] else torch.ones_like(w), kept)


def decoupled(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """Decoupled PPO (AReaL): J = (pi_prox/mu) min(u A, clip(u) A), u = pi/pi_prox. arXiv 2505.24298.

    pi_prox is the policy before this step, so u = 1 in value: clip never acts with one step a batch, and the gradient
    is w A grad l.
    """
    w = ratio(tokens.log_ratio.detach())
    u = torch.exp(tokens.log_probs - tokens.log_probs.detach())
    ones = torch.ones_like(w)
    values, cut = clip_min(u, tokens.advantages, (1 - settings.clip_low) * ones, (1 + settings.clip_high) * ones)
    return Objective(w * values, cut & tokens.active)


def second_moment(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """M2PO: drop the tokens of the largest (log r)^2 until the mean of the rest is below tau. arXiv 2510.01161.

    J = r A where (log r)^2 <= context.threshold (measured over the whole step), else 0.
    """
    squared = second_moments(tokens)
    threshold = float("inf") if context.threshold is None else context.threshold
    return _ratio_kept(tokens, squared <= threshold)


def total_variation(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """DPPO-TV: drop a token that moves outward by more than delta in probability; J = r A for the others. 2602.04879.

    A > 0 drops pi - mu > delta, A < 0 drops pi - mu < -delta, pi and mu of the sampled token.
    """
    moved = tokens.log_probs.detach().exp() - tokens.behaviour.exp()
    delta = settings.parameters["delta"]
    dropped = ((tokens.advantages > 0) & (moved > delta)) | ((tokens.advantages < 0) & (moved < -delta))
    return _ratio_kept(tokens, ~dropped)


def off_policy_sequence_mask(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """OPSM: drop the tokens with A < 0 of a sequence whose mean(log mu - log pi) is above delta; else J = r A."""
    drift = spread(sequence_mean(-tokens.log_ratio.detach(), tokens), tokens)
    return _ratio_kept(tokens, ~((tokens.advantages < 0) & (drift > settings.parameters["delta"])))


def entropy_scaled(tokens: Tokens, settings: LossSettings, context: StepContext) -> Objective:
    """ESTR: keep a token iff (log r)^2 / (H + epsilon) <= tau; J = r A for the others.

    H should be the behaviour's entropy; the engine does not report it, so the trainer's own, detached, stands in.
    """
    measure = second_moments(tokens) / (tokens.entropy.detach().clamp_min(0) + settings.parameters["epsilon"])
    return _ratio_kept(tokens, measure <= settings.parameters["threshold"])


def second_moments(tokens: Tokens) -> Tensor:
    """(log r)^2 of each token with the log-ratio clamped to [-20, 20], [T], detached."""
    return staleness(tokens, sequence=False) ** 2


def _weighted(tokens: Tokens, w: Tensor, kept: Tensor | None = None) -> Objective:
    """J = sg(w) A l where kept: the policy gradient with an importance weight."""
    none = torch.zeros_like(tokens.active)
    dropped = none if kept is None else ~kept & tokens.active
    values = torch.where(dropped, torch.zeros_like(w), w.detach() * tokens.advantages * tokens.log_probs)
    return Objective(values, dropped)


def _ratio_kept(tokens: Tokens, kept: Tensor) -> Objective:
    """J = r A where kept, else 0 without gradient; the denominator stays."""
    values = ratio(tokens.log_ratio) * tokens.advantages
    return Objective(torch.where(kept, values, torch.zeros_like(values)), ~kept & tokens.active)


FUNCTIONS: dict[str, LossKernel] = {
    "clipped": clipped,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "truncated": truncated,
    "banded": banded,
    "geometric_rejection": geometric_rejection,
    "decoupled": decoupled,
    "second_moment": second_moment,
    "total_variation": total_variation,
    "off_policy_sequence_mask": off_policy_sequence_mask,
    "entropy_scaled": entropy_scaled,
}
