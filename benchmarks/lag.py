"""What the bound is worth in speed: `lagrange up` on one configuration under several bounds, one run after the other.

    python -m benchmarks.lag [configuration] [bounds] [steps] [rounds]      (configs/local-lag.yaml 0,1,2,4 40 2)

Each round runs every bound once; of each run the first steps are left out, in which the pipeline fills. Prints one line
for each run and then, for each bound, the medians over the rounds:

    step_s          median time from one optimizer step to the next, in seconds
    tokens_per_s    response tokens trained a second, over all steps that count
    lag, most       mean and largest policy lag of those tokens
    waits           share of its time that the trainer waited for groups
    gain            tokens a second, over those of the first bound in the same round
    load            of the machine when the run ended, its own processes included (mean over one minute)

Needs .venv-sglang, and nothing else on the machine that wants its cores.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.whole_run import whole_run
from services.local.metrics import Record

FIRST_STEPS = 6  # engines warm up and the pipeline fills


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or the medians of several; the module says what each is."""

    step_s: float
    tokens_per_s: float
    lag: float
    most: float
    waits: float
    gain: float
    load: float


def figures(records: Sequence[Record], load: float) -> Figures:
    """Of the steps after FIRST_STEPS; the gain is still to be set against another run. load: of the machine."""
    seconds = [after["time_s"] - before["time_s"] for before, after in pairwise(records[FIRST_STEPS - 1 :])]
    counted = records[FIRST_STEPS:]
    tokens = [record["response_tokens"] for record in counted]
    return Figures(
        step_s=statistics.median(seconds),
        tokens_per_s=sum(tokens) / sum(seconds),
        lag=sum(r["lag_mean"] * n for r, n in zip(counted, tokens, strict=True)) / sum(tokens),
        most=max(record["lag_max"] for record in counted),
        waits=sum(record["wait_s"] for record in counted) / sum(seconds),
        gain=1.0,
        load=load,
    )


def measure(file: Path, bound: int, steps: int, folder: Path) -> Figures:
    """Of one run in `folder`, from its first step to its last. Raises RuntimeError if it fails."""
    return figures(whole_run(file, folder, steps, {"lag.max": bound}), os.getloadavg()[0])


def medians(runs: Sequence[Figures]) -> Figures:
    """Figure by figure."""
    return Figures(*(statistics.median(column) for column in zip(*map(astuple, runs), strict=True)))


def line(bound: int, found: Figures) -> str:
    """A row of the table, under the names of `head`."""
    return f"{bound:7}" + "".join(f"{value:14.2f}" for value in astuple(found)) + "\n"


def compare(measure: Callable[[int, int, Path], Figures], bounds: str, steps: int, rounds: int) -> None:
    """Measure each bound once a round, and print. measure: (bound, steps, empty folder) -> figures of one run."""
    if steps <= FIRST_STEPS:
        sys.exit(f"{steps} steps are too few: the first {FIRST_STEPS} of a run are left out")
    by_bound: dict[int, list[Figures]] = {int(bound): [] for bound in bounds.split(",")}
    head = "lag.max" + "".join(f"{field.name:>14}" for field in fields(Figures)) + "\n"
    sys.stdout.write(head)
    for _ in range(rounds):
        first: Figures | None = None
        for bound, runs in by_bound.items():
            with tempfile.TemporaryDirectory() as scratch:
                found = measure(bound, steps, Path(scratch))
            first = first or found
            runs.append(replace(found, gain=found.tokens_per_s / first.tokens_per_s))
            sys.stdout.write(line(bound, runs[-1]))
            sys.stdout.flush()
    sys.stdout.write(f"medians of {rounds}\n{head}")
    for bound, runs in by_bound.items():
        sys.stdout.write(line(bound, medians(runs)))


def main(file: str = "configs/local-lag.yaml", bounds: str = "0,1,2,4", steps: str = "40", rounds: str = "2") -> None:
    """Run and print."""
    compare(partial(measure, Path(file)), bounds, int(steps), int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
