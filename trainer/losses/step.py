"""From a resolved loss to the function that forward_backward calls: what must be known of the whole step comes first.

Invariant: the loss of a step is the sum of what the function returns over all micro-batches and data-parallel ranks,
the same under every layout and micro-batching (with the scope `microbatch`, SAT's gate is the one exception).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.batch import MicroBatch
from trainer.losses.catalogue import LossSettings
from trainer.losses.policy import FUNCTIONS, StepContext, second_moments
from trainer.losses.sat import OFF, Gate, measure_gate
from trainer.losses.tokens import (
    LOG_RATIO_BOUND,
    Denominators,
    Objective,
    Tokens,
    active_counts,
    aggregate,
    as_float,
    tokens_of,
)
from trainer.ports import LossFunction
from trainer.quantile import SumCounts, alone, prefix_mean_threshold


def denominators(
    batches: Sequence[MicroBatch], log_probs: Sequence[Tensor] | None, sum_over: SumCounts
) -> Denominators:
    """Active tokens and non-empty sequences over all micro-batches and ranks. Collective.

    log_probs: of the pass before the update, if one was made: then tokens whose log-prob is not finite are left out
    too. Otherwise only what can be seen without the model: mask and the engine's log-probs.
    """
    count = torch.zeros(2, dtype=torch.int64)
    for index, batch in enumerate(batches):
        scores = torch.zeros(batch.tokens) if log_probs is None else log_probs[index]
        counts = active_counts(tokens_of(batch, scores.to(batch.token_ids.device)))[:-1]
        count += torch.stack([counts.sum().to(torch.int64), (counts > 0).sum()]).cpu()
    tokens, sequences = sum_over(count).tolist()
    return Denominators(int(tokens), int(sequences))


def prepare(
    settings: LossSettings,
    batches: Sequence[MicroBatch],
    log_probs: Sequence[Tensor] | None,
    *,
    previous: Gate | None = None,
    sum_over: SumCounts = alone,
) -> StepContext:
    """All that the loss needs to know of the step. Collective over the data-parallel ranks.

    log_probs: of the pass before the update, [T] each; required if settings.needs_log_prob_pass. previous: the global
    gate of the step before (scope `lagged`; none yet: SAT is off for one step).
    """
    counts = denominators(batches, log_probs, sum_over)
    parts: list[Tokens] = []
    if log_probs is not None:
        parts = [tokens_of(b, scores) for b, scores in zip(batches, log_probs, strict=True)]
    gate = None
    if settings.entry.sat and settings.sat.scope == "global":
        gate = measure_gate(parts, settings.sat, sequence=settings.entry.sequence, sum_counts=sum_over)
    elif settings.entry.sat and settings.sat.scope == "lagged":
        gate = previous or OFF
    threshold = None
    if settings.entry.batch_threshold:
        moments = torch.cat([second_moments(t)[t.active] for t in parts]) if parts else torch.zeros(0)
        threshold = prefix_mean_threshold(moments, settings.parameters["threshold"], sum_over=sum_over)
    return StepContext(counts, gate, threshold)


def loss_function(settings: LossSettings, context: StepContext) -> LossFunction:
    """The function that forward_backward calls for each micro-batch.

    It reports, all detached: loss [] float64; log_probs, entropy float32 [T]; clipped bool [T]; and for SAT
    newly_clipped and gated bool [T], contraction, radius_low and radius_high float32 [T]; with a reference model
    reference_kl float32 [T]. Each micro-batch of a run reports the same names.
    """
    kernel = FUNCTIONS[settings.entry.function]

    def evaluate(batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = tokens_of(batch, log_probs, entropy)
        objective = kernel(tokens, settings, context)

        def mean(values: Tensor) -> Tensor:
            return aggregate(values, tokens, context.denominators, settings.aggregation, settings.constant_length)

        loss = -mean(objective.values)
        if settings.entropy_coefficient:
            loss = loss - settings.entropy_coefficient * mean(tokens.entropy)
        penalty = None
        if settings.reference_kl:
            penalty = reference_penalty(batch, tokens)
            loss = loss + settings.reference_kl * mean(penalty)
        # A loss without active tokens must still belong to the graph: pipelines and DDP expect a backward on each rank.
        loss = loss + 0.0 * tokens.log_probs.sum()
        report = _report(loss, log_probs, tokens, objective, sat=settings.entry.sat)
        return loss, report if penalty is None else report | {"reference_kl": penalty.detach().float()}

    return evaluate


class StepLoss:
    """The loss of one optimizer step, as forward_backward calls it: what it must know of the step is measured once.

    Either before the first micro-batch, by `measure`; or, where every rank has one micro-batch alone, by the first
    call: that micro-batch's forward pass is the log-prob pass that the settings want, and no other is made. Collective.
    """

    def __init__(self, settings: LossSettings, *, previous: Gate | None = None, sum_over: SumCounts = alone) -> None:
        self._settings, self._previous, self._sum_over = settings, previous, sum_over
        self._context: StepContext | None = None
        self._only: MicroBatch | None = None

    @property
    def context(self) -> StepContext:
        """What was measured."""
        if self._context is None:
            raise ValueError("the step is not measured yet")
        return self._context

    def measure(self, batches: Sequence[MicroBatch], log_probs: Sequence[Tensor] | None) -> None:
        """See `prepare`."""
        self._context = prepare(self._settings, batches, log_probs, previous=self._previous, sum_over=self._sum_over)

    def __call__(self, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `loss_function`."""
        if self._context is None:
            self._only = batch
            self.measure([batch], [log_probs.detach()])
        elif self._only is not None and self._only is not batch:
            raise ValueError("a step of several micro-batches is to be measured before the first of them")
        return loss_function(self._settings, self.context)(batch, log_probs, entropy)


def reference_penalty(batch: MicroBatch, tokens: Tokens) -> Tensor:
    """k3 = exp(f - l) - (f - l) - 1 of each token, [T], with gradient; f = batch.reference_log_probs.

    An estimate of KL(pi || reference) that is never negative, as in GRPO (arXiv 2402.03300, equation 4). Zero where not
    active, and where the reference's log-prob is not finite; f - l is clamped to [-20, 20].
    """
    if batch.reference_log_probs is None:
        raise ValueError("the loss wants reference_log_probs, and the micro-batch has none")
    reference = as_float(batch.reference_log_probs).to(tokens.log_probs.dtype)
    counted = tokens.active & torch.isfinite(reference)
    distance = torch.where(counted, reference, tokens.log_probs.detach()) - tokens.log_probs
    distance = torch.where(counted, distance, torch.zeros_like(distance)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return distance.exp() - distance - 1


def _report(loss: Tensor, log_probs: Tensor, tokens: Tokens, objective: Objective, *, sat: bool) -> dict[str, Tensor]:
    report = {
        "loss": loss.detach().to(torch.float64),
        "log_probs": log_probs.detach().float(),
        "entropy": tokens.entropy.detach().float(),
        "clipped": objective.clipped,
    }
    if sat:
        for name in ("newly_clipped", "gated", "contraction", "radius_low", "radius_high"):
            value = getattr(objective, name)
            report[name] = value if value.dtype == torch.bool else value.float()
    return report
