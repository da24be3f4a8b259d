"""What a configuration means, in words and figures: the text of `lagrange check`.

Invariant: pure functions; nothing is started, and a checkpoint or a task that is not on this machine is named as
missing, not treated as an error of the file. Every estimate says what it counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import ConfigError
from configs.schema import RunConfig

GIB = 1024**3
TASK_NAME = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Qwen3-MoE that memory depends on. vocabulary: rows of the embedding; tied: one matrix for both."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_hidden: int
    vocabulary: int
    tied: bool = False

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.layers * self.experts * 3 * self.hidden * self.expert_hidden

    @property
    def other_parameters(self) -> int:
        """Parameters outside the experts: embeddings, attention, routers, norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_value_heads)
        norms = 2 * self.hidden + 2 * self.head_dim
        layer = attention + norms + self.hidden * self.experts
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.expert_parameters + self.other_parameters

    @property
    def route_bytes_per_token(self) -> int:
        """Bytes of one token's routing trace: one or two for each layer and chosen expert."""
        return self.layers * self.experts_per_token * (1 if self.experts <= 256 else 2)


QWEN3_30B_A3B = ModelShape(48, 2048, 32, 4, 128, 128, 8, 768, 151936)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes. weights: the policy once, as served. trainer_rank: weights, float32 gradients and optimizer state of the
    fullest rank, without activations. route_bytes_step: routing traces of one step at the response limit.
    queue_bytes: all groups that may be in flight at the bound, at the response limit."""

    parameters: int
    weights: int
    engine_device: int
    trainer_rank: int
    route_bytes_step: int
    queue_bytes: int


def estimate(config: RunConfig, shape: ModelShape) -> Estimate:
    """Memory of a run, from its sizes alone. Prompts are not counted: the response limit dominates."""
    number = {"float32": 4, "bfloat16": 2}
    layout = config.trainer.layout
    expert_tensor = layout.expert_tensor or layout.tensor
    dense = -(-shape.other_parameters // (layout.tensor * layout.pipeline))
    experts = -(-shape.expert_parameters // (layout.expert * expert_tensor * layout.pipeline))
    state = 8 + (4 if config.trainer.dtype == "bfloat16" else 0)  # two moments, and float32 master weights
    dense_copies = layout.data if config.trainer.distributed_optimizer else 1
    expert_copies = (
        max(1, layout.data * layout.tensor // (layout.expert * expert_tensor))
        if config.trainer.distributed_optimizer
        else 1
    )
    stored = number[config.trainer.dtype] + 4
    rank = (dense + experts) * stored + dense * state // dense_copies + experts * state // expert_copies
    samples = config.trainer.groups_per_step * config.rollout.samples_per_prompt
    tokens = samples * config.rollout.max_new_tokens
    routes = 0 if config.trainer.routing_replay == "off" else shape.route_bytes_per_token
    engine = shape.parameters * number[config.engine.dtype]
    return Estimate(
        parameters=shape.parameters,
        weights=engine,
        engine_device=-(-engine // config.engine.tensor_parallel),
        trainer_rank=rank,
        route_bytes_step=tokens * routes,
        queue_bytes=tokens * (4 + 4 + 1 + routes) * (config.lag.max + 1),
    )


def shape_of(config: RunConfig) -> ModelShape | None:
    """The model's sizes: from model.tiny, from config.json if the folder is here, else from a known name, else None.

    Raises ConfigError if config.json is damaged.
    """
    tiny = config.model.tiny
    if tiny is not None:
        return ModelShape(
            tiny.layers,
            tiny.hidden,
            tiny.heads,
            tiny.key_value_heads,
            tiny.head_dim,
            tiny.experts,
            tiny.experts_per_token,
            tiny.expert_hidden,
            32,
        )
    path = config.model.path
    if path is not None and (path / "config.json").is_file():
        try:
            return shape_from(json.loads((path / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"model.path: {path}/config.json is not the configuration of a model ({type(error).__name__}: "
                f"{error}). Copy the checkpoint again."
            ) from error
    if path is not None and path.name.lower().startswith("qwen3-30b-a3b"):
        return QWEN3_30B_A3B
    return None


def shape_from(tree: Mapping[str, Any]) -> ModelShape | None:
    """The sizes in a Hugging Face config.json of a Qwen3-MoE; None for another architecture."""
    if tree.get("model_type") != "qwen3_moe":
        return None
    return ModelShape(
        layers=int(tree["num_hidden_layers"]),
        hidden=int(tree["hidden_size"]),
        heads=int(tree["num_attention_heads"]),
        key_value_heads=int(tree["num_key_value_heads"]),
        head_dim=int(tree["head_dim"]),
        experts=int(tree.get("num_local_experts") or tree["num_experts"]),
        experts_per_token=int(tree["num_experts_per_tok"]),
        expert_hidden=int(tree["moe_intermediate_size"]),
        vocabulary=int(tree["vocab_size"]),
        tied=bool(tree.get("tie_word_embeddings", False)),
    )


def errors(config: RunConfig) -> list[str]:
    """What makes a valid file impossible to run anywhere: one message each."""
    found = []
    if not TASK_NAME.match(config.task.name):
        found.append(
            f"task.name: {config.task.name!r} is no task name. Use small letters, digits and hyphens, as in max-digit."
        )
    shape = shape_of(config)
    if shape is not None and config.model.tiny is None:
        found += [
            f"trainer.layout.{part} = {by} does not divide the model's {name} = {size}. Change trainer.layout.{part}."
            for part, by, name, size in (
                ("pipeline", config.trainer.layout.pipeline, "layers", shape.layers),
                ("tensor", config.trainer.layout.tensor, "key-value heads", shape.key_value_heads),
                ("expert", config.trainer.layout.expert, "experts", shape.experts),
            )
            if size % by
        ]
    return found


def warnings(config: RunConfig) -> list[str]:
    """What runs but wastes work or does not do what its name promises: one message each."""
    found = []
    interval, bound = config.weights.publish_interval, config.lag.max
    slots = config.rollout.workers * config.rollout.concurrent_groups
    limit = (bound + 1) * config.trainer.groups_per_step
    if bound == 0:
        found.append(
            "lag.max is 0: the trainer waits for every generation and the engines for every step. This is safe, "
            "and the slowest way to run; raise lag.max to overlap them."
        )
    elif interval > 1 and bound < 2 * interval - 1:
        found.append(
            f"lag.max is {bound} with weights every {interval} versions: a group begun just before new weights "
            f"arrive has only {_plural(bound - interval + 1, 'version')} to be finished and trained in, so admission "
            f"holds workers back. Set lag.max to {2 * interval - 1} or more, or publish more often."
        )
    if slots > limit:
        found.append(
            f"{slots} groups could be generated at once (rollout.workers x rollout.concurrent_groups) but the bound "
            f"admits {limit}: the others wait. Lower rollout.concurrent_groups or raise lag.max."
        )
    loss = config.trainer.loss
    if loss.name.startswith("sat") and loss.sat.floor > 0:
        found.append(
            f"trainer.loss.sat.floor is {loss.sat.floor}: it keeps the radius open and switches most of SAT off. Set 0."
        )
    radii = [radius for radius in (loss.clip_low, loss.clip_high) if radius is not None]
    if loss.name == "sat-gspo" and radii and max(radii) < 0.01:
        found.append(
            "sat-gspo with radii below 0.01 never changes a gradient once the gate is above them. Set "
            "trainer.loss.clip_low and clip_high to 0.2."
        )
    if config.trainer.routing_replay == "off" and (shape_of(config) is not None):
        found.append(
            "trainer.routing_replay is off for a mixture of experts: trainer and engine may choose different experts "
            "for the same token, which shows as policy lag where there is none. Set it to required."
        )
    if config.model.path is not None and not (config.model.path / "config.json").is_file():
        found.append(
            f"model.path: {config.model.path} is not on this machine, so its sizes were taken from its name. It has to "
            "be there before `lagrange up`."
        )
    for key, value in config.task.parameters.items():
        if (key == "path" or key.endswith("_path")) and not Path(str(value)).exists():
            found.append(f"task.parameters.{key}: {value} is not on this machine. It has to be there before the run.")
    return found


def meaning(config: RunConfig) -> list[tuple[str, str]]:
    """(topic, sentence) pairs: what the run will do."""
    lag, step, rollout, layout = config.lag.max, config.trainer.groups_per_step, config.rollout, config.trainer.layout
    bound = (
        "0: synchronous. Every token is trained by the version that sampled it."
        if lag == 0
        else f"{lag}: no token is trained more than {_plural(lag, 'version')} after the one that sampled it."
    )
    interval = config.weights.publish_interval
    lines = [
        ("lag bound", bound),
        (
            "in flight",
            f"at most {(lag + 1) * step} groups of {rollout.samples_per_prompt} samples, begun and not yet trained "
            f"({lag + 1} x {step}).",
        ),
        (
            "weights",
            "go to the engines after every step." if interval == 1 else f"go to the engines every {interval} steps.",
        ),
        (
            "step",
            f"{step} groups x {rollout.samples_per_prompt} samples = {step * rollout.samples_per_prompt} responses of "
            f"at most {rollout.max_new_tokens:,} tokens; {config.run.steps} steps.",
        ),
        ("loss", _loss(config)),
        (
            "trainer",
            f"{_plural(layout.ranks, 'rank')} on {config.trainer.device} (data {layout.data}, "
            f"tensor {layout.tensor}, pipeline {layout.pipeline}, expert {layout.expert}), {config.trainer.dtype}, "
            f"started by {config.trainer.launcher}.",
        ),
        (
            "engines",
            f"{len(config.engine.urls)} that run elsewhere."
            if config.engine.urls
            else f"{config.engine.replicas}, each on {_plural(config.engine.tensor_parallel, 'device')} "
            f"({config.engine.device}), {config.engine.dtype}.",
        ),
        ("task", f"{config.task.name}."),
        (
            "restart",
            f"from the last checkpoint, at most {config.trainer.checkpoint.interval_steps} steps back; "
            f"{config.trainer.retention}s of trained groups are kept until then.",
        ),
    ]
    shape = shape_of(config)
    if shape is None:
        lines.append(("memory", "not estimated: the model's sizes are not known on this machine."))
        return lines
    e = estimate(config, shape)
    lines += [
        (
            "model",
            f"{_count(e.parameters)} parameters; weights of {_bytes(e.weights)} as served ({config.engine.dtype}).",
        ),
        (
            "engine memory",
            f"{_bytes(e.engine_device)} of weights on each of its devices, besides the KV cache.",
        ),
        (
            "trainer memory",
            f"{_bytes(e.trainer_rank)} a rank for weights, gradients and optimizer state, besides activations.",
        ),
        (
            "routing",
            f"{_bytes(e.route_bytes_step)} of routing traces a step at the response limit "
            f"({shape.route_bytes_per_token} bytes a token)."
            if e.route_bytes_step
            else "not replayed.",
        ),
        ("queue memory", f"at most {_bytes(e.queue_bytes)} at the bound and the response limit, before compression."),
    ]
    return lines


def _loss(config: RunConfig) -> str:
    loss = config.trainer.loss
    replay = {"required": "with", "available": "where present with", "off": "without"}[config.trainer.routing_replay]
    sat = f", SAT gate at the {loss.sat.alpha:.0%} quantile ({loss.sat.kernel})" if loss.name.startswith("sat") else ""
    advantage = f", {loss.advantage} advantages" if loss.advantage else ""
    return f"{loss.name}{advantage}{_clip(loss.clip_low, loss.clip_high)}{sat}, {replay} routing replay."


def _clip(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    return ", clip " + "/".join("default" if radius is None else f"{radius:g}" for radius in (low, high))


def _bytes(size: int) -> str:
    for limit, unit in ((GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size >= limit:
            return f"{size / limit:,.1f} {unit}"
    return f"{size} bytes"


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _count(number: int) -> str:
    for limit, letter in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= limit:
            return f"{number / limit:.1f} {letter}"
    return str(number)
