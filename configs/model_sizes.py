"""The sizes of a model, as the config.json of a checkpoint in Hugging Face layout names them.

Invariant: this is the one place that knows how such a file spells a size; one that is missing or no number is a
ConfigError that names it. Trainer, workers and `lagrange check` add what only they need. Needs neither torch nor
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import ConfigError
from configs.schema import LayoutSection, TinyModel

TINY_VOCABULARY = 32  # services/local/tiny_model.py makes it


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes in elements, context in tokens. experts, top_k and expert_hidden are 0 for a dense model.

    intermediate: width of a dense layer; 0: not named. moe_layers: of each layer, whether it routes tokens to experts.
    """

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool
    experts: int
    top_k: int
    expert_hidden: int
    moe_layers: tuple[bool, ...]


def model_sizes(tree: Mapping[str, Any], where: str = "config.json") -> ModelSizes:
    """The sizes in the content of a config.json; `where` begins the messages. Raises ConfigError."""
    text = text_part(tree)

    def size(*names: str, default: int | None = None) -> int:
        found = next((text[name] for name in names if text.get(name) is not None), default)
        if found is None:
            raise ConfigError(f"{where} lacks {' or '.join(names)}. Use a checkpoint in Hugging Face layout.")
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise ConfigError(f"{where}: {' or '.join(names)} is {found!r}, expected a number of elements.")
        return found

    layers, hidden, heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=0)
    dense, step = set(text.get("mlp_only_layers") or ()), size("decoder_sparse_step", default=1) or 1
    return ModelSizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // max(heads, 1)),
        intermediate=size("intermediate_size", default=0),
        vocabulary=size("vocab_size"),
        context=size("max_position_embeddings"),
        tied=bool(text.get("tie_word_embeddings", tree.get("tie_word_embeddings", False))),
        experts=experts,
        top_k=size("num_experts_per_tok") if experts else 0,
        expert_hidden=size("moe_intermediate_size", "intermediate_size") if experts else 0,
        moe_layers=tuple(experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def text_part(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the sizes lie: in models for text and images one level down."""
    inner = tree.get("text_config")
    return inner if isinstance(inner, Mapping) else tree


def sizes_of_tiny(tiny: TinyModel) -> ModelSizes:
    """The sizes of a model that is made on the spot."""
    return ModelSizes(
        layers=tiny.layers,
        hidden=tiny.hidden,
        heads=tiny.heads,
        key_value_heads=tiny.key_value_heads,
        head_dim=tiny.head_dim,
        intermediate=2 * tiny.hidden,
        vocabulary=TINY_VOCABULARY,
        context=tiny.context,
        tied=False,
        experts=tiny.experts,
        top_k=tiny.experts_per_token,
        expert_hidden=tiny.expert_hidden,
        moe_layers=(True,) * tiny.layers,
    )


def layout_problems(sizes: ModelSizes, layout: LayoutSection) -> list[str]:
    """Why not every rank would get an equal share of the model: one message each."""
    dense = not all(sizes.moe_layers)
    parts = [
        ("layers", sizes.layers, "pipeline", layout.pipeline),
        ("attention heads", sizes.heads, "tensor", layout.tensor),
        ("key-value heads", sizes.key_value_heads, "tensor", layout.tensor),
        ("vocabulary", sizes.vocabulary, "tensor", layout.tensor),
        *([("intermediate_size", sizes.intermediate, "tensor", layout.tensor)] if dense else []),
    ]
    if sizes.experts:
        parts += [
            ("experts", sizes.experts, "expert", layout.expert),
            ("width of an expert", sizes.expert_hidden, *layout.inside_expert),
        ]
    elif layout.expert > 1 or (layout.expert_tensor or 1) > 1:
        return ["trainer.layout.expert and expert_tensor must be 1: the model has no experts."]
    return [
        f"trainer.layout.{part} = {by} does not divide the model's {name} = {size}. Change trainer.layout.{part}."
        for name, size, part, by in parts
        if size % by
    ]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises ConfigError, with what to do."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.path: {path} cannot be read ({error.strerror}). Name a folder in Hugging Face layout."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {path} is not JSON ({error}). Copy the checkpoint again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {path} is not a JSON object. Copy the checkpoint again.")
    return content
