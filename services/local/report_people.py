"""What people read in a report: evaluations, and some of the trajectories.

Invariant: bounded whatever the run wrote: the newest EVALUATIONS results and GROUPS groups. Models' text is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.evaluation.run import scores_of
from rollout.samples import read_samples
from services.local.metrics import read_evaluations

EVALUATIONS = 50
GROUPS = 12
HUES = 8  # versions that follow each other have different colours


def evaluations(folder: Path) -> str:
    """A table of the evaluations in runs/<id>/metrics.jsonl, newest first; "" if there is none."""
    records = read_evaluations(folder / "metrics.jsonl", EVALUATIONS)
    if not records:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(str(r.get('label', '')))}</td><td>{r.get('version')}</td><td>{r.get('step')}</td>"
        f"<td>{r.get('evaluation_lag', '')}</td><td>{_scores(r)}</td><td>{r.get('missing', 0)}</td></tr>"
        for r in reversed(records)
    )
    return (
        "<section><h2>Evaluations</h2><p>Each is of one version; 95 % intervals over prompts. Evaluation lag: the "
        "trainer's version when the result was there, less the version evaluated.</p><table><thead><tr><th>Task</th>"
        "<th>Version</th><th>Step</th><th>Evaluation lag</th><th>Scores</th><th>Missing</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></section>"
    )


def samples(folder: Path) -> str:
    """The newest groups that workers noted; "" if there is none."""
    groups = read_samples(folder, GROUPS)
    if not groups:
        return ""
    return (
        "<section><h2>Samples</h2><p>Some of the newest groups. Colours tell the versions that sampled a piece; grey "
        f"is an environment's.</p>{''.join(_group(group) for group in reversed(groups))}</section>"
    )


def _group(group: dict[str, Any]) -> str:
    rewards = [r for r in group.get("rewards", []) if isinstance(r, int | float)]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    rows = "".join(
        f"<tr><td>{float(one.get('reward', 0)):g}</td><td>{html.escape(str(one.get('finish', '')))}</td>"
        f'<td style="white-space:pre-wrap;text-align:left">{_pieces(one.get("pieces", []))}</td></tr>'
        for one in group["samples"]
    )
    lag = f", lag {int(group['lag'])} when it was submitted" if "lag" in group else ""
    return (
        f"<details><summary>Prompt {group.get('prompt_index')}, version {group.get('version')}{lag}: mean reward "
        f'{mean:.3g}</summary><p style="white-space:pre-wrap">{html.escape(str(group.get("prompt", "")))}</p>'
        "<table><thead><tr>"
        f"<th>Reward</th><th>End</th><th>Answer</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )


def _pieces(pieces: list[Any]) -> str:
    out = []
    for version, text in pieces:
        style = "opacity:.55" if version is None else f"color:oklch(.62 .14 {int(version) % HUES * 360 // HUES})"
        title = "environment" if version is None else f"version {int(version)}"
        out.append(f'<span style="{style}" title="{title}">{html.escape(str(text))}</span>')
    return "".join(out)


def _scores(record: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{html.escape(name)} {score['value']:.3f} ({score['low']:.3f} to {score['high']:.3f})"
        for name, score in scores_of(record).items()
    )
