"""From a Hugging Face config.json and the run's configuration to megatron's TransformerConfig arguments.

Invariant: what is not understood is refused with the name of the field; a model is never built from a guess. Pure: no
torch.distributed, no files but config.json, no megatron.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from configs.load import ConfigError
from configs.model_sizes import ModelSizes, layout_problems, model_sizes, read_json
from configs.schema import LayoutSection, TrainerSection

_MOE = {"qwen3_moe"}
_DENSE = {"qwen2", "qwen3", "llama"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_ALWAYS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "calculate_per_token_loss": True,  # no division by micro-batches or ranks anywhere: losses add up
    "perform_initialization": False,  # every parameter is loaded
    "deallocate_pipeline_outputs": False,
    "moe_token_dispatcher_type": "alltoall",  # the other one refuses variable lengths, and checks no routes
    # Fused kernels, which not every machine has:
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
}
_ALWAYS_OF_EXPERTS: dict[str, Any] = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": "fp32",
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
}


@dataclass(frozen=True, slots=True)
class ModelShape(ModelSizes):
    """The model as config.json describes it: its sizes, and what else megatron has to know."""

    family: str
    norm_epsilon: float
    rope_theta: float
    rope_llama3_factor: float | None
    qk_norm: bool
    qkv_bias: bool
    norm_topk_prob: bool


def read_model_shape(folder: Path) -> ModelShape:
    """Read folder/config.json. Raises ConfigError for a missing file, a missing field or an unknown family."""
    path = folder / "config.json"
    return model_shape(read_json(path), f"model.path: {path}")


def model_shape(raw: dict[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that the content of a config.json describes; `where` begins the error messages."""
    family = raw.get("model_type")
    if raw.get("attention_bias"):
        raise ConfigError(
            f"{where}: attention_bias is true, which gives o_proj a bias too; Megatron-core has that one only with "
            "biases in the MLP. Use a model without it; biases of q, k and v alone (model_type qwen2) are supported."
        )
    if family not in _MOE | _DENSE:
        raise ConfigError(
            f"{where}: model_type {family!r} is not supported; known are {', '.join(sorted(_MOE | _DENSE))}."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only silu.")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"{where}: use_sliding_window is not supported.")
    sizes = model_sizes(raw, where)
    theta, factor = _rope(raw, where)
    for name, missing in (
        ("num_experts or num_local_experts", family in _MOE and not sizes.experts),
        ("moe_intermediate_size", family in _MOE and raw.get("moe_intermediate_size") is None),
        ("intermediate_size", not all(sizes.moe_layers) and not sizes.intermediate),
        ("rms_norm_eps", raw.get("rms_norm_eps") is None),
    ):
        if missing:
            raise ConfigError(f"{where} lacks {name}.")
    return ModelShape(
        **asdict(sizes),
        family=family,
        norm_epsilon=float(raw["rms_norm_eps"]),
        rope_theta=theta,
        rope_llama3_factor=factor,
        qk_norm=family not in ("llama", "qwen2"),
        qkv_bias=family == "qwen2",
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
    )


def _rope(raw: dict[str, Any], where: str) -> tuple[float, float | None]:
    """(theta, llama3 factor or None), from either spelling: rope_theta with rope_scaling, or rope_parameters."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or raw.get("rope_theta")
    if theta is None:
        raise ConfigError(f"{where}: rope_theta (or rope_parameters.rope_theta) is missing.")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return float(theta), None
    fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(scaling.get(name) == value for name, value in fixed.items()):
        return float(theta), float(scaling["factor"])
    raise ConfigError(f"{where}: rope scaling {scaling!r} is not supported, only default, and llama3 with {fixed}.")


def check_layout(shape: ModelShape, layout: LayoutSection) -> None:
    """Raise ConfigError unless every rank gets an equal share of the model."""
    if problems := layout_problems(shape, layout):
        raise ConfigError("\n".join(problems))


def transformer_arguments(shape: ModelShape, trainer: TrainerSection) -> dict[str, Any]:
    """Keyword arguments of megatron's TransformerConfig."""
    arguments = _ALWAYS | _sizes(shape) | _placement(trainer)
    if trainer.recompute:
        arguments |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if shape.experts:
        arguments |= _ALWAYS_OF_EXPERTS | {
            "num_moe_experts": shape.experts,
            "moe_layer_freq": [int(x) for x in shape.moe_layers],
            "moe_ffn_hidden_size": shape.expert_hidden,
            "moe_router_topk": shape.top_k,
            "moe_router_pre_softmax": not shape.norm_topk_prob,
        }
    return arguments


def _sizes(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.intermediate or shape.expert_hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.key_value_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_epsilon,
        "qk_layernorm": shape.qk_norm,
        "add_qkv_bias": shape.qkv_bias,
    }


def _placement(trainer: TrainerSection) -> dict[str, Any]:
    """Numbers' format, and what lies on which rank and device."""
    layout, dtype = trainer.layout, _DTYPES[trainer.dtype]
    on_gpu = trainer.device == "cuda"
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor or layout.tensor,
        "sequence_parallel": layout.tensor > 1,
        "variable_seq_lengths": layout.pipeline > 1,  # micro-batches differ in length: stages exchange shapes first
        "use_cpu_initialization": not on_gpu,
        "batch_p2p_comm": on_gpu,
    }
