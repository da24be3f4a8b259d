"""From this rank's samples to updated weights: packing, loss, gradients, optimizer steps.

Invariant: a loss or a gradient that is not finite is never applied. Every rank takes the same steps in the same order.

One batch is one version. With `trainer.steps_per_batch` above 1 its samples are split into as many parts of about
equal tokens, and each part makes an optimizer step of its own: loss, SAT's quantile and denominators are those of the
part, the behaviour policy stays that of the engine, and the lag of all parts is that of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from configs.schema import RunConfig
from trainer.batch import MicroBatch, RouteShape, Sample, balance
from trainer.data import micro_batches
from trainer.losses.catalogue import LossSettings
from trainer.losses.sat import Gate
from trainer.losses.step import StepLoss
from trainer.ports import PolicyPort, Ranks
from trainer.quantile import SumCounts
from trainer.schedule import learning_rate, staleness_factor
from trainer.statistics import step_statistics
from trainer.timing import Stopwatch


@dataclass(frozen=True, slots=True)
class Moment:
    """When a batch is trained. step: optimizer batches before it. version: of the weights. bound: on lag, in versions.

    gate: SAT's of the step before."""

    step: int
    version: int
    bound: int
    gate: Gate | None


class NotFinite(Exception):
    """A loss or gradient is not finite: nothing of this part was applied. The message says which."""

    def __init__(self, what: str, batches: Sequence[MicroBatch], reports: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(what)
        self.batches, self.reports = batches, reports


class Updater:
    """Trains batches on one rank."""

    def __init__(
        self,
        config: RunConfig,
        settings: LossSettings,
        *,
        ranks: Ranks,
        policy: PolicyPort,
        route_shape: RouteShape | None,
        sum_over: SumCounts,
    ) -> None:
        """sum_over: sums over the data-parallel ranks."""
        self._config, self._settings = config, settings
        self._ranks, self._policy = ranks, policy
        self._route_shape, self._sum = route_shape, sum_over

    def train(self, samples: Sequence[Sample], at: Moment, watch: Stopwatch) -> tuple[dict[str, Any], Gate | None]:
        """Take the steps of one batch; its record (docs/losses.md, "Metrics") and SAT's gate. Collective.

        Raises NotFinite.
        """
        parts, gate = self._parts(samples), at.gate
        batches: list[MicroBatch] = []
        reports: list[dict[str, Tensor]] = []
        norms: list[float] = []
        record: dict[str, Any] = {}
        for part in parts:
            own, found, record, gate = self._one_step(part, replace(at, gate=gate), watch)
            batches, reports, norms = batches + own, reports + found, [*norms, record["grad_norm"]]
        if len(parts) > 1:
            whole, gate = self._statistics(batches, reports, at, None)
            record |= whole | {"loss": whole["loss"] / len(parts), "grad_norm": sum(norms) / len(norms)}
        return record, gate

    def _parts(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        members = balance([s.trajectory.tokens for s in samples], self._config.trainer.steps_per_batch)
        return [[samples[i] for i in part] for part in members]

    def _one_step(
        self, samples: Sequence[Sample], at: Moment, watch: Stopwatch
    ) -> tuple[list[MicroBatch], list[dict[str, Tensor]], dict[str, Any], Gate | None]:
        trainer = self._config.trainer
        with watch.measure("pack_s"):
            multiple = trainer.layout.tensor
            batches = micro_batches(samples, trainer.micro_batch_tokens, self._route_shape, multiple, self._ranks)
        with watch.measure("log_prob_s"):
            batches, loss = self._prepare(batches, at.gate)
        with watch.measure("forward_backward_s"):
            reports = self._policy.forward_backward(
                batches, loss, entropy_gradient=self._settings.entropy_coefficient > 0
            )
            self._check_finite(batches, reports)
        record, gate = self._statistics(batches, reports, at, loss.context.gate)
        rate = learning_rate(trainer.optimizer, at.step, self._config.run.steps)
        rate *= staleness_factor(trainer.optimizer, record["lag_mean"], record["ess"])
        with watch.measure("optimizer_s"):
            norm, applied = self._policy.optimizer_step(rate)
        if not applied:
            raise NotFinite("the optimizer refused the step: a gradient is not finite", batches, reports)
        overlap = None if self._route_shape is None else self._policy.replay_metrics().overlap
        return batches, reports, record | {"grad_norm": norm, "learning_rate": rate, "replay_overlap": overlap}, gate

    def _prepare(self, batches: list[MicroBatch], gate: Gate | None) -> tuple[list[MicroBatch], StepLoss]:
        """The micro-batches with all that the loss wants of each, and the loss with what it wants to know of all."""
        loss = StepLoss(self._settings, previous=gate, sum_over=self._sum)
        if self._settings.reference_kl:
            found = self._policy.reference_log_probs(batches)
            batches = [replace(b, reference_log_probs=s.log_probs) for b, s in zip(batches, found, strict=True)]
        if not self._settings.needs_log_prob_pass:
            loss.measure(batches, None)
        elif len(batches) > 1 or self._config.trainer.layout.pipeline > 1:  # other stages see no loss
            loss.measure(batches, [scores.log_probs for scores in self._policy.log_probs(batches)])
        return batches, loss

    def _check_finite(self, batches: Sequence[MicroBatch], reports: Sequence[Mapping[str, Tensor]]) -> None:
        loss = sum((float(report["loss"]) for report in reports), 0.0)
        bad = torch.tensor([0 if math.isfinite(loss) else 1], dtype=torch.int64)
        bad_losses = int(self._sum(bad).sum())
        if bad_losses or not self._policy.gradients_finite():
            raise NotFinite(f"the {'loss' if bad_losses else 'gradient'} is not finite", batches, reports)

    def _statistics(
        self, batches: Sequence[MicroBatch], reports: Sequence[Mapping[str, Tensor]], at: Moment, gate: Gate | None
    ) -> tuple[dict[str, Any], Gate | None]:
        return step_statistics(
            batches,
            reports,
            version=at.version,
            max_lag=at.bound,
            settings=self._settings,
            gate=gate,
            sum_over=self._sum,
        )
