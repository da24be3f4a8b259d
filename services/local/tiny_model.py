"""Makes a tiny Qwen3-MoE checkpoint and a character-level tokenizer, in the layout of Hugging Face.

Invariant: the same `TinyModel` and seed give the same bytes, on any machine, without torch; the folder appears whole or
not at all. Names of weights are those of Qwen3-MoE on disk (one tensor for each expert's projection), so that SGLang,
transformers and the trainer's importer read the folder like any other checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from configs.schema import TinyModel

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHARACTERS = "0123456789 +-*/=<>?,.:()|#\n&_"
VOCABULARY = (PAD, BOS, EOS, *CHARACTERS)
VOCABULARY_SIZE = len(VOCABULARY)  # 32: chance is 1 in 32 a token, and tensor-parallel ranks divide it without padding

Float32Array = npt.NDArray[np.float32]


def model_config(tiny: TinyModel) -> dict[str, object]:
    """config.json for transformers 5 (`num_local_experts`, `rope_parameters`) and for older readers."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": VOCABULARY.index(BOS),
        "eos_token_id": VOCABULARY.index(EOS),
        "pad_token_id": VOCABULARY.index(PAD),
        "decoder_sparse_step": 1,
        "dtype": "float32",
        "head_dim": tiny.head_dim,
        "hidden_act": "silu",
        "hidden_size": tiny.hidden,
        "initializer_range": tiny.init_std,
        "intermediate_size": 2 * tiny.hidden,
        "max_position_embeddings": tiny.context,
        "max_window_layers": tiny.layers,
        "mlp_only_layers": [],
        "moe_intermediate_size": tiny.expert_hidden,
        "norm_topk_prob": True,
        "num_attention_heads": tiny.heads,
        "num_experts": tiny.experts,
        "num_local_experts": tiny.experts,
        "num_experts_per_tok": tiny.experts_per_token,
        "num_hidden_layers": tiny.layers,
        "num_key_value_heads": tiny.key_value_heads,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": tiny.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": tiny.rope_theta, "rope_type": "default"},
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCABULARY_SIZE,
    }


def weight_shapes(tiny: TinyModel) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """(name, shape, standard deviation) of every weight, in a fixed order; None stands for a norm's ones."""
    hidden, head = tiny.hidden, tiny.head_dim
    yield "model.embed_tokens.weight", (VOCABULARY_SIZE, hidden), tiny.embedding_std
    for layer in range(tiny.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,), None
        yield f"{at}.self_attn.q_proj.weight", (tiny.heads * head, hidden), tiny.init_std
        yield f"{at}.self_attn.k_proj.weight", (tiny.key_value_heads * head, hidden), tiny.init_std
        yield f"{at}.self_attn.v_proj.weight", (tiny.key_value_heads * head, hidden), tiny.init_std
        yield f"{at}.self_attn.o_proj.weight", (hidden, tiny.heads * head), tiny.init_std
        yield f"{at}.self_attn.q_norm.weight", (head,), None
        yield f"{at}.self_attn.k_norm.weight", (head,), None
        yield f"{at}.post_attention_layernorm.weight", (hidden,), None
        yield f"{at}.mlp.gate.weight", (tiny.experts, hidden), tiny.init_std
        for expert in range(tiny.experts):
            yield f"{at}.mlp.experts.{expert}.gate_proj.weight", (tiny.expert_hidden, hidden), tiny.init_std
            yield f"{at}.mlp.experts.{expert}.up_proj.weight", (tiny.expert_hidden, hidden), tiny.init_std
            yield f"{at}.mlp.experts.{expert}.down_proj.weight", (hidden, tiny.expert_hidden), tiny.init_std
    yield "model.norm.weight", (hidden,), None
    yield "lm_head.weight", (VOCABULARY_SIZE, hidden), tiny.head_std


def make_weights(tiny: TinyModel, seed: int) -> dict[str, Float32Array]:
    """float32 weights by name: norms are ones, all else is normal with mean 0 and the configured deviation."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return {
        name: np.ones(shape, np.float32) if std is None else (generator.standard_normal(shape) * std).astype(np.float32)
        for name, shape, std in weight_shapes(tiny)
    }


def make_tokenizer() -> Tokenizer:
    """A tokenizer with one token for each of CHARACTERS; a character that it does not know becomes <pad>."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    return tokenizer


def write_tiny_model(tiny: TinyModel, seed: int, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`.

    A folder that is already complete is left alone, so that a resumed run keeps its first model. Raises OSError when
    the disk refuses.
    """
    if (folder / "config.json").exists():
        return
    aside = folder.with_name(folder.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    config = model_config(tiny)
    _write_json(aside / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(aside / "generation_config.json", {**ends, "do_sample": True})
    save_file(make_weights(tiny, seed), aside / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save(str(aside / "tokenizer.json"))
    _write_json(
        aside / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "unk_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": tiny.context,
        },
    )
    aside.replace(folder)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
