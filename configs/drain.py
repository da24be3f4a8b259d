"""How long a process that is told to stop may go on with what it has begun; whoever ends it waits longer than that."""

from __future__ import annotations

import math
import os

from configs.load import ConfigError

DRAIN = "LAGRANGE_DRAIN_S"
"""Of an engine: for its running requests. Of the trainer's ranks: for the step that runs and a checkpoint."""


def drain_seconds(default: float = 0.0) -> float:
    """The seconds that DRAIN names, `default` if it is not set. Raises ConfigError if it holds anything else."""
    text = os.environ.get(DRAIN, "")
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"{DRAIN}: {text!r} is no number of seconds. Set one, or leave it unset.")
    return seconds
