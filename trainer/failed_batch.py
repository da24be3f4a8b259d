"""Keeps a batch that made a loss or gradient non-finite, so that it can be looked into.

Invariant: what is written suffices to repeat the step: the groups as they came over the wire, and the packed rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from torch import Tensor

from broker import wire
from broker.types import Group
from trainer.batch import MicroBatch
from trainer.metrics import json_safe
from trainer.tensor_file import save_tensors


def save_failed_batch(
    folder: Path,
    data_rank: int,
    groups: Sequence[Group],
    batches: Sequence[MicroBatch],
    *,
    reports: Sequence[Mapping[str, Tensor]],
    facts: Mapping[str, object],
) -> None:
    """Write this rank's part: group-<id>.bin (wire format), rank-<n>.safetensors, rank-<n>.json.

    reports: what the loss function reported for each micro-batch, with the log-probs that it saw. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for group in groups:
        (folder / f"group-{group.group_id}.bin").write_bytes(wire.encode(group))
    tensors: dict[str, Tensor] = {}
    for index, batch in enumerate(batches):
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor):
                tensors[f"{index}.{field.name}"] = value.cpu().contiguous()
    for index, report in enumerate(reports):
        for name, value in report.items():
            tensors[f"{index}.report.{name}"] = value.cpu().contiguous().clone()
    save_tensors(tensors, folder / f"rank-{data_rank}.safetensors")
    (folder / f"rank-{data_rank}.json").write_text(json.dumps(json_safe(facts), indent=2), encoding="utf-8")
