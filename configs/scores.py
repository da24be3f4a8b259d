"""What the scores of an evaluation are called, of a task with so many samples of each prompt.

Invariant: `evaluation.best` may name exactly the scores that a result can hold, for both are made here.
"""

from __future__ import annotations


def average_name(samples: int) -> str:
    """Of the mean reward of a sample: "avg@8"."""
    return f"avg@{samples}"


def pass_name(k: int) -> str:
    """Of the chance that one of k samples is right: "pass@4"."""
    return f"pass@{k}"


def pass_counts(samples: int) -> tuple[int, ...]:
    """The k whose pass@k is reported: 1, 2, 4, ... and `samples` itself."""
    return tuple(sorted({2**i for i in range(samples.bit_length())} | {samples}))


def score_names(samples: int) -> tuple[str, ...]:
    """All names that a result can hold."""
    return (average_name(samples), *map(pass_name, pass_counts(samples)))


def task_and_score(best: str) -> tuple[str, str]:
    """The parts of `evaluation.best`: "aime24/avg@8" -> ("aime24", "avg@8"). The label of a task may hold a /."""
    task, _, score = best.rpartition("/")
    return task, score
