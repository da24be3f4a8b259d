"""What the fields of a configuration must be to each other.

Invariant: each rule is a pure function that gives one sentence for each problem, with the figures and the field to
change; a `RunConfig` exists only if none of them gives any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from configs.scores import score_names, task_and_score

if TYPE_CHECKING:
    from configs.schema import RunConfig


def _interval_fits_the_bound(c: RunConfig) -> Iterator[str]:
    need = c.weights.publish_interval - 1
    if c.lag.max < need:
        interval = f"{c.lag.max + 1} or less" if c.lag.max else "1"
        yield (
            f"lag.max is {c.lag.max} but weights.publish_interval is {c.weights.publish_interval}: the engines' "
            f"weights are up to {need} version{'s' * (need > 1)} old, so no group could be trained. Set "
            f"weights.publish_interval: {interval}, or lag.max to at least {need}."
        )


def _adaptive_limits_fit(c: RunConfig) -> Iterator[str]:
    adaptive, need = c.lag.adaptive, c.weights.publish_interval - 1
    if adaptive is None:
        return
    if adaptive.min < need:
        yield (
            f"lag.adaptive.min is {adaptive.min} but weights.publish_interval is {c.weights.publish_interval}: below "
            f"{need} no group could be trained. Set lag.adaptive.min to at least {need}."
        )
    elif adaptive.min > adaptive.max:
        yield f"lag.adaptive.min = {adaptive.min} is above lag.adaptive.max = {adaptive.max}. Lower it."
    elif not adaptive.min <= c.lag.max <= adaptive.max:
        yield (
            f"lag.max is {c.lag.max}, outside lag.adaptive.min to lag.adaptive.max ({adaptive.min} to "
            f"{adaptive.max}). Set lag.max between the two."
        )
    sat = c.trainer.loss.name.startswith("sat") and c.trainer.loss.sat.scope == "lagged"
    if adaptive.figure == "gate_rate" and not sat:
        yield (
            "lag.adaptive.figure is gate_rate, which follows the lag only under a sat-* loss with "
            "trainer.loss.sat.scope: lagged (a gate that is measured on its own step lets through the share "
            "trainer.loss.sat.alpha at any lag). Set that scope, or lag.adaptive.figure: log_ratio_abs_mean."
        )


def _every_data_rank_has_a_part(c: RunConfig) -> Iterator[str]:
    groups, ranks, parts = c.trainer.groups_per_step, c.trainer.layout.data, c.trainer.steps_per_batch
    if groups < ranks:
        yield (
            f"trainer.groups_per_step = {groups} is below trainer.layout.data = {ranks}: a group belongs to one rank, "
            "so some ranks would have nothing to train. Raise trainer.groups_per_step or lower trainer.layout.data."
        )
        return
    samples = groups // ranks * c.rollout.samples_per_prompt
    if parts > samples:
        yield (
            f"trainer.steps_per_batch = {parts} is more than the {samples} samples of a step on one rank "
            "(trainer.groups_per_step x rollout.samples_per_prompt / trainer.layout.data): some optimizer steps would "
            "have nothing to train. Lower it."
        )


def _rewards_of_a_group_differ(c: RunConfig) -> Iterator[str]:
    if c.rollout.samples_per_prompt == 1:
        yield (
            "rollout.samples_per_prompt is 1: an advantage says how a sample compares with the others of its group, so "
            "nothing would be trained. Set it to 2 or more."
        )


def _cache_holds_a_response(c: RunConfig) -> Iterator[str]:
    cache = c.engine.max_total_tokens
    if not c.engine.urls and cache is not None and cache <= c.rollout.max_new_tokens:
        yield (
            f"engine.max_total_tokens = {cache} has no room for a prompt and a response of rollout.max_new_tokens = "
            f"{c.rollout.max_new_tokens}: SGLang would cut responses short. Raise it, or set it to null for as much as "
            "engine.memory_fraction admits."
        )


def _experts_fit_the_ranks(c: RunConfig) -> Iterator[str]:
    layout = c.trainer.layout
    field, width = layout.inside_expert
    plane = layout.data * layout.tensor
    if plane % (layout.expert * width):
        yield (
            f"trainer.layout: expert x {field} = {layout.expert * width} must divide data x tensor = {plane}. "
            "Lower trainer.layout.expert or raise trainer.layout.data."
        )


def _tiny_model_fits_the_layout(c: RunConfig) -> Iterator[str]:
    tiny, layout = c.model.tiny, c.trainer.layout
    if tiny is None:
        return
    for name, size, part, by in (
        ("layers", tiny.layers, "pipeline", layout.pipeline),
        ("key_value_heads", tiny.key_value_heads, "tensor", layout.tensor),
        ("experts", tiny.experts, "expert", layout.expert),
        ("expert_hidden", tiny.expert_hidden, *layout.inside_expert),
    ):
        if size % by:
            yield (
                f"model.tiny.{name} = {size} is not divisible by trainer.layout.{part} = {by}. Change one of the two."
            )
    if tiny.heads % tiny.key_value_heads:
        yield (
            f"model.tiny.heads = {tiny.heads} is not divisible by model.tiny.key_value_heads = "
            f"{tiny.key_value_heads}. Change one of the two."
        )
    if tiny.experts_per_token > tiny.experts:
        yield (
            f"model.tiny.experts_per_token = {tiny.experts_per_token} is above model.tiny.experts = "
            f"{tiny.experts}. Lower it."
        )
    if problem := prompts_have_room(c, tiny.context):
        yield problem


def prompts_have_room(c: RunConfig, context: int) -> str | None:
    """Prompt and response together fit the longest sequence of the model, `context` tokens."""
    if c.rollout.max_new_tokens >= context:
        return (
            f"rollout.max_new_tokens = {c.rollout.max_new_tokens} leaves no room for a prompt in the model's context "
            f"of {context} tokens. Lower it."
        )
    return None


def _groups_can_be_complete(c: RunConfig) -> Iterator[str]:
    if c.rollout.min_samples > c.rollout.samples_per_prompt:
        yield (
            f"rollout.min_samples = {c.rollout.min_samples} is above rollout.samples_per_prompt = "
            f"{c.rollout.samples_per_prompt}. Lower it."
        )


def _curriculum_leaves_prompts(c: RunConfig) -> Iterator[str]:
    curriculum = c.task.curriculum
    if curriculum is not None and curriculum.low >= curriculum.high:
        yield (
            f"task.curriculum.low = {curriculum.low} is not below task.curriculum.high = {curriculum.high}: every "
            "prompt would be passed over. Lower it."
        )


def _schedule_falls(c: RunConfig) -> Iterator[str]:
    optimizer = c.trainer.optimizer
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            f"trainer.optimizer.min_learning_rate = {optimizer.min_learning_rate:g} is above learning_rate = "
            f"{optimizer.learning_rate:g}. Lower it."
        )


def _engines_have_ports(c: RunConfig) -> Iterator[str]:
    last = c.engine.port + c.engine.replicas - 1
    if c.engine.port and last > 65535:
        yield (
            f"engine.port = {c.engine.port} and engine.replicas = {c.engine.replicas} need port {last}, and 65535 is "
            "the last. Lower engine.port."
        )


def _evaluations_are_told_apart(c: RunConfig) -> Iterator[str]:
    labels = [t.label or t.name for t in c.evaluation.tasks]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        yield (
            f"evaluation.tasks: two of them are called {twice!r}, so their results could not be told apart. Give each "
            "a label of its own."
        )


def _best_score_is_measured(c: RunConfig) -> Iterator[str]:
    best = c.evaluation.best
    if best is None:
        return
    task, score = task_and_score(best)
    measured = {t.label or t.name: t.samples for t in c.evaluation.tasks}
    if task not in measured:
        tasks = ", ".join(measured) or "there are none"
        yield f"evaluation.best: {best!r} names no task of evaluation.tasks ({tasks}). Write it as <task>/<score>."
        return
    names = score_names(measured[task])
    if score not in names:
        yield (
            f"evaluation.best: {score!r} is no score of {task}, which has {measured[task]} samples of each prompt. "
            f"Write {' or '.join(f'{task}/{name}' for name in names)}."
        )


def _overlong_buffer_fits(c: RunConfig) -> Iterator[str]:
    shaping = c.task.shaping
    limit = shaping.length_limit or c.rollout.max_new_tokens
    if shaping.overlong_buffer > limit:
        yield (
            f"task.shaping.overlong_buffer = {shaping.overlong_buffer} is longer than the longest response of {limit} "
            f"token{'s' * (limit > 1)} (task.shaping.length_limit, else rollout.max_new_tokens). Lower it."
        )


def _straggler_wait_covers_a_lease(c: RunConfig) -> Iterator[str]:
    if c.lag.straggler_wait_s < c.rollout.lease_s:
        yield (
            f"lag.straggler_wait_s = {c.lag.straggler_wait_s} is shorter than rollout.lease_s = {c.rollout.lease_s}: "
            "the trainer would give up on groups of a dead worker before they are issued again. Raise "
            "lag.straggler_wait_s or lower rollout.lease_s."
        )


def _shared_engines_know_priorities(c: RunConfig) -> Iterator[str]:
    # Preemption would compute running rollouts again, possibly under newer weights: their routes would not be theirs.
    needed = {"--enable-priority-scheduling", "--disable-priority-preemption"}
    shared = c.evaluation.tasks and c.evaluation.engines == "shared"
    if shared and not needed <= set(c.engine.extra_arguments):
        yield (
            "evaluation.engines is shared, but the engines do not schedule by priority. Set engine.extra_arguments: "
            '[--enable-priority-scheduling, --disable-priority-preemption, --default-priority-value, "0"], or '
            "evaluation.engines: own."
        )


def _model_has_one_source(c: RunConfig) -> Iterator[str]:
    if (c.model.path is None) == (c.model.tiny is None):
        yield "model: set exactly one of model.path and model.tiny."


def _redis_certificates_are_of_use(c: RunConfig) -> Iterator[str]:
    if c.redis.ca_file is not None and not (c.redis.url or "").startswith("rediss"):
        yield "redis.ca_file is set, but redis.url does not begin with rediss://: nothing is encrypted. Mend one."


def _payload_folder_is_named(c: RunConfig) -> Iterator[str]:
    folder = c.redis.payload_folder
    if c.redis.payloads == "folder" and (folder is None or not folder.is_absolute()):
        yield (
            "redis.payloads is folder, but redis.payload_folder is not an absolute path. Name a folder that all hosts "
            "share, or one in /dev/shm on a single host."
        )


def _certificates_have_their_keys(c: RunConfig) -> Iterator[str]:
    for name, service in (("weight_sync", c.weight_sync), ("monitor", c.monitor)):
        if (service.cert_file is None) is not (service.key_file is None):
            yield f"{name}.cert_file and {name}.key_file belong together: set both for HTTPS, or none for HTTP."


CROSS_FIELD_RULES = (
    _model_has_one_source,
    _redis_certificates_are_of_use,
    _payload_folder_is_named,
    _certificates_have_their_keys,
    _interval_fits_the_bound,
    _adaptive_limits_fit,
    _every_data_rank_has_a_part,
    _experts_fit_the_ranks,
    _tiny_model_fits_the_layout,
    _groups_can_be_complete,
    _rewards_of_a_group_differ,
    _cache_holds_a_response,
    _overlong_buffer_fits,
    _curriculum_leaves_prompts,
    _schedule_falls,
    _engines_have_ports,
    _evaluations_are_told_apart,
    _best_score_is_measured,
    _straggler_wait_covers_a_lease,
    _shared_engines_know_priorities,
)
