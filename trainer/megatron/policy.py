"""The policy model: Megatron's GPTModel under its own DDP and optimizer, with the weights of a Hugging Face folder.

Invariants: gradients are exactly the sum of the micro-batches' losses over all data-parallel ranks, in every layout; a
gradient that is not finite is never applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from configs.schema import RunConfig
from trainer.batch import MicroBatch
from trainer.megatron.parallel import Parallel

LossFunction = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, log_probs float32 [T], entropy float32 [T]) -> (scalar loss, named tensors to report).

log_probs carry a gradient; the entropy carries one only if forward_backward was asked for it. The loss is this
micro-batch's additive share of the step's loss: already divided by the step's global denominator.
"""


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

    @classmethod
    def create(
        cls, config: RunConfig, parallel: Parallel, model_folder: Path, *, dense_ok: bool | None = None
    ) -> PolicyModel:
        """Build the model that model_folder/config.json describes, load its weights, make the optimizer.

        dense_ok: go on when the model has no experts; default: unless trainer.routing_replay is "required".
        Raises ConfigError when model and layout do not fit, or for a model family that is not known.
        """
        raise NotImplementedError

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[TokenScores]:
        """Score micro-batches without gradients, with routing replay as in training; same list on all pipeline and tensor ranks.

        The number of micro-batches must be the same on all data-parallel ranks (fill up with empty ones).
        """
        raise NotImplementedError

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, *, entropy_gradient: bool = False
    ) -> list[dict[str, Tensor]]:
        """Add the gradients of these micro-batches' losses to the gradient buffers (zeroed by optimizer_step).

        Returns the named tensors of the loss function, one dict per micro-batch of this data-parallel rank, detached,
        on the CPU, the same on all pipeline and tensor ranks. May be called once per optimizer step.
        """
        raise NotImplementedError

    def replay_metrics(self) -> ReplayMetrics:
        """Routing replay in the last forward_backward."""
        raise NotImplementedError

    def gradients_finite(self) -> bool:
        """True if every gradient on every rank is finite; the same answer on every rank."""
        raise NotImplementedError

    def optimizer_step(self, learning_rate: float) -> tuple[float, bool]:
        """Clip and apply the gradients, then zero them: (global norm before clipping, applied).

        applied is False, and weights and optimizer state are untouched, if a gradient is not finite.
        """
        raise NotImplementedError

    def export_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder (see weights.export_hf): whole or not at all."""
        raise NotImplementedError
