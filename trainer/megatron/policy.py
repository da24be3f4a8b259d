"""The policy model: Megatron's GPTModel under its own DDP and optimizer, with the weights of a Hugging Face folder.

Invariants: gradients are exactly the sum of the micro-batches' losses over all data-parallel ranks, in every layout; a
gradient that is not finite is never applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from configs.load import ConfigError
from configs.schema import RunConfig
from trainer.batch import MicroBatch
from trainer.megatron.model_config import ModelShape, read_model_shape
from trainer.megatron.parallel import Parallel
from trainer.ports import LossFunction

if TYPE_CHECKING:
    from trainer.megatron.model import Parts


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What the current weights say about one micro-batch.

    log_probs: float32 [T], log-prob of labels[t] at the sampling temperature. entropy: float32 [T], of the distribution
    over the next token at that temperature, in nats. Rows without a label hold some number and are to be masked.
    """

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class ReplayMetrics:
    """Routing replay over one forward_backward, summed over layers and micro-batches of this pipeline, all data ranks.

    replayed_rows, own_rows, padding_rows: (token, layer) pairs whose experts came from the trace, from the live router,
    or were spread out because nothing depends on them. overlap: mean share, in [0, 1], of the live top-k that the trace
    agrees with, over replayed rows; None if there were none.
    """

    replayed_rows: int
    own_rows: int
    padding_rows: int
    overlap: float | None


