"""One reader of config.json: every spelling, and what is missing by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import ConfigError
from configs.model_sizes import layout_problems, model_sizes, read_json, sizes_of_tiny
from configs.schema import LayoutSection, TinyModel
from services.local.tiny_model import model_config

TINY = model_config(TinyModel())
DENSE: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def without(*names: str) -> dict[str, object]:
    return {key: value for key, value in TINY.items() if key not in names}


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_number_of_experts_is_found_under_any_of_its_names(name: str) -> None:
    tree = {**without("num_experts", "num_local_experts"), name: 8}
    assert model_sizes(tree) == model_sizes(TINY) == sizes_of_tiny(TinyModel())


def test_sizes_of_a_model_for_text_and_images_lie_one_level_down() -> None:
    assert model_sizes({"model_type": "two", "text_config": TINY}) == model_sizes(TINY)


def test_a_dense_model_has_no_experts_and_what_it_leaves_out_follows_from_the_rest() -> None:
    found = model_sizes(DENSE)
    assert (found.experts, found.top_k, found.expert_hidden, found.moe_layers) == (0, 0, 0, (False,) * 3)
    assert (found.key_value_heads, found.head_dim) == (6, 8)


def test_layers_without_experts_are_counted_as_such() -> None:
    assert model_sizes({**TINY, "mlp_only_layers": [0]}).moe_layers == (False, True)
    assert model_sizes({**TINY, "num_hidden_layers": 4, "decoder_sparse_step": 2}).moe_layers == (False, True) * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "here lacks num_hidden_layers. Use a checkpoint"),
        ({"vocab_size": "many"}, "here: vocab_size is 'many', expected a number"),
        ({"hidden_size": True}, "here: hidden_size is True"),
        ({"num_attention_heads": -4}, "here: num_attention_heads is -4"),
        ({"num_experts_per_tok": None}, "here lacks num_experts_per_tok"),
    ],
)
def test_a_size_that_is_missing_or_no_number_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_sizes({**TINY, **change}, "here")


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json is not (a )?JSON"):
        read_json(file)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"pipeline": 3}, "pipeline = 3 does not divide the model's layers = 2"),
        ({"tensor": 4}, "tensor = 4 does not divide the model's key-value heads = 2"),
        ({"expert": 3}, "expert = 3 does not divide the model's experts = 8"),
        ({"expert_tensor": 5}, "expert_tensor = 5 does not divide the model's width of an expert = 64"),
    ],
)
def test_a_layout_that_does_not_divide_a_size_is_named_with_both(layout: dict[str, int], words: str) -> None:
    (problem,) = layout_problems(model_sizes(TINY), LayoutSection.model_validate(layout))
    assert words in problem


def test_a_dense_model_takes_no_expert_parallelism_and_its_width_is_divided() -> None:
    assert "has no experts" in layout_problems(model_sizes(DENSE), LayoutSection(expert=2))[0]
    odd = model_sizes({**DENSE, "intermediate_size": 97})
    assert "intermediate_size = 97" in layout_problems(odd, LayoutSection(tensor=2))[0]
