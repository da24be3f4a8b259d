"""What rollouts need to know of a checkpoint in Hugging Face layout, read from its JSON files alone.

Invariant: a `Checkpoint` was read from a folder that has config.json; its sizes are those that an engine's answers
must have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.model_sizes import model_sizes, read_json, text_part


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """layers: rows' second axis in a routing trace (dense layers count). top_k, experts: 0 for a dense model.

    stop_ids: tokens that end a response. context: longest sequence, in tokens.
    """

    folder: Path
    layers: int
    experts: int
    top_k: int
    vocabulary: int
    context: int
    stop_ids: tuple[int, ...]

    @property
    def routed(self) -> bool:
        """Whether the model has experts, and so routes to record."""
        return self.experts > 0

    def without_routes(self) -> Checkpoint:
        """The same as rollouts see it whose routes nobody wants: as if it had no experts."""
        return replace(self, experts=0, top_k=0)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read `folder`. Raises ConfigError, with what to do, if it is not a checkpoint."""
    tree = read_json(folder / "config.json")
    sizes = model_sizes(tree, f"model.path: {folder}/config.json")
    return Checkpoint(
        folder=folder,
        layers=sizes.layers,
        experts=sizes.experts,
        top_k=sizes.top_k,
        vocabulary=sizes.vocabulary,
        context=sizes.context,
        stop_ids=_stop_ids(folder, tree),
    )


def _stop_ids(folder: Path, tree: Mapping[str, Any]) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, which wins as in transformers, else of config.json."""
    generation = folder / "generation_config.json"
    named = read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = named if named is not None else text_part(tree).get("eos_token_id", tree.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)
