"""What rollouts need to know of a checkpoint in Hugging Face layout, read from its JSON files alone.

Invariant: a `Checkpoint` was read from a folder that has config.json; its sizes are those that an engine's answers
must have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import ConfigError


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


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read `folder`. Raises ConfigError, with what to do, if it is not a checkpoint."""
    config = _read(folder / "config.json")
    text = config.get("text_config", config)
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    try:
        return Checkpoint(
            folder=folder,
            layers=int(text["num_hidden_layers"]),
            experts=experts,
            top_k=int(text["num_experts_per_tok"]) if experts else 0,
            vocabulary=int(text["vocab_size"]),
            context=int(text["max_position_embeddings"]),
            stop_ids=_stop_ids(folder, config, text),
        )
    except KeyError as error:
        raise ConfigError(
            f"model.path: {folder}/config.json lacks {error}. Use a checkpoint in Hugging Face layout."
        ) from error


def _stop_ids(folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, which wins as in transformers, else of config.json."""
    generation = folder / "generation_config.json"
    named = _read(generation).get("eos_token_id") if generation.exists() else None
    ids = named if named is not None else text.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.path: {path} cannot be read ({error.strerror}). Name a folder in Hugging Face layout."
        ) from error
    except ValueError as error:
        raise ConfigError(f"model.path: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {path} is not a JSON object")
    return content
