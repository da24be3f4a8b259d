"""What is wrong with a configuration that only those could tell who use it: trainer, workers, engines.

Invariant: nothing is started, and torch is not imported; all problems come together, each named by its field.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from configs import ConfigError, RunConfig
from configs import check as checks
from services.accelerators import lacking


@dataclass(frozen=True, slots=True)
class Findings:
    """problems: why it can run nowhere. absent: what this machine lacks (data, GPUs). warnings: what wastes work."""

    problems: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def examine(config: RunConfig) -> Findings:
    """Look at the model's sizes, the loss, the devices and the tasks."""
    from rollout.datasets.rows import BadRow
    from rollout.tasks import make_task
    from trainer.losses import catalogue

    found = Findings()
    try:
        found.problems.extend(checks.errors(config))
        found.warnings.extend(checks.warnings(config))
    except ConfigError as error:  # a damaged config.json
        found.problems.append(str(error))
    try:
        found.warnings.extend(catalogue.warnings(catalogue.loss_settings(config)))
    except ConfigError as error:
        found.problems.append(str(error))
    found.absent.extend(lacking(config))
    tasks = [(config.task.name, config.task.parameters), *((t.name, t.parameters) for t in config.evaluation.tasks)]
    for name, parameters in tasks:
        try:
            make_task(name, config.run.seed, parameters)
        except ConfigError as error:
            (found.absent if isinstance(error.__cause__, BadRow) else found.problems).append(str(error))
    return found
