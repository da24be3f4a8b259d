"""What a configuration means, in words and figures: the text of `lagrange check`.

Invariant: pure functions; nothing is started, and a checkpoint or a task that is not on this machine is named as
missing, not treated as an error of the file; a folder that is here and holds no checkpoint is one. Every estimate says
what it counts.
"""

from __future__ import annotations

import re
from dataclasses import replace

from configs.memory import Estimate, cache_bytes_per_token, estimate, route_bytes_per_token
from configs.model_sizes import ModelSizes, layout_problems, model_sizes, read_json, sizes_of_tiny
from configs.rules import prompts_have_room
from configs.schema import RunConfig

GIB = 1024**3
TASK_NAME = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")

QWEN3_30B_A3B = ModelSizes(
    layers=48,
    hidden=2048,
    heads=32,
    key_value_heads=4,
    head_dim=128,
    intermediate=6144,
    vocabulary=151936,
    context=40960,
    tied=False,
    experts=128,
    top_k=8,
    expert_hidden=768,
    moe_layers=(True,) * 48,
)
QWEN3_0_6B = ModelSizes(
    layers=28,
    hidden=1024,
    heads=16,
    key_value_heads=8,
    head_dim=128,
    intermediate=3072,
    vocabulary=151936,
    context=40960,
    tied=True,
    experts=0,
    top_k=0,
    expert_hidden=0,
    moe_layers=(False,) * 28,
)
KNOWN = {"qwen3-30b-a3b": QWEN3_30B_A3B, "qwen3-0.6b": QWEN3_0_6B}  # by the beginning of a folder's name
COUNTED = ("qwen3_moe", "qwen3")  # model types whose parameters configs/memory.py counts
OVERCOMMIT = 4  # full responses asked for at once for each that the KV cache holds; most end before they are full


def sizes_of(config: RunConfig) -> ModelSizes | None:
    """The model's sizes: from model.tiny, from config.json if the folder is here, else from a known name, else None.

    None also for a model that is no Qwen3, whose parameters are not counted. Raises ConfigError if config.json is
    damaged.
    """
    tiny, path = config.model.tiny, config.model.path
    if tiny is not None:
        return sizes_of_tiny(tiny)
    if path is not None and (path / "config.json").is_file():
        tree = read_json(path / "config.json")
        known = tree.get("model_type") in COUNTED
        return model_sizes(tree, f"model.path: {path}/config.json") if known else None
    name = "" if path is None else path.name.lower()
    found = next((sizes for beginning, sizes in KNOWN.items() if name.startswith(beginning)), None)
    return replace(found, context=32768) if found is not None and name.endswith("-base") else found


def errors(config: RunConfig) -> list[str]:
    """What makes a valid file impossible to run anywhere: one message each."""
    found = []
    if not TASK_NAME.match(config.task.name):
        found.append(
            f"task.name: {config.task.name!r} is no task name. Use small letters, digits and hyphens, as in max-digit."
        )
    path = config.model.path
    if path is not None and path.exists() and not (path / "config.json").is_file():
        found.append(
            f"model.path: {path} is here and holds no checkpoint (config.json is missing). Put a Hugging Face "
            "checkpoint there, or name another folder."
        )
    sizes = sizes_of(config)
    if sizes is not None and config.model.tiny is None:
        found += layout_problems(sizes, config.trainer.layout)
        if problem := prompts_have_room(config, sizes.context):
            found.append(problem)
        if not sizes.experts and config.trainer.routing_replay == "required":
            found.append(
                f"trainer.routing_replay is required, but {config.model.path} is a dense model, which routes nothing. "
                'Set trainer.routing_replay: "off".'
            )
    return found


def warnings(config: RunConfig) -> list[str]:
    """What runs but wastes work or does not do what its name promises: one message each.

    Those of the loss are in trainer/losses/catalogue.py.
    """
    found = []
    sizes = sizes_of(config)
    interval, bound = config.weights.publish_interval, config.lag.max
    slots, limit = _slots(config), (bound + 1) * config.trainer.groups_per_step
    if bound == 0:
        found.append(
            "lag.max is 0: the trainer waits for every generation and the engines for every step. This is safe, "
            "and the slowest way to run; raise lag.max to overlap them."
        )
    elif interval > 1 and bound < 2 * interval - 1:
        found.append(
            f"lag.max is {bound} with weights every {interval} versions: a group begun just before new weights "
            f"arrive has only {_plural(bound - interval + 1, 'version')} to be finished and trained in, so admission "
            "holds workers back. This costs time and no group: leave it if that lag is what you want to see, as in the "
            f"paper's lag 8; else set lag.max to {2 * interval - 1} or more, or publish more often."
        )
    if slots > limit:
        found.append(
            f"{slots} groups could be generated at once (rollout.workers x rollout.concurrent_groups) but the bound "
            f"admits {limit}: the others wait. Lower rollout.concurrent_groups or raise lag.max."
        )
    if config.trainer.routing_replay == "off" and sizes is not None and sizes.experts:
        found.append(
            "trainer.routing_replay is off for a mixture of experts: trainer and engine may choose different experts "
            "for the same token, which shows as policy lag where there is none. Set it to required."
        )
    if config.model.path is not None and not config.model.path.exists():
        how = "are not known" if sizes is None else "were taken from its name"
        found.append(
            f"model.path: {config.model.path} is not on this machine, so its sizes {how}. It has to be there before "
            "`lagrange up`."
        )
    if small := _small_cache(config, sizes):
        found.append(small)
    e = None if sizes is None else estimate(config, sizes)
    if e is not None and e.queue_limit < e.queue_bytes / 2:
        found.append(
            f"trajectories may take {_bytes(e.queue_limit)}, which responses of {e.queue_limit / e.queue_bytes:.1%} of "
            f"rollout.max_new_tokens fill: then workers wait, and lag.max is not reached. Raise {_limit_field(config)} "
            "to what the server has."
        )
    return found


