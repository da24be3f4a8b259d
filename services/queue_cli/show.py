"""Tables of the queue for a terminal. Pure: from records to renderables.

Invariant: what models, tasks and workers wrote is shown as text: neither markup nor a terminal's control sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.console import Group as Together
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from broker.traces import trace_id
from broker.types import Group, GroupRecord, Snapshot, Tally
from rollout.codec import Codec
from rollout.samples import readable
from services.monitor.figures import capacity, in_flight
from services.queue_cli.replay import Row

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def visible(text: object) -> str:
    """Text in which a control character, that a terminal would obey, is written out."""
    return str(text).translate(CONTROLS)


def plain(*columns: str) -> Table:
    """A table without lines, so that ten columns fit a terminal of 80; the first column is one line, nothing is cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=index == 0, overflow="fold")
    return table


def queue_screen(s: Snapshot) -> Together:
    """What `lagrange queue` shows."""
    head = (
        f"run {escape(s.run)}, {s.status}{', admission paused' if s.admission_paused else ''}: step {s.step} of "
        f"{s.steps_total} (durable {s.durable_step}), version {s.version}, published {s.published}, max_lag {s.max_lag}"
    )
    ledger = plain("", "groups", "tokens")
    for state in fields(Tally):
        ledger.add_row(state.name, f"{getattr(s.groups, state.name):,}", f"{getattr(s.tokens, state.name):,}")
    lines = [
        "durable: what of trained + filtered no crash takes back; no term of the sum",
        f"in flight {in_flight(s)} of {capacity(s)} groups, payloads {s.payload_bytes / 2**20:.1f} MiB",
        f"waiting: oldest {s.oldest_ready_ms / 1000:.1f} s, mean {s.mean_ready_ms / 1000:.1f} s; trained after "
        f"{s.mean_trained_wait_ms / 1000:.1f} s in the queue",
        f"ledger {'closes' if s.groups.closes and s.tokens.closes else 'DOES NOT CLOSE: please report this'}; "
        f"dead letters {s.dead_letters}",
    ]
    why = {name: int(value) for name, value in s.counters.items() if name.startswith(("refused_", "pulls_", "stale_"))}
    if why:
        lines.append("so far: " + ", ".join(f"{name} {value}" for name, value in sorted(why.items())))
    ages = plain("lag if trained now", "groups", "tokens")
    for oldest, count in sorted(s.ready_by_version.items()):
        ages.add_row(str(s.version - oldest), str(count.groups), f"{count.tokens:,}")
    return Together(head, ledger, *lines, *([ages] if s.ready_by_version else []))


def group_table(records: Sequence[GroupRecord], now_ms: int) -> Table:
    """What `lagrange groups list` shows."""
    table = plain("group", "state", "prompt", "try", "version", "n", "tokens", "bytes", "age s", "worker")
    for r in records:
        table.add_row(
            str(r.group_id),
            r.state.value,
            str(r.prompt_index),
            str(r.attempt),
            str(r.oldest_version if r.oldest_version >= 0 else r.admitted_version),
            str(r.samples),
            str(r.response_tokens),
            str(r.payload_bytes),
            f"{(now_ms - (r.submitted_ms or r.issued_ms)) / 1000:.1f}",
            escape(visible(r.worker)),
        )
    return table


def dead_table(letters: Sequence[Mapping[str, Any]]) -> Table:
    """Dead letters."""
    table = plain("prompt", "attempt", "group", "worker", "reason")
    for letter in letters:
        table.add_row(
            *(escape(visible(letter[name])) for name in ("prompt_index", "attempt", "group_id", "worker", "reason"))
        )
    return table


def record_table(record: GroupRecord) -> Table:
    """Every field of a record."""
    table = Table.grid(padding=(0, 2))
    for one in fields(record):
        table.add_row(one.name, escape(visible(getattr(record, one.name))))
    return table


def samples_table(group: Group) -> Table:
    """One row for each sample, and the trace, if there is one."""
    table = plain("sample", "prompt", "response", "trained", "versions", "reward", "finish", "routes")
    table.caption = f"trace {trace_id(group.trace)}" if group.trace else None
    for index, t in enumerate(group.trajectories):
        versions = ", ".join(f"{run.version} x {run.length}" for run in t.versions)
        routes = "-" if t.routes is None else f"{t.routes.dtype}{list(t.routes.shape)}"
        cells = (
            index,
            len(t.prompt_ids),
            len(t.response_ids),
            int(t.loss_mask.sum()),
            versions,
            t.reward,
            t.finish,
            routes,
        )
        table.add_row(*(escape(str(cell)) for cell in cells))
    return table


COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")


def spoken(group: Group, codec: Codec, version: int) -> Text:
    """Prompt and answers as text; colours tell the versions that sampled a piece, dim is not the model's.

    version: that trains the group, or would now: lags are to it.
    """
    record = readable(group, codec)
    out = Text(visible(record["prompt"]), style="dim")
    for number, (one, t) in enumerate(zip(record["samples"], group.trajectories, strict=False)):
        lag = "-" if t.oldest_version is None else str(version - t.oldest_version)
        out.append(f"\n\nsample {number}: reward {one['reward']:g}, lag {lag}, {one['finish']}\n", style="bold")
        for made_by, text in one["pieces"]:
            out.append(visible(text), style="dim" if made_by is None else COLOURS[made_by % len(COLOURS)])
    named = sorted({run.version for t in group.trajectories for run in t.versions})
    out.append("\n\nversions: ")
    for made_by in named:
        out.append(f"{made_by} ", style=COLOURS[made_by % len(COLOURS)])
    return out


def replay_table(rows: Sequence[Row]) -> Table:
    """What `lagrange replay` shows for each sample."""
    table = plain("sample", "reward", "again", "advantage", "tokens", "lag", "|log-ratio|", "largest")
    for index, row in enumerate(rows):
        again = escape(row.why) if row.recomputed is None else f"{row.recomputed:g}"
        table.add_row(
            str(index),
            f"{row.reward:g}",
            again,
            f"{row.advantage:.4f}",
            str(row.tokens),
            str(row.lag),
            f"{row.mean_log_ratio:.2e}",
            f"{row.largest_log_ratio:.2e}",
        )
    return table
