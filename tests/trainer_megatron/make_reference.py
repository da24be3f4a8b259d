"""Makes tiny Hugging Face models and what transformers says about them; a process of its own, without megatron.

For each family: folder/<family>/ (save_pretrained), and folder/<family>.safetensors with log-probs, entropies and the
gradients of `data.loss` under on-disk names, at settings.TEMPERATURE.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.trainer_megatron import data, settings


def on_disk(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers 5 fuses experts in memory; the names on disk are per expert."""
    out: dict[str, Tensor] = {}
    for name, value in named.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert in range(value.shape[0]):
                gate, up = value[expert].chunk(2, 0)
                out[f"{prefix}.{expert}.gate_proj.weight"], out[f"{prefix}.{expert}.up_proj.weight"] = gate, up
        elif last == "down_proj":
            out |= {f"{prefix}.{expert}.down_proj.weight": value[expert] for expert in range(value.shape[0])}
        else:
            out[name] = value
    return {name: value.detach().clone().contiguous() for name, value in out.items()}


def make(family: str, folder: Path) -> None:
    """Write one family's model and reference."""
    from transformers import (  # slow to import
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    common: dict[str, Any] = {
        "vocab_size": data.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "attn_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    }
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    torch.manual_seed(7)
    model = {
        "moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **moe, tie_word_embeddings=False)),
        "moe-tied": lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**common, **(moe | {"norm_topk_prob": False}), mlp_only_layers=[0], tie_word_embeddings=True)
        ),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**common, tie_word_embeddings=True)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=False)),
    }[family]()
    model = model.float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        elif "bias" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder / family)
    scores = []
    for ids, _ in data.sequences():
        logits = model(ids[None]).logits[0, :-1] / settings.TEMPERATURE
        log_p = logits.log_softmax(-1)
        scores.append((log_p.gather(1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    total = torch.zeros(())
    for (log_probs, entropy), (_, advantages) in zip(scores, data.sequences(), strict=True):
        total = total + data.loss(log_probs, entropy, advantages[:-1])
    total.backward()
    reference = {f"grad/{k}": v for k, v in on_disk({n: p.grad for n, p in model.named_parameters()}).items()}
    for i, (log_probs, entropy) in enumerate(scores):
        reference |= {f"log_probs/{i}": log_probs.detach().contiguous(), f"entropy/{i}": entropy.detach().contiguous()}
    save_file(reference, folder / f"{family}.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for each in sys.argv[2:]:
        make(each, Path(sys.argv[1]))
