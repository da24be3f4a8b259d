"""The sequences, micro-batches and loss that all layouts of these tests share; a function of nothing but constants."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.batch import MicroBatch

VOCABULARY = 64
LENGTHS = (7, 12, 3, 20, 9, 5, 1, 14)
MICRO_BATCHES = ((0, 1), (2, 3), (4, 5), (6, 7))
LAYERS, TOP_K, EXPERTS = 2, 2, 8


def sequences() -> list[tuple[Tensor, Tensor]]:
    """(token ids int64 [n], advantage of each position float32 [n]) of each sequence."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randint(0, VOCABULARY, (n,), generator=generator), torch.randn(n, generator=generator)) for n in LENGTHS
    ]


def loss(log_probs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
    """A loss with every term that the real ones have; additive over tokens."""
    return (-(advantages * log_probs).sum() - 0.3 * entropy.sum()) / sum(LENGTHS)


def routes() -> list[Tensor]:
    """A made-up trace of each sequence: uint8 [n - 1, LAYERS, TOP_K], unlike what any router would choose."""
    generator = torch.Generator().manual_seed(11)
    return [
        torch.rand(n - 1, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].to(torch.uint8)
        for n in LENGTHS
    ]


def micro_batch(members: tuple[int, ...], with_routes: bool, padding: int = 0) -> MicroBatch:
    """Pack some of the sequences, with `padding` unused rows at the end."""
    chosen = [sequences()[i] for i in members]
    lengths = [len(ids) for ids, _ in chosen]
    rows = sum(lengths) + padding

    def fill(parts: list[Tensor], value: float = 0) -> Tensor:
        packed = torch.cat([*parts, parts[0].new_full((padding,), value)]) if parts else torch.full((padding,), value)
        assert packed.shape[0] == rows
        return packed

    trace = valid = None
    if with_routes:
        trace = torch.zeros(rows, LAYERS, TOP_K, dtype=torch.uint8)
        valid = torch.zeros(rows, dtype=torch.bool)
        at = 0
        for i, n in zip(members, lengths, strict=True):
            trace[at : at + n - 1] = routes()[i]
            valid[at : at + n - 1] = True
            at += n
    zero = torch.zeros(1, dtype=torch.int64)
    empty = torch.zeros(rows, dtype=torch.float32)
    return MicroBatch(
        token_ids=fill([ids for ids, _ in chosen]) if members else torch.zeros(rows, dtype=torch.int64),
        position_ids=fill([torch.arange(n) for n in lengths]) if members else torch.zeros(rows, dtype=torch.int64),
        sequence_starts=torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)], dtype=torch.int32),
        labels=fill([torch.cat((ids[1:], zero)) for ids, _ in chosen])
        if members
        else torch.zeros(rows, dtype=torch.int64),
        loss_mask=fill([torch.arange(n) < n - 1 for n in lengths]).bool() if members else torch.zeros(rows).bool(),
        behaviour_log_probs=empty,
        advantages=fill([advantages for _, advantages in chosen]) if members else empty,
        versions=torch.zeros(rows, dtype=torch.int32),
        sequence_index=fill([torch.full((n,), i) for i, n in zip(members, lengths, strict=True)], -1)
        if members
        else torch.full((rows,), -1),
        routes=trace,
        routes_valid=valid,
    )


def micro_batch_loss(batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`loss` over the trained positions of a micro-batch."""
    mask = batch.loss_mask
    value = loss(log_probs[mask], entropy[mask], batch.advantages[mask])
    return value, {"loss": value, "tokens": mask.sum()}