def _slots(config: RunConfig) -> int:
    """Groups that all workers together may generate at once, whatever the bound admits."""
    return config.rollout.workers * config.rollout.concurrent_groups


def _small_cache(config: RunConfig, sizes: ModelSizes | None) -> str:
    """What is said of a KV cache that holds far fewer responses than workers ask an engine for at once; else "".

    Of a cache that engine.memory_fraction alone bounds nothing is known: the device may be elsewhere.
    """
    rollout, engine = config.rollout, config.engine
    groups = min(_slots(config), (config.lag.max + 1) * config.trainer.groups_per_step)
    asked = -(-groups * rollout.samples_per_prompt // engine.replicas)
    need = asked * rollout.max_new_tokens
    if engine.urls or engine.max_total_tokens is None or engine.max_total_tokens * OVERCOMMIT >= need:
        return ""
    takes = ""
    if sizes is not None:
        token = cache_bytes_per_token(sizes, engine.dtype)
        takes = f" ({_bytes(engine.max_total_tokens * token)}; all of them would take {_bytes(need * token)})"
    held, enough = _plural(engine.max_total_tokens // rollout.max_new_tokens, "response"), -(-need // OVERCOMMIT)
    return (
        f"engine.max_total_tokens = {engine.max_total_tokens:,} lets an engine's KV cache hold {held} of "
        f"rollout.max_new_tokens = {rollout.max_new_tokens:,} at once, and workers ask it for {asked:,}{takes}: the "
        f"others wait, or are computed again. Set engine.max_total_tokens to {enough:,} or more, or to null "
        f"for all that engine.memory_fraction ({engine.memory_fraction:g} of the device's memory) leaves beside the "
        "weights; or lower rollout.concurrent_groups."
    )


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
            f"at most {_plural(rollout.max_new_tokens, 'token')}; {_plural(config.run.steps, 'step')}.",
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
            f"from the last checkpoint, at most {_plural(config.trainer.checkpoint.interval_steps, 'step')} back; "
            f"{config.trainer.retention}s of trained groups are kept until then.",
        ),
    ]
    return lines + _memory(config)


def _memory(config: RunConfig) -> list[tuple[str, str]]:
    """What the run takes, as far as it is known on this machine."""
    sizes = sizes_of(config)
    if sizes is None:
        return [("memory", "not estimated: the model's sizes are not known on this machine.")]
    e = estimate(config, sizes)
    return [
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
            f"({route_bytes_per_token(sizes)} bytes a token)."
            if e.route_bytes_step
            else "not replayed.",
        ),
        ("queue memory", _queue(config, e)),
    ]


def _limit_field(config: RunConfig) -> str:
    """The field by which trajectories get more room."""
    return f"redis.{'max_memory_mb' if config.redis.payloads == 'redis' else 'payload_limit_mb'}"


def _queue(config: RunConfig, e: Estimate) -> str:
    kept = (
        f"{_bytes(e.kept_bytes)} more of trained groups that are kept until their checkpoint (freed sooner where room "
        "is short), "
        if e.kept_bytes
        else ""
    )
    return (
        f"at most {_bytes(e.queue_bytes)} of responses in flight at their limit, {kept}and "
        f"{_bytes(e.bytes_per_prompt_token)} for each token of their prompts, before compression; "
        f"{_bytes(e.queue_limit)} are allowed{_shortage(config, e)}."
    )


def _shortage(config: RunConfig, e: Estimate) -> str:
    """What comes of a limit that the longest responses would fill."""
    if e.queue_bytes <= e.queue_limit:
        return ""
    return (
        f". No problem while responses have less than {e.queue_limit / e.queue_bytes:.0%} of rollout.max_new_tokens on "
        "average; with longer ones workers wait for the trainer, nothing is lost, and less of lag.max is used. Raise "
        f"{_limit_field(config)} to what the server has, if it has more"
    )


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
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _count(number: int) -> str:
    for limit, letter in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= limit:
            return f"{number / limit:.1f} {letter}"
    return str(number)
