"""How much memory a run takes, from its configuration and the model's sizes alone.

Invariant: pure arithmetic; every figure says what it counts, and what it leaves out is said beside it
(docs/deploy/sizing.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.model_sizes import ModelSizes
from configs.schema import RunConfig

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes. weights: the policy once, as served. trainer_rank: weights, float32 gradients and optimizer state of the
    fullest rank, without activations. route_bytes_step: routing traces of one step at the response limit.
    queue_bytes: responses at their limit in all groups that may be in flight at the bound. kept_bytes: in those that
    were trained and are kept until their checkpoint. bytes_per_prompt_token: what each token of the prompts adds to
    both. queue_limit: what payloads may take."""

    parameters: int
    weights: int
    engine_device: int
    trainer_rank: int
    route_bytes_step: int
    queue_bytes: int
    kept_bytes: int
    bytes_per_prompt_token: int
    queue_limit: int


def estimate(config: RunConfig, sizes: ModelSizes) -> Estimate:
    """Memory of a run."""
    layout, rollout = config.trainer.layout, config.rollout
    _, expert_tensor = layout.inside_expert
    dense = -(-other_parameters(sizes) // (layout.tensor * layout.pipeline))
    experts = -(-expert_parameters(sizes) // (layout.expert * expert_tensor * layout.pipeline))
    state = 8 + (4 if config.trainer.dtype == "bfloat16" else 0)  # two moments, and float32 master weights
    dense_copies = layout.data if config.trainer.distributed_optimizer else 1
    expert_copies = (
        max(1, layout.data * layout.tensor // (layout.expert * expert_tensor))
        if config.trainer.distributed_optimizer
        else 1
    )
    stored = NUMBER_BYTES[config.trainer.dtype] + 4
    rank = (dense + experts) * stored + dense * state // dense_copies + experts * state // expert_copies
    samples = config.trainer.groups_per_step * rollout.samples_per_prompt
    routes = 0 if config.trainer.routing_replay == "off" else route_bytes_per_token(sizes)
    kept = config.trainer.checkpoint.interval_steps if config.trainer.retention == "payload" else 0
    flying = config.lag.max + 1
    step_bytes = samples * rollout.max_new_tokens * (4 + 4 + 1 + routes)  # id, log-prob, mask, routes
    engine = parameters(sizes) * NUMBER_BYTES[config.engine.dtype]
    return Estimate(
        parameters=parameters(sizes),
        weights=engine,
        engine_device=-(-engine // config.engine.tensor_parallel),
        trainer_rank=rank,
        route_bytes_step=samples * rollout.max_new_tokens * routes,
        queue_bytes=step_bytes * flying,
        kept_bytes=step_bytes * kept,
        bytes_per_prompt_token=samples * (flying + kept) * (4 + routes),
        queue_limit=config.redis.payload_bytes,
    )


def parameters(sizes: ModelSizes) -> int:
    """All parameters of a Qwen3-MoE."""
    return expert_parameters(sizes) + other_parameters(sizes)


def expert_parameters(sizes: ModelSizes) -> int:
    """Parameters of all experts of all layers."""
    return sum(sizes.moe_layers) * sizes.experts * 3 * sizes.hidden * sizes.expert_hidden


def other_parameters(sizes: ModelSizes) -> int:
    """Parameters outside the experts: embeddings, attention, routers, norms, layers without experts."""
    routed = sum(sizes.moe_layers)
    attention = 2 * sizes.hidden * sizes.head_dim * (sizes.heads + sizes.key_value_heads)
    norms = 2 * sizes.hidden + 2 * sizes.head_dim
    routers = routed * sizes.hidden * sizes.experts
    dense = (sizes.layers - routed) * 3 * sizes.hidden * sizes.intermediate
    embeddings = sizes.vocabulary * sizes.hidden * (1 if sizes.tied else 2)
    return sizes.layers * (attention + norms) + routers + dense + embeddings + sizes.hidden


def cache_bytes_per_token(sizes: ModelSizes, dtype: str) -> int:
    """Bytes of one token in an engine's KV cache, over all its devices: a key and a value in each layer and head."""
    return sizes.layers * 2 * sizes.key_value_heads * sizes.head_dim * NUMBER_BYTES[dtype]


def route_bytes_per_token(sizes: ModelSizes) -> int:
    """Bytes of one token's routing trace: one or two for each layer and chosen expert."""
    return sizes.layers * sizes.top_k * (1 if sizes.experts <= 256 else 2)
