"""One run of `lagrange up` from its start to its last step, for benchmarks that compare runs.

Invariant: a run that did not train all of its steps gives no records but an error, with what it said.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from services.local.metrics import Record, read_metrics

RUN_S = 1800.0  # longest time for one run, its start included
STOP_S = 30.0


def whole_run(file: Path, folder: Path, steps: int, settings: Mapping[str, object]) -> list[Record]:
    """Train the configuration `file`, with `settings` in place of its own, in `folder`; one record a step.

    Needs .venv-sglang. Raises RuntimeError if the run fails or takes longer than RUN_S.
    """
    command = [sys.executable, "-m", "services", "up", str(file)]
    for name, value in {**settings, "run.steps": steps, "run.directory": folder, "run.id": "run"}.items():
        command += ["--set", f"{name}={value}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # `up` ends its own processes
            said, _ = process.communicate(timeout=STOP_S)
    records = read_metrics(folder / "run" / "metrics.jsonl")
    if process.returncode or len(records) < steps:
        raise RuntimeError(f"the run with {dict(settings)} ended at step {len(records)} of {steps}:\n{said}")
    return records
