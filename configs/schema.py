"""The schema of a run's configuration.

Invariant: a `RunConfig` that exists is complete and free of contradictions that can be seen without starting
anything: unknown keys are refused, every field has a unit and a sentence, and every rule of configs/rules.py names the
field to change. Secrets are not part of it: they come from the environment (`LAGRANGE_REDIS_PASSWORD`,
`LAGRANGE_API_TOKEN`, `LAGRANGE_ENGINE_API_KEY`) or from the files that `*_FILE` variants of those name.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from configs.rules import CROSS_FIELD_RULES
from configs.sections.rollout import (
    CurriculumSection,
    EngineSection,
    EvaluationSection,
    EvaluationTask,
    RolloutSection,
    ShapingSection,
    TaskSection,
)
from configs.sections.run import AdaptiveLagSection, LagSection, ModelSection, RedisSection, RunSection, TinyModel
from configs.sections.section import Port, Positive, Seconds, Section
from configs.sections.services import ServiceSection, TracesSection, WeightsSection
from configs.sections.trainer import (
    CheckpointSection,
    LayoutSection,
    LossSection,
    OptimizerSection,
    RaySection,
    SatSection,
    TrainerSection,
)

__all__ = [
    "AdaptiveLagSection",
    "CheckpointSection",
    "CurriculumSection",
    "EngineSection",
    "EvaluationSection",
    "EvaluationTask",
    "LagSection",
    "LayoutSection",
    "LossSection",
    "ModelSection",
    "OptimizerSection",
    "Port",
    "Positive",
    "RaySection",
    "RedisSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "SatSection",
    "Seconds",
    "Section",
    "ServiceSection",
    "ShapingSection",
    "TaskSection",
    "TinyModel",
    "TracesSection",
    "TrainerSection",
    "WeightsSection",
]


class RunConfig(Section):
    """One run, complete. `lagrange check FILE` builds it and prints what it means."""

    run: RunSection
    redis: RedisSection = Field(default_factory=RedisSection)
    lag: LagSection
    model: ModelSection
    task: TaskSection
    rollout: RolloutSection
    engine: EngineSection = Field(default_factory=EngineSection)
    trainer: TrainerSection
    weights: WeightsSection = Field(default_factory=WeightsSection)
    weight_sync: ServiceSection = Field(default_factory=ServiceSection)
    monitor: ServiceSection = Field(default_factory=ServiceSection)
    traces: TracesSection = Field(default_factory=TracesSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if problems := [problem for rule in CROSS_FIELD_RULES for problem in rule(self)]:
            raise ValueError("\n".join(problems))
        return self
