"""runs/<id>/report.html: what a run did, on one page that needs nothing but itself.

Invariant: the page is a pure function of the configuration, metrics.jsonl and the last snapshot: ledger.json, which
`up` leaves behind, or what Redis gives while it has the run. So `lagrange report` draws it again at any time; the page
asks for nothing over the network.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from broker.types import PLACES, Snapshot, Tally
from configs import ConfigError, RunConfig
from services.local import report_people, report_waits
from services.local.charts import Bar, Series, bar_chart, line_chart, moving_average, short
from services.local.live import RELEASED, unrewarded_words
from services.local.metrics import Record, read_metrics
from services.local.open_run import read_ledger
from services.local.starting import duration
from services.monitor.figures import unrewarded
from services.options import program

INERT = 1e-4  # share of newly clipped tokens below which SAT changed next to nothing
STYLE = Path(__file__).with_name("report.css")


def write_report(folder: Path, config: RunConfig, snapshot: Snapshot, first: Snapshot | None = None) -> Path:
    """Save the snapshot as ledger.json and draw report.html; returns the page's path. Raises ConfigError.

    first: as the session's first step was made, None if it made none; ledger.json has what was waited for since.
    """
    ledger = asdict(snapshot) | {"waits": report_waits.waits_since(first, snapshot)}
    _write(folder / "ledger.json", json.dumps(ledger, indent=1))
    return draw_report(folder, config)


def draw_report(folder: Path, config: RunConfig, now: Snapshot | None = None) -> Path:
    """Draw report.html from the files of a run; the ledger is left out if there is neither ledger.json nor `now`.

    now: of a run that is in Redis, newer than ledger.json. Raises ConfigError if a file cannot be read or written.
    """
    ledger = read_ledger(folder) | (asdict(now) if now is not None else {})
    _write(folder / "report.html", page(config, read_metrics(folder / "metrics.jsonl"), ledger))
    return folder / "report.html"


def by_lag(records: Sequence[Record]) -> dict[int, dict[str, float]]:
    """The records' `by_lag` together: tokens and groups summed, log_ratio_abs and gate_rate weighted by token."""
    total: dict[int, dict[str, float]] = {}
    for record in records:
        for lag, part in (record.get("by_lag") or {}).items():
            into = total.setdefault(
                int(lag), {"tokens": 0.0, "groups": 0.0, "log_ratio_abs": 0.0, "gate_rate": 0.0, "weight": 0.0}
            )
            tokens = _finite(part.get("tokens"))
            into["tokens"] += tokens
            into["groups"] += _finite(part.get("groups"))
            into["log_ratio_abs"] += tokens * _finite(part.get("log_ratio_abs"))
            into["gate_rate"] += tokens * _finite(part.get("gate_rate"))
    for into in total.values():
        for key in ("log_ratio_abs", "gate_rate"):
            into[key] = into[key] / into["tokens"] if into["tokens"] else 0.0
    return {lag: total[lag] for lag in sorted(total)}


def trained_lags(records: Sequence[Record], ledger: dict[str, Any]) -> dict[int, int]:
    """Trained tokens by lag: as the ledger counted them, or as the steps recorded them while there is no ledger."""
    counted = {int(lag): int(count["tokens"]) for lag, count in (ledger.get("trained_by_lag") or {}).items()}
    return counted or {lag: int(part["tokens"]) for lag, part in by_lag(records).items()}


def sat_verdict(config: RunConfig, records: Sequence[Record]) -> str:
    """Whether SAT changed the gradient: one sentence."""
    name = config.trainer.loss.name
    if not name.startswith("sat"):
        return f"The loss is {name}: SAT is not part of it."
    clipped = [_finite(sat.get("new_clip_fraction")) for r in records if (sat := r.get("sat"))]
    if not clipped:
        return "No step recorded what SAT did."
    mean, active = sum(clipped) / len(clipped), sum(c > 0 for c in clipped)
    if mean < INERT:
        return (
            f"SAT could not act: it clipped {mean:.4%} of the tokens that plain clipping lets through. Either the "
            "log-ratios are tiny (fresh data needs no SAT), or the gate q lies above log(1 + clip), where SAT equals "
            "plain clipping."
        )
    return (
        f"SAT clipped {mean:.2%} of the tokens that plain clipping lets through, in {active} of {len(clipped)} steps."
    )


