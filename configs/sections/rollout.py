"""What is sampled and judged: task, rollout workers, engines, evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from configs.sections.section import Port, Positive, Processes, Seconds, Section, text


class ShapingSection(Section):
    """What is added to a task's reward (docs/rewards.md); the defaults add nothing."""

    length_limit: int = Field(0, ge=0, description="Length at which a response is too long; 0: rollout.max_new_tokens.")
    overlong_buffer: int = Field(
        0, ge=0, description="DAPO's soft overlong penalty grows over so many tokens below the limit; 0: none."
    )
    overlong_penalty: float = Field(1.0, ge=0, description="What a response at the limit loses.")
    truncated_reward: float | None = Field(
        None, description="Reward of a response that was cut at rollout.max_new_tokens; null: as the task judges it."
    )
    format_pattern: str | None = Field(None, description="Regular expression that a well-formed response matches.")
    format_reward: float = Field(0.0, description="Added to the reward of a response that matches format_pattern.")

    @field_validator("format_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} is no regular expression ({error}). Mend it.") from error
        return pattern


class CurriculumSection(Section):
    """Passes over prompts that are too easy or too hard by now (docs/rewards.md); all workers share what is known."""

    low: float = Field(0.05, ge=0, le=1, description="A prompt whose samples pass less often is passed over.")
    high: float = Field(0.95, ge=0, le=1, description="A prompt whose samples pass more often is passed over.")
    again: float = Field(0.1, gt=0, le=1, description="Share of those prompts that is drawn all the same.")
    pass_reward: float = Field(1.0, description="Reward from which on a sample has passed.")
    memory: float = Field(0.5, ge=0, lt=1, description="How much of what was known counts on after a new group.")


class TaskSection(Section):
    """What is trained on: a name in the task registry and its parameters."""

    name: str = Field(..., description="Name in the task registry (docs/add-a-task.md).")
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed to the task as keyword arguments. A relative path, and a module of your own, is looked for "
        "in the folder from which lagrange is called.",
    )
    shaping: ShapingSection = Field(default_factory=ShapingSection, description="Added to the task's reward.")
    curriculum: CurriculumSection | None = Field(None, description="By pass rate, while the run goes on; null: none.")
    drop_equal_groups: bool = Field(
        False,
        description="Workers drop groups whose rewards are all equal, counted as filtered, and draw others instead.",
    )


class RolloutSection(Section):
    """Rollout workers: how samples are drawn."""

    workers: Processes = Field(2, description="Worker processes that `lagrange up` starts.")
    concurrent_groups: Positive = Field(8, description="Groups that one worker generates at the same time.")
    samples_per_prompt: Positive = Field(16, description="Samples in a group.")
    temperature: float = Field(
        1.0, gt=0, le=10, description="Sampling temperature; the trainer divides its logits by the same number."
    )
    max_new_tokens: Positive = Field(
        ..., description="Longest response, in tokens: of an environment all turns together, of an agent one call."
    )
    generation_timeout_s: Seconds = Field(60.0, description="Longest wait for one answer of an engine, in seconds.")
    part_tokens: int = Field(
        2048,
        ge=0,
        description="Longer responses come in parts, so that a dead engine costs the last part alone: as a stream, or "
        "in requests of so many tokens where routes are replayed, which SGLang sends with an answer's end. In one if "
        "this is 0, or interrupted is not continue.",
    )
    stall_timeout_s: Seconds = Field(
        60.0, description="Longest silence in a stream that has begun, in seconds; then it counts as broken off."
    )
    interrupted: Literal["continue", "restart", "drop"] = Field(
        "continue",
        description="What becomes of a sample that an update interrupted: it goes on where it was, is drawn again, or "
        "is left out of its group.",
    )
    max_versions: Positive = Field(
        16, description="Most versions that one sample may span; one that would need more is drawn again."
    )
    generation_tries: Positive = Field(4, description="Tries for one sample before it is given up.")
    min_samples: Positive = Field(2, description="A group that ends with fewer samples than this fails.")
    group_tries: Positive = Field(
        3,
        description="Times that a prompt is issued again after a failure or staleness before it is a dead letter.",
    )
    lease_s: Seconds = Field(
        30.0, description="A worker that does not renew a group's lease for this long, in seconds, loses it."
    )
    reward_timeout_s: Seconds = Field(
        10.0, description="Longest time for the reward of one sample, or one step of an environment, in seconds."
    )
    reward_processes: Positive = Field(2, description="Processes of one worker in which rewards that may hang run.")
    reward_memory_mb: Positive = Field(2048, description="Address space of one such process, in MiB.")


class EngineSection(Section):
    """SGLang servers and how `lagrange engine` starts them."""

    replicas: Processes = Field(1, description="Engines that `lagrange up` starts.")
    urls: tuple[Annotated[str, text(r"^https?://[^/\s]+", "address such as http://host:30000")], ...] = Field(
        (),
        description="Engines that run elsewhere, by base URL; weight-sync lets them join, each address of a name as an "
        "engine of its own. Not empty: `lagrange up` starts none.",
    )
    host: str = Field("127.0.0.1", description="Address that an engine listens on.")
    port: Port = Field(0, description="Port of the first engine, the others follow; 0: free ones.")
    python: Path = Field(
        Path(".venv-sglang/bin/python"), description="Interpreter of the environment in which SGLang is installed."
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the engine computes.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number format of the engine's weights.")
    tensor_parallel: Positive = Field(1, description="Devices that one engine is spread over.")
    memory_fraction: float = Field(
        0.3, gt=0, lt=1, description="Share of the device's memory for weights and KV cache."
    )
    max_total_tokens: Positive | None = Field(
        20000, description="Size of the KV cache in tokens; null: as much as memory_fraction admits."
    )
    start_timeout_s: Seconds = Field(600.0, description="Longest time from start to the first answer, in seconds.")
    metrics: bool = Field(
        True,
        description="Whether SGLang keeps metrics of its own at /metrics; on a CPU they cost a fifth of its time.",
    )
    extra_arguments: tuple[str, ...] = Field((), description="Further arguments of sglang.launch_server.")


class EvaluationTask(Section):
    """One task of an evaluation."""

    name: str = Field(..., description="Name in the task registry.")
    label: str = Field("", description="Name in the results; empty: the task's.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Passed to the task as keyword arguments.")
    prompts: Positive = Field(100, description="Prompts 0 to N - 1 of the task.")
    samples: Positive = Field(8, description="Samples of each prompt: k of avg@k.")
    seed: int = Field(1, ge=0, description="Of the task's prompts; another than run.seed keeps them apart.")


class EvaluationSection(Section):
    """What `lagrange evaluator` scores while the run trains (docs/evaluate.md)."""

    tasks: tuple[EvaluationTask, ...] = Field((), description="Tasks; none: nothing is evaluated.")
    every_steps: Positive = Field(20, description="Optimizer steps between two evaluated versions, at least.")
    engines: Literal["own", "shared"] = Field(
        "own", description="Where it samples: an engine of its own, or the run's while they serve the version."
    )
    priority: int = Field(
        1, description="Of its requests on shared engines; those of rollouts have 0, larger goes first."
    )
    best: str | None = Field(None, description="Score by which the best checkpoint is kept, such as aime24/avg@8.")
