"""What is wrong with a configuration that only those could tell who use it: trainer, workers, engines.

Invariant: nothing is started, and torch is not imported; all problems come together, each named by its field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

from configs import ConfigError, RunConfig
from configs import check as checks
from services.accelerators import lacking

SINK_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}  # what each of trainer.sinks imports


@dataclass(frozen=True, slots=True)
class Findings:
    """problems: why it can run nowhere. absent: what this machine lacks (data, GPUs). warnings: what wastes work.

    facts: (topic, sentence) pairs, as of configs.check.meaning, that took a look at the data.
    """

    problems: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)


def examine(config: RunConfig) -> Findings:
    """Look at the model's sizes, the loss, the devices and the tasks."""
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
    found.absent.extend(_sinks_not_installed(config))
    _examine_tasks(config, found)
    return found


def _sinks_not_installed(config: RunConfig) -> list[str]:
    """A folder that only has the name of a package, as wandb leaves one, is none."""
    if config.trainer.launcher == "ray":  # whose ranks may be anywhere
        return []
    return [
        f"trainer.sinks names {name}, but {name} is not installed. Install it in the trainer's environment, or take it "
        "out."
        for name in config.trainer.sinks
        if (spec := find_spec(SINK_PACKAGES[name])) is None or spec.origin is None
    ]


def _examine_tasks(config: RunConfig, found: Findings) -> None:
    """Make each task, as a worker would, and count the prompts of the one that is trained on."""
    from rollout.datasets.rows import NotHere
    from rollout.tasks import make_task
    from rollout.tasks.data_set import DataSetTask

    trained = config.task.parameters
    for name, parameters in [(config.task.name, trained), *((t.name, t.parameters) for t in config.evaluation.tasks)]:
        try:
            task = make_task(name, config.run.seed, parameters)
        except ConfigError as error:
            (found.absent if isinstance(error.__cause__, NotHere) else found.problems).append(str(error))
            continue
        if parameters is trained and isinstance(task, DataSetTask) and task.source.prompts is not None:
            _see_how_far(task.source.prompts, config, found)


def _see_how_far(prompts: int, config: RunConfig, found: Findings) -> None:
    """What comes of a data set that ends after so many prompts."""
    groups, wanted = config.trainer.groups_per_step, config.run.steps
    reach = f"{prompts:,} prompts in all its epochs"
    if prompts < groups:
        found.problems.append(
            f"task.parameters.epochs: the data set has {reach}, and a step takes trainer.groups_per_step = {groups:,}: "
            "nothing would be trained. Raise epochs, add rows, or lower trainer.groups_per_step."
        )
        return
    steps, passed_over = prompts // groups, config.task.drop_equal_groups or config.task.curriculum is not None
    most = "at most " if passed_over else ""
    end = f": the run ends with them, before run.steps = {wanted:,}" if steps < wanted else ""
    found.facts.append(("data set", f"{reach}, enough for {most}{steps:,} step{'s' * (steps > 1)}{end}."))