def page(config: RunConfig, records: Sequence[Record], ledger: dict[str, Any]) -> str:
    """The whole page as HTML."""
    title = html.escape(config.run.id or config.run.name)
    body = "".join(
        (
            _head(config, records, ledger),
            '<section class="charts">',
            _reward(records, ledger),
            _lag_histogram(config, records, ledger),
            _log_ratio(records),
            _gate(config, records),
            _speed(records),
            _waits(records, ledger.get("waits") or {}),
            "</section>",
            report_people.evaluations(config.run.folder),
            _ledger(ledger),
            report_people.samples(config.run.folder),
            _configuration(config),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body><main>{body}</main></body></html>"
    )


# --- parts ------------------------------------------------------------------------------------------------------------


def _head(config: RunConfig, records: Sequence[Record], ledger: dict[str, Any]) -> str:
    rewards = _values(records, "reward_mean")
    last = moving_average(rewards)[-1] if rewards else math.nan
    lags = trained_lags(records, ledger)
    tokens = sum(lags.values())
    mean_lag = sum(lag * count for lag, count in lags.items()) / tokens if tokens else math.nan
    step = int(ledger.get("step") or (records[-1]["step"] if records else 0))
    top = max(lags, default=0)
    closes = _closes(ledger)
    tiles = (
        (
            "reward",
            f"{last:.3f}" if rewards else "-",
            f"moving average; first step {rewards[0]:.3f}" if rewards else "no step",
        ),
        ("steps", f"{step}", f"of {config.run.steps}"),
        ("training time", duration(_finite(records[-1].get("time_s"))) if records else "-", "wall clock"),
        ("trained tokens", short(tokens), "response tokens"),
        ("lag", f"{mean_lag:.2f}" if tokens else "-", f"mean; largest {top}, bound {config.lag.max}"),
        ("ledger", {True: "closes", False: "open", None: "-"}[closes], "groups and tokens"),
    )
    cells = "".join(
        f'<div class="tile{" bad" if name == "ledger" and closes is False else ""}"><span>{name}</span>'
        f"<strong>{value}</strong><small>{note}</small></div>"
        for name, value, note in tiles
    )
    status = html.escape(str(ledger.get("status", "running")))
    return (
        f"<header><p>Lagrange run report</p><h1>{html.escape(config.run.id or config.run.name)}</h1>"
        f"<p>{html.escape(config.task.name)}, {html.escape(config.trainer.loss.name)}, "
        f"lag bound {config.lag.max}, weights every {config.weights.publish_interval}, {status}</p></header>"
        f'<section class="tiles">{cells}</section>'
    )


def _reward(records: Sequence[Record], ledger: dict[str, Any]) -> str:
    points = _points(records, "reward_mean")
    smooth = tuple(zip([x for x, _ in points], moving_average([y for _, y in points]), strict=True))
    chart = line_chart(
        [Series("mean of a step", points, "faint"), Series("moving average", smooth)],
        x_label="optimizer step",
        label="mean reward by optimizer step",
    )
    return _figure("Reward", "Mean of each step, and its moving average (0.9).", chart, _without_reward(ledger))


def _without_reward(ledger: dict[str, Any]) -> str:
    """A sentence on the samples that got no reward, "" if all did."""
    # The workers of the end know what no submission has told; the ledger knows of workers that are gone.
    said, told = unrewarded(ledger.get("workers") or {}), unrewarded({"": ledger.get("counters") or {}})
    most = max(said, told, key=lambda one: one.samples)
    if not most.failed:
        return ""
    newest = f" The newest failure: {said.newest}" if said.newest else ""
    return (
        f"{unrewarded_words(most)} got no reward and were left out of their groups: the reward shown is that of the "
        f"others.{newest}"
    )


def _lag_histogram(config: RunConfig, records: Sequence[Record], ledger: dict[str, Any]) -> str:
    lags = trained_lags(records, ledger)
    total = sum(lags.values()) or 1
    shown = range(max([config.lag.max, *lags]) + 1) if lags else range(0)
    bars = []
    for lag in shown:
        tokens = lags.get(lag, 0)
        share = tokens / total
        bars.append(Bar(str(lag), share * 100, f"{share:.1%}", f"lag {lag}: {tokens:,} tokens ({share:.1%})"))
    chart = bar_chart(
        bars,
        x_label="lag, in versions",
        label="share of trained tokens by policy lag",
        mark_after=config.lag.max,
        mark=f"bound {config.lag.max}",
    )
    return _figure(
        "Policy lag of trained tokens", "Percent of all trained response tokens. None may lie beyond the bound.", chart
    )


def _log_ratio(records: Sequence[Record]) -> str:
    bars = [
        Bar(str(lag), part["log_ratio_abs"], f"{part['log_ratio_abs']:.2g}", f"lag {lag}: {part['log_ratio_abs']:.6g}")
        for lag, part in by_lag(records).items()
    ]
    chart = bar_chart(bars, x_label="lag, in versions", label="mean absolute log-ratio by policy lag")
    return _figure("Mean |log-ratio| by lag", "How far the policy moved since it sampled a token.", chart)


def _gate(config: RunConfig, records: Sequence[Record]) -> str:
    bars = [
        Bar(str(lag), part["gate_rate"] * 100, f"{part['gate_rate']:.1%}", f"lag {lag}: {part['gate_rate']:.2%}")
        for lag, part in by_lag(records).items()
    ]
    chart = bar_chart(bars, x_label="lag, in versions", label="share of tokens above the SAT gate by policy lag")
    return _figure(
        "SAT gate rate by lag",
        "Percent of tokens whose trust region shrank.",
        chart,
        sat_verdict(config, records),
    )


def _speed(records: Sequence[Record]) -> str:
    points = _points(records, "tokens_per_s")
    smooth = tuple(zip([x for x, _ in points], moving_average([y for _, y in points]), strict=True))
    chart = line_chart(
        [Series("step", points, "faint"), Series("moving average", smooth)],
        x_label="optimizer step",
        label="tokens a second by optimizer step",
    )
    return _figure("Tokens a second", "Tokens of the trained batch, with prompts, by wall clock of the step.", chart)


def _waits(records: Sequence[Record], since: dict[str, Any]) -> str:
    waits = _values(records, "queue_wait_ms_mean")
    note = (
        f"A group waited {sum(waits) / len(waits) / 1000:.2f} s in the queue on average."
        if waits
        else "Time in the queue was not recorded."
    )
    return _figure(
        "Who waits",
        "Share of the time since the first step. Workers wait for leave to begin a group, by reason.",
        report_waits.table(records, since),
        f"{report_waits.slow_side(records, since)} {note}",
    )


def _ledger(ledger: dict[str, Any]) -> str:
    if not ledger:
        return (
            '<section><h2>Ledger</h2><p class="note">There is none: lagrange up saves it as it ends, and no Redis that '
            "has the run answered when this page was drawn.</p></section>"
        )
    names = ("issued", *PLACES)
    meaning = {
        "filtered": "without gradient",
        "leased": "in the trainer",
        "ready": "in the queue",
        "generating": "being sampled",
    }
    head = "".join(f"<th>{name}<small>{meaning.get(name, '')}</small></th>" for name in names)
    rows = ""
    for unit in ("groups", "tokens"):
        tally = ledger.get(unit) or {}
        missing = _missing(tally)
        cells = "".join(f"<td>{int(tally.get(name, 0)):,}</td>" for name in names)
        mark = f"open by {missing:,}" if missing else "closes"
        rows += f'<tr><th>{unit}</th>{cells}<td class="{"bad" if missing else "good"}">{mark}</td></tr>'
    return (
        '<section><h2>Ledger</h2><p class="note">Issued = trained + filtered + stale + failed + in flight, '
        "read in one atomic snapshot, the last. Tokens count as issued when they are submitted or reported."
        f"{_given_back(ledger)}</p>"
        f'<div class="scroll"><table class="ledger"><tr><th></th>{head}<th></th></tr>{rows}</table></div>'
        f'<p class="note">{report_waits.restarts(ledger.get("counters") or {})}</p></section>'
    )


def _given_back(ledger: dict[str, Any]) -> str:
    back = int((ledger.get("counters") or {}).get(RELEASED, 0))
    if not back:
        return ""
    return f" Of the failed groups, {back:,} were given back by workers that stopped or when the data had ended."


def _configuration(config: RunConfig) -> str:
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return f"<section><details><summary>Configuration</summary><pre>{html.escape(text)}</pre></details></section>"


def _figure(title: str, caption: str, content: str, note: str = "") -> str:
    extra = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return (
        f"<figure><h2>{html.escape(title)}</h2><figcaption>{html.escape(caption)}</figcaption>{content}{extra}</figure>"
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


def _finite(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [y for _, y in _points(records, key)]


def _points(records: Sequence[Record], key: str) -> tuple[tuple[float, float], ...]:
    return tuple(
        (float(r["step"]), float(r[key]))
        for r in records
        if isinstance(r.get(key), int | float) and math.isfinite(r[key])
    )


def _closes(ledger: dict[str, Any]) -> bool | None:
    if not ledger:
        return None
    return not any(_missing(ledger.get(unit) or {}) for unit in ("groups", "tokens"))


def _missing(tally: dict[str, Any]) -> int:
    """What was issued and is in no state; 0 where the ledger closes."""
    return Tally(**{place.name: int(tally.get(place.name, 0)) for place in fields(Tally)}).missing


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}). Mend that, then draw it by: {program()} report {path.parent}"
        ) from error
