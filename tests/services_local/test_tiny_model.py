"""The tiny checkpoint: the same bytes for the same seed, and readable by those who read checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from configs.schema import TinyModel
from services.local.tiny_model import CHARACTERS, VOCABULARY, make_weights, write_tiny_model

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_tiny_model(TinyModel(), seed, tmp_path / name)
    for file in FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "c" / "model.safetensors").read_bytes()


def test_a_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    write_tiny_model(TinyModel(), 0, tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    write_tiny_model(TinyModel(), 1, tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before


def test_weights_have_the_configured_deviations() -> None:
    tiny = TinyModel()
    weights = make_weights(tiny, 0)
    assert sum(w.size for w in weights.values()) == 251_328
    assert np.std(weights["model.embed_tokens.weight"]) == pytest.approx(tiny.embedding_std, rel=0.1)
    assert np.std(weights["lm_head.weight"]) == pytest.approx(tiny.head_std, rel=0.1)
    assert np.std(weights["model.layers.1.mlp.experts.7.down_proj.weight"]) == pytest.approx(tiny.init_std, rel=0.1)
    assert all(w.dtype == np.float32 for w in weights.values())


def test_the_tokenizer_gives_every_character_its_own_token_and_gives_the_text_back(tmp_path: Path) -> None:
    write_tiny_model(TinyModel(), 0, tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    ids = tokenizer.encode(CHARACTERS).ids
    assert len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.get_vocab_size() == len(VOCABULARY) == 32
    assert tokenizer.decode([5, VOCABULARY.index("<eos>")]) == "2"


def test_the_page_says_which_characters_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run-it.md").read_text(encoding="utf-8")
    assert f"    {CHARACTERS.replace(chr(10), '')}\n" in page
    assert f"knows {len(VOCABULARY)} tokens" in page
    assert f"these {len(CHARACTERS) - 1} characters" in page


@pytest.mark.megatron
def test_transformers_loads_the_checkpoint_with_no_weight_missing_or_left_over(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tiny_model(TinyModel(), 0, tmp_path / "m")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_experts == 8
    assert model.config.rope_parameters["rope_theta"] == 100.0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.encode("394>") == [VOCABULARY.index(c) for c in "394>"]
    assert tokenizer.eos_token_id == 2
