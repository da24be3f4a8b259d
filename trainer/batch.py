"""Micro-batches: the packed tokens of some sequences, as the model and the losses take them.

Invariant: every per-token tensor of a `MicroBatch` has the same first dimension T, and position t carries what is known
about predicting `labels[t]` from the tokens up to and including t of the same sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some sequences, one after the other, in T rows.

    token_ids: int64 [T]. position_ids: int64 [T], from 0 in each sequence. sequence_starts: int32 [S + 1]; sequence s
    is rows [sequence_starts[s], sequence_starts[s + 1]); rows from sequence_starts[S] on are padding. labels: int64
    [T], the next token of the sequence, 0 where there is none. loss_mask: bool [T], True where labels[t] is a trainable
    response token. behaviour_log_probs: float32 [T], the engine's log-prob of labels[t], 0 elsewhere. advantages:
    float32 [T]. versions: int32 [T], the version that sampled labels[t]. sequence_index: int64 [T], numbers sequences
    over the whole step; -1 for padding. routes: [T, layers, top_k] of an integer dtype, or None; routes_valid: bool
    [T], rows of `routes` that hold a trace (None exactly when routes is None). T may be 0.
    """

    token_ids: Tensor
    position_ids: Tensor
    sequence_starts: Tensor
    labels: Tensor
    loss_mask: Tensor
    behaviour_log_probs: Tensor
    advantages: Tensor
    versions: Tensor
    sequence_index: Tensor
    routes: Tensor | None = None
    routes_valid: Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, the number of rows, padding included."""
        return int(self.token_ids.shape[0])
