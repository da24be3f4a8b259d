"""Where the record of each step goes: one interface (`MetricsSink`), and the sinks that the configuration asks for.

Invariant: metrics.jsonl is always written and is the truth; the others get the same numbers under the same names, and
one that is not installed is an error at the start, not a gap found later. Prometheus needs no sink: the record goes
with the step to the broker, and the monitor serves its numbers as lagrange_trainer_metric.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

from configs.load import ConfigError
from configs.schema import RunConfig
from trainer.metrics import JsonLines, Several
from trainer.ports import MetricsSink


def sinks_of(config: RunConfig, resume_step: int) -> MetricsSink:
    """metrics.jsonl and the sinks of trainer.sinks. Raises ConfigError if one is not installed."""
    made: list[MetricsSink] = []
    try:
        for name in config.trainer.sinks:
            made.append(TensorBoard(config, resume_step) if name == "tensorboard" else WandB(config))
    except ConfigError:
        Several(made).close()
        raise
    return Several([JsonLines(config.run.folder / "metrics.jsonl", resume_step), *made])


def flat_numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a record by path, {"loss": .1, "sat/q": .02, "by_lag/1/tokens": 40.0}, without its step."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value) and f"{prefix}{name}" != "step":
            found[f"{prefix}{name}"] = float(value)
    return found


class TensorBoard:
    """Event files in <run>/tensorboard, by torch's writer; records beyond the step that is resumed from are purged."""

    def __init__(self, config: RunConfig, resume_step: int) -> None:
        module = _needed("torch.utils.tensorboard", "tensorboard", "tensorboard")
        folder = config.run.folder / "tensorboard"
        self._writer: Any = module.SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, record: Mapping[str, object]) -> None:
        """All numbers at the record's step."""
        for name, value in flat_numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """A Weights & Biases run in offline mode in <run>/wandb; `wandb sync` uploads it."""

    def __init__(self, config: RunConfig) -> None:
        module = _needed("wandb", "wandb", "wandb")
        folder = config.run.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = module.init(
            mode="offline",
            dir=str(folder),
            project="lagrange",
            id=config.run.id,
            name=config.run.name,
            config=config.model_dump(mode="json"),
        )

    def write(self, record: Mapping[str, object]) -> None:
        """All numbers at the record's step."""
        self._run.log(flat_numbers(record), step=record["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _needed(module: str, package: str, sink: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.sinks names {sink}, but {package} is not installed ({error}). Install it in the trainer's "
            "environment, or take it out."
        ) from error
