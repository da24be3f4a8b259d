"""Builds megatron's GPTModel, its DDP wrapper and its optimizer from a Hugging Face folder and the run's configuration.

Invariant: after `build`, every parameter holds a value read from the folder; none is left as initialised. Import after
compat.install.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from configs.schema import RunConfig
from trainer.megatron.attention import PositionRotary, adapt_spec
from trainer.megatron.model_config import ModelShape, check_layout, read_model_shape, transformer_arguments
from trainer.megatron.replay import RoutingReplay
from trainer.megatron.weights import load_hf


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A built model. gpt: the bare GPTModel; wrapped: under Float16Module (bfloat16) and DDP, as schedules take it.

    rotary: None with Transformer Engine, which rotates packed sequences itself. replay: None on a rank without experts.
    """

    shape: ModelShape
    gpt: Any
    wrapped: Any
    optimizer: Any
    rotary: PositionRotary | None
    replay: RoutingReplay | None


def build(config: RunConfig, device: torch.device, folder: Path) -> Parts:
    """Build, load and wrap. Raises ConfigError if model and layout do not fit, or a tensor is missing."""
    trainer = config.trainer
    shape = read_model_shape(folder)
    check_layout(shape, trainer.layout)
    settings = TransformerConfig(**transformer_arguments(shape, trainer))
    engine = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    if dist.get_rank() == 0:
        structlog.get_logger(__name__).info("model.layers", device=device.type, transformer_engine=engine)
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=engine)
    gpt = GPTModel(
        config=settings,
        transformer_layer_spec=spec if engine else adapt_spec(spec),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.context,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_llama3_factor is not None,
        rope_scaling_factor=shape.rope_llama3_factor or 8.0,
    ).to(device)
    rotary = None
    if not engine:
        rotary = gpt.rotary_pos_emb = PositionRotary(gpt.rotary_pos_emb.inv_freq.to(device))
    model = Float16Module(settings, gpt) if trainer.dtype == "bfloat16" else gpt
    load_hf(gpt, shape, folder)
    wrapped = DistributedDataParallel(
        settings,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=trainer.distributed_optimizer,
            overlap_grad_reduce=False,
        ),
        model,
    )
    optimizer = get_megatron_optimizer(_optimizer_config(config), [wrapped])
    for group in optimizer.param_groups:
        if "foreach" in group:  # torch's: on a GPU it would take a temporary of 4 bytes a parameter, all at once
            group["foreach"] = False
    settings.finalize_model_grads_func = _sum_gradients
    settings.grad_scale_func = optimizer.scale_loss
    return Parts(shape, gpt, wrapped, optimizer, rotary, _replay(config, gpt, shape, settings))


def _sum_gradients(model: list[Any], _: object = None, **keywords: Any) -> None:
    """megatron's reduction without its division by the number of tokens: the loss is already a share of the step's."""
    finalize_model_grads(model, None, **keywords)


def _optimizer_config(config: RunConfig) -> OptimizerConfig:
    trainer, chosen = config.trainer, config.trainer.optimizer
    half = trainer.dtype == "bfloat16"
    return OptimizerConfig(
        optimizer="adam",
        lr=chosen.learning_rate,
        weight_decay=chosen.weight_decay,
        adam_beta1=chosen.beta1,
        adam_beta2=chosen.beta2,
        adam_eps=chosen.epsilon,
        clip_grad=chosen.clip_norm,
        use_distributed_optimizer=trainer.distributed_optimizer,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
    )


def _replay(config: RunConfig, gpt: Any, shape: ModelShape, settings: Any) -> RoutingReplay | None:
    if not shape.experts:
        return None
    offset = get_transformer_layer_offset(settings)
    routers = [
        (layer.mlp.router, sum(shape.moe_layers[: offset + i]))
        for i, layer in enumerate(gpt.decoder.layers)
        if shape.moe_layers[offset + i]
    ]
    return RoutingReplay(
        routers,
        shard=ps.get_tensor_model_parallel_rank(),
        shards=ps.get_tensor_model_parallel_world_size(),
        recompute=config.trainer.recompute,
    )
