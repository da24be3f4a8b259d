"""What stale data costs in learning, by loss: `lagrange up` on one configuration under several losses and bounds.

    python -m benchmarks.learning [configuration] [losses] [bounds] [seeds] [steps]
                                                       (configs/local-stale.yaml grpo,sat-grpo 1,8 3 150)

A bound of L comes with weights that are published every max(1, L) versions, as in the SAT paper, so that lags of 1 to L
occur, whatever the machine's speed. A seed makes the model, the prompts and their order. Prints one line for each run:

    reward     mean of the last tenth of the steps
    best       largest mean over any tenth
    lag        mean policy lag of the tokens in the last tenth
    log_ratio  mean |log pi - log mu| there: how far trainer and sampling policy have come apart
    entropy    of the policy there, in nats a token

then, for each loss and bound, the medians over the seeds and the smallest and largest reward. Needs .venv-sglang. The
figures do not depend on what else the machine does; only the time does.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import product
from pathlib import Path

from benchmarks.whole_run import whole_run
from services.local.metrics import Record


@dataclass(frozen=True, slots=True)
class Learned:
    """Of one run, or the medians of several; the module says what each is."""

    reward: float
    best: float
    lag: float
    log_ratio: float
    entropy: float


def learned(records: Sequence[Record]) -> Learned:
    """Of all steps of a run, one record each, at least ten."""
    tenth = len(records) // 10
    if not tenth:
        raise ValueError(f"{len(records)} steps are too few: at least ten")
    rewards = [record["reward_mean"] for record in records]
    last = records[-tenth:]

    def mean(name: str) -> float:
        return statistics.fmean(record[name] for record in last)

    return Learned(
        reward=mean("reward_mean"),
        best=max(statistics.fmean(rewards[i : i + tenth]) for i in range(len(rewards) - tenth + 1)),
        lag=mean("lag_mean"),
        log_ratio=mean("log_ratio_abs_mean"),
        entropy=mean("entropy"),
    )


def measure(file: Path, loss: str, bound: int, seed: int, steps: int) -> Learned:
    """One run in a folder of its own, which goes. Raises RuntimeError if it fails."""
    settings = {
        "trainer.loss.name": loss,
        "lag.max": bound,
        "weights.publish_interval": max(1, bound),
        "run.seed": seed,
    }
    with tempfile.TemporaryDirectory() as folder:
        return learned(whole_run(file, Path(folder), steps, settings))


def line(loss: str, bound: object, seed: str, found: Learned) -> str:
    """A row of the table."""
    return f"{loss:16}{bound:>8}{seed:>10}" + "".join(f"{value:11.3f}" for value in astuple(found))


def medians(runs: Sequence[Learned]) -> Learned:
    """Figure by figure."""
    return Learned(*(statistics.median(column) for column in zip(*map(astuple, runs), strict=True)))


def main(
    file: str = "configs/local-stale.yaml",
    losses: str = "grpo,sat-grpo",
    bounds: str = "1,8",
    seeds: str = "3",
    steps: str = "150",
) -> None:
    """Run and print."""
    head = f"{'loss':16}{'lag.max':>8}{'seed':>10}" + "".join(f"{field.name:>11}" for field in fields(Learned))
    sys.stdout.write(head + "\n")
    cases = [(loss, int(bound)) for loss, bound in product(losses.split(","), bounds.split(","))]
    found: dict[tuple[str, int], list[Learned]] = {case: [] for case in cases}
    for seed, (loss, bound) in product(range(int(seeds)), cases):
        found[loss, bound].append(measure(Path(file), loss, bound, seed, int(steps)))
        sys.stdout.write(line(loss, bound, str(seed), found[loss, bound][-1]) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"medians, and the rewards' range\n{head}{'range':>16}\n")
    for (loss, bound), runs in found.items():
        rewards = [run.reward for run in runs]
        sys.stdout.write(line(loss, bound, "median", medians(runs)) + f"  {min(rewards):6.3f} ..{max(rewards):6.3f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
