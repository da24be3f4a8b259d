"""Keeps the weights of a version: while it is evaluated, and for good if it is the best so far.

Invariant: what is held cannot be taken away (hard links), and runs/<id>/best is whole whenever it exists;
runs/<id>/best.json names its version, step and value. Whatever is lost of them if the process dies in between, the next
score takes the place.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from configs.scores import task_and_score


def best_value(record: dict[str, Any], metric: str) -> float | None:
    """The value that `evaluation.best`, "task/score" as in "aime24/avg@8", names; None if this record has none."""
    task, score = task_and_score(metric)
    if record.get("label") != task or not isinstance(record.get(score), dict):
        return None
    return float(record[score]["value"])


def hold(source: Path, target: Path) -> None:
    """Hard links of a version's files (copies across file systems). Raises OSError if they went away."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=_link)


def keep_best(held: Path, folder: Path, record: dict[str, Any], metric: str) -> bool:
    """Make `held` the run's best checkpoint if it is better than what is kept; whether it was."""
    value = best_value(record, metric)
    if value is None:
        return False
    best, note = folder / "best", folder / "best.json"
    if best.is_dir() and note.exists() and json.loads(note.read_text(encoding="utf-8"))["value"] >= value:
        return False
    aside = folder / ".best.new"
    hold(held, aside)
    shutil.rmtree(best, ignore_errors=True)
    aside.rename(best)
    text = json.dumps({"metric": metric, "value": value, "version": record["version"], "step": record["step"]})
    (folder / ".best.json").write_text(text, encoding="utf-8")
    (folder / ".best.json").replace(note)
    return True


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
    return target