class PolicyModel:
    """One policy, spread over the ranks of `parallel`. Every method is collective: call it on all ranks alike."""

    def __init__(self, config: RunConfig, parallel: Parallel, parts: Parts, source: Path) -> None:
        self.config = config
        self.parallel = parallel
        self.parts = parts
        self._source = source
        self._replayed: Tensor | None = None
        self._finite: bool | None = None  # of the gradients that are there; None: not looked at yet
        # Before a checkpoint is loaded, the parameters are those of model.path: the reference, whatever came after.
        wanted = config.trainer.loss.reference_kl > 0
        self._reference = [p.detach().to("cpu", copy=True) for p in parts.gpt.parameters()] if wanted else None

    @classmethod
    def create(cls, config: RunConfig, parallel: Parallel, model_folder: Path) -> PolicyModel:
        """Build the model that model_folder/config.json describes, load its weights, make the optimizer.

        Call inside `parallel.parallel`. Raises ConfigError when model and layout do not fit, for a model family that is
        not known, and for a dense model where trainer.routing_replay is "required".
        """
        from trainer.megatron.model import build  # after compat.install, which `parallel` calls

        shape = read_model_shape(model_folder)
        if not shape.experts and config.trainer.routing_replay == "required":
            raise ConfigError(
                f"trainer.routing_replay is required, but {model_folder} is a dense model without experts. "
                "Set trainer.routing_replay: available (or off)."
            )
        return cls(config, parallel, build(config, parallel.device, model_folder), model_folder)

    @property
    def shape(self) -> ModelShape:
        """The model as its config.json describes it."""
        return self.parts.shape

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[TokenScores]:
        """Score micro-batches without gradients, with routing replay as in training.

        The answer is the same on all pipeline and tensor ranks. The number of micro-batches must
        be the same on all data-parallel ranks (fill up with empty ones). Tensors are on the CPU. Raises InvalidRoutes.
        """

        def output(_: MicroBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return scores.sum(), {"scores": scores}

        with torch.no_grad():
            reports = self._run(micro_batches, output, training=False)
        return [TokenScores(report["scores"][0], report["scores"][1]) for report in reports]

    def reference_log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[TokenScores]:
        """`log_probs` of the model that model.path holds; needs trainer.loss.reference_kl above 0.

        The weights trade places for the pass, so it takes the memory of two copies of this rank's part on the CPU.
        """
        if self._reference is None:
            raise ValueError("trainer.loss.reference_kl is 0: no reference model was kept")
        parameters = list(self.parts.gpt.parameters())
        own = [p.detach().to("cpu", copy=True) for p in parameters]
        try:
            self._hold(parameters, self._reference)
            return self.log_probs(micro_batches)
        finally:
            self._hold(parameters, own)

    @staticmethod
    def _hold(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, *, entropy_gradient: bool = False
    ) -> list[dict[str, Tensor]]:
        """Add the gradients of these micro-batches' losses to the gradient buffers (zeroed by optimizer_step).

        Returns the named tensors of the loss function, one dict per micro-batch of this data-parallel rank, detached,
        on the CPU, the same on all pipeline and tensor ranks. To be called once per optimizer step, with the same
        number of micro-batches on all data-parallel ranks. Raises InvalidRoutes; what the micro-batches before added
        is still there then.
        """

        def output(batch: MicroBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            entropy = scores[1] if entropy_gradient else scores[1].detach()
            loss, report = loss_function(batch, scores[0], entropy)
            # The schedule may change tensors in place afterwards, so what is reported is copied now.
            return loss, {name: value.detach().clone() for name, value in report.items()}

        return self._run(micro_batches, output, training=True)

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        output: Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]],
        *,
        training: bool,
    ) -> list[dict[str, Tensor]]:
        from trainer.megatron import schedule  # after compat.install

        self._finite = None
        finished = False
        try:
            reports = schedule.run(
                self.parts,
                micro_batches,
                output,
                mode=self.config.trainer.routing_replay,
                temperature=self.config.rollout.temperature,
                training=training,
                device=self.parallel.device,
            )
            finished = True
        finally:
            if self.parts.replay is not None:
                counts = self.parts.replay.finish(training=training and finished)
                if training:
                    self._replayed = counts
        return reports

    def replay_metrics(self) -> ReplayMetrics:
        """Routing replay in the last forward_backward, over all ranks. Collective."""
        counts = torch.zeros(4, dtype=torch.float64) if self._replayed is None else self._replayed
        if self.parallel.world > 1:
            counts = counts.to(self.parallel.device, copy=True)
            dist.all_reduce(counts)
        own, replayed, padding, agreed = counts.tolist()
        return ReplayMetrics(
            replayed_rows=int(replayed),
            own_rows=int(own),
            padding_rows=int(padding),
            overlap=agreed / replayed if replayed else None,
        )

    def gradients_finite(self) -> bool:
        """True if every gradient on every rank is finite; the same answer on every rank. Looked at once a step."""
        if self._finite is None:
            ddp = self.parts.wrapped
            buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
            finite = torch.stack([torch.isfinite(buffer.grad_data.sum()) for buffer in buffers]).all().int()
            if self.parallel.world > 1:
                dist.all_reduce(finite, dist.ReduceOp.MIN)
            self._finite = bool(finite)
        return self._finite

    def optimizer_step(self, learning_rate: float) -> tuple[float, bool]:
        """Clip and apply the gradients, then zero them: (global norm before clipping, applied).

        applied is False, the norm is NaN, and weights and optimizer state are untouched, if a gradient is not finite.
        """
        optimizer = self.parts.optimizer
        norm, applied = float("nan"), self.gradients_finite()
        if applied:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            updated, total, _ = optimizer.step()
            norm, applied = float(total or 0.0), bool(updated)
        self.zero_gradients()
        return norm, applied

    def zero_gradients(self) -> None:
        """Drop what forward_backward added."""
        self._finite = None
        self.parts.wrapped.zero_grad_buffer()
        self.parts.optimizer.zero_grad()

    def stage_export(self, folder: Path) -> Callable[[], None]:
        """Copy the weights to memory now; the function that is returned writes them as a Hugging Face folder.

        The copy needs no other rank. The writing is collective, may run on any thread beside the training, and must be
        called in the same order on all ranks (see export.write_hf).
        """
        from trainer.megatron import export  # after compat.install

        staged = export.stage(self.parts.gpt, self.parts.shape)
        return lambda: export.write_hf(staged, self._source, folder, self.parallel.writers)
