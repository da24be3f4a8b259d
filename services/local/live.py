"""The terminal view of a local run: a pure model of what is shown, and two ways to show it.

Invariant: `view_of` is a function of one snapshot and of facts about the processes; everything on the screen at one
moment is therefore of one moment. Nothing here reads a clock, a file or Redis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import median

from rich.console import Group as Rows
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from broker.types import EngineRecord, EngineState, Snapshot
from services.local.starting import StartLog, duration, start_words
from services.monitor.figures import Unrewarded, capacity, number, unrewarded, wait_share
from services.options import program

BLOCKS = "▁▂▃▄▅▆▇█"
REWARD_POINTS = 40
PACE_STEPS = 20
NEWS_S = 30.0  # for so long the view tells what happened last
RELEASED = "groups_released"
HINT = "Ctrl-C stops (and the run resumes)"


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What is known of the processes. elapsed_s: since this session of the run began, None: not known here. log: of an
    engine's start. restarts: (name, how often started again). news: what happened last, and how long ago."""

    elapsed_s: float | None
    monitor_url: str
    log: StartLog | None = None
    restarts: tuple[tuple[str, int], ...] = ()
    news: str = ""
    news_age_s: float = 0.0
    hint: str = HINT

    @property
    def recent_news(self) -> str:
        """What happened last, "" if that was NEWS_S ago or more."""
        return self.news if self.news_age_s < NEWS_S else ""

    @property
    def elapsed(self) -> str:
        """The time since the session began, "" where it is not known."""
        return "" if self.elapsed_s is None else duration(self.elapsed_s)


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine: its name, state and confirmed version (-1: none yet). why: what is wrong with it, "" for nothing."""

    name: str
    state: str
    version: int
    why: str = ""

    @classmethod
    def of(cls, name: str, state: str, version: int, detail: str) -> EngineView:
        """From what the registry holds."""
        return cls(name, state, version, detail if state in (EngineState.GONE, EngineState.QUARANTINED) else "")

    @property
    def words(self) -> str:
        """Its name and state, and what is wrong."""
        return f"{self.name} {self.state}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class LiveView:
    """What the terminal shows; of a run that Redis has not yet told of, the defaults. lag: (min, mean, max) over the
    tokens of the last step; None before the first."""

    facts: ProcessFacts
    run: str = ""
    status: str = "starting"
    step: int = 0
    steps_total: int = 0
    version: int = -1
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    lag: tuple[int, float, int] | None = None
    max_lag: int = 0
    ready: int = 0
    generating: int = 0
    limit: int = 0
    trainer_wait: float | None = None
    tokens_per_s: float | None = None
    engines: tuple[EngineView, ...] = ()
    closes: bool = True
    ledger: str = "nothing issued"
    eta_s: float | None = None
    dead_letters: int = 0
    unrewarded: Unrewarded = field(default_factory=Unrewarded)

    @property
    def waits_for_engine(self) -> bool:
        """Whether there is neither a step nor an engine that could make one."""
        return self.reward is None and all(engine.state == EngineState.GONE for engine in self.engines)

    @property
    def starting(self) -> str:
        """What is said of an engine's start."""
        return start_words(self.facts.elapsed_s, self.facts.log)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What Redis held when a session of `up` began, before any of its processes started: the time, and the record of
    the last step, which is of a session before."""

    time_ms: int
    metrics: dict[str, object]


def since(began: Beginning, snapshot: Snapshot) -> Snapshot:
    """What of `snapshot` is of the session that began so.

    Redis keeps the last step's record and the engines of the session before: both are left out until there is a new
    step, and until an engine serves the status is that of a start.
    """
    if snapshot.metrics != began.metrics or snapshot.status not in ("starting", "running"):
        return snapshot
    engines = tuple(e for e in snapshot.engines if _is_of(began, e))
    step, serving = snapshot.durable_step, any(engine.routable for engine in engines)
    status = snapshot.status if serving else start_from(step)
    workers = {name: of for name, of in snapshot.workers.items() if float(of.get("heartbeat_ms", 0)) > began.time_ms}
    return replace(snapshot, status=status, step=step, metrics={}, engines=engines, workers=workers)


def _is_of(began: Beginning, engine: EngineRecord) -> bool:
    """Whether a record was written by an engine of this session: one that came, or whose supervisor says why not."""
    if engine.state is EngineState.GONE:
        return engine.down and engine.heartbeat_ms > began.time_ms
    return engine.since_ms > began.time_ms


def start_from(step: int) -> str:
    """The status of a run whose checkpoint is of `step` (0: none) until an engine serves."""
    return f"resuming from step {step}" if step else "starting"


def shown_status(status: str, paused: bool) -> str:
    """A run's status in words: one that starts no groups by an operator's word is "paused"."""
    return "paused" if paused and status == "running" else status


def view_of(
    snapshot: Snapshot | None, rewards: Sequence[float], facts: ProcessFacts, step_seconds: Sequence[float] = ()
) -> LiveView:
    """The view at the time of `snapshot` (None: no answer of Redis yet).

    rewards, step_seconds: mean reward and duration of each step so far.
    """
    if snapshot is None:
        return LiveView(facts)
    metrics, groups = snapshot.metrics, snapshot.groups
    going = bool(metrics) and not snapshot.admission_paused
    return LiveView(
        run=snapshot.run,
        status=shown_status(snapshot.status, snapshot.admission_paused),
        step=snapshot.step,
        steps_total=snapshot.steps_total,
        version=snapshot.version,
        reward=number(metrics, "reward_mean"),
        rewards=tuple(condensed(rewards, REWARD_POINTS)),
        lag=lag_of(metrics),
        max_lag=snapshot.max_lag,
        ready=groups.ready,
        generating=groups.generating,
        limit=capacity(snapshot),
        trainer_wait=wait_share([metrics]),
        tokens_per_s=number(metrics, "tokens_per_s"),
        engines=tuple(EngineView.of(e.engine_id, str(e.state), e.version, e.detail) for e in snapshot.engines),
        closes=groups.closes and snapshot.tokens.closes,
        ledger=ledger_words(asdict(groups), int(snapshot.counters.get(RELEASED, 0))),
        eta_s=remaining_s(step_seconds, snapshot.steps_total - snapshot.step) if going else None,
        facts=facts,
        dead_letters=snapshot.dead_letters,
        unrewarded=unrewarded(snapshot.workers),
    )


def lag_of(metrics: Mapping[str, object]) -> tuple[int, float, int] | None:
    """(min, mean, max) lag of a step's tokens; None if it was not recorded."""
    mean = number(metrics, "lag_mean")
    if mean is None:
        return None
    return int(number(metrics, "lag_min") or 0), mean, int(number(metrics, "lag_max") or 0)


def lag_words(view: LiveView) -> str:
    """What is said of a lag above the bound: the broker refuses a step that is past the bound that it was pulled under
    (broker/lua/step.lua), so the bound was lowered since; "" for any other."""
    beyond = view.lag is not None and view.lag[2] > view.max_lag
    return " (lowered since)" if beyond else ""


def ledger_words(groups: Mapping[str, int], released: int) -> str:
    """The ledger's equation for groups, by state. released: of those that failed, how many their workers gave back, as
    they stopped or the data had ended: nothing was wrong with them."""
    released = min(released, groups["failed"])
    back = f" + {released} given back" if released else ""
    flying = groups["generating"] + groups["ready"] + groups["leased"]
    return (
        f"{groups['issued']} issued = {groups['trained']} trained + {groups['filtered']} without gradient"
        f" + {groups['stale']} stale + {groups['failed'] - released} failed{back} + {flying} in flight"
    )


def unrewarded_words(of: Unrewarded) -> str:
    """How many samples got no reward."""
    return f"{of.failed:,} of {of.samples:,} samples ({of.share:.0%})"


def remaining_s(step_seconds: Sequence[float], steps_left: int) -> float | None:
    """Seconds until the last step at the median pace of the last PACE_STEPS; None before the pace is known.

    The median, since single steps say little: the first one, also after a resume, waits for the engine to start, others
    for a slow group or a checkpoint.
    """
    recent = step_seconds[-PACE_STEPS:]
    return median(recent) * steps_left if len(recent) >= 3 and steps_left > 0 else None


def condensed(values: Sequence[float], points: int) -> list[float]:
    """The whole series as at most `points` means of neighbours, in order."""
    if len(values) <= points:
        return list(values)
    edges = [round(index * len(values) / points) for index in range(points + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of blocks, the lowest as the first block and the highest as the last; "" for no values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low
    if span <= 0:
        return BLOCKS[3] * len(values)
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((v - low) / span * len(BLOCKS)))] for v in values)


def plain_line(view: LiveView) -> str:
    """One line for a log or a pipe."""
    parts = [f"{view.facts.elapsed} {view.status}".lstrip()]
    if view.reward is None:
        engines = [*(e.words for e in view.engines), *([view.starting] if view.waits_for_engine else [])]
        parts.append("engines " + ", ".join(engines))
    else:
        parts.append(f"step {view.step}/{view.steps_total}  reward {view.reward:.3f}")
        if view.lag is not None:
            parts.append(f"lag {view.lag[0]}/{view.lag[1]:.2f}/{view.lag[2]} of {view.max_lag}{lag_words(view)}")
        parts.append(f"queue {view.ready}")
        if view.trainer_wait is not None:
            parts.append(f"trainer waits {view.trainer_wait:.0%}")
        parts.append("engines " + ", ".join(f"v{e.version} {e.state}" for e in view.engines))
        parts.append("ledger closes" if view.closes else "LEDGER OPEN")
        if view.eta_s is not None:
            parts.append(f"{duration(view.eta_s)} left")
    if view.unrewarded.failed:
        parts.append(f"{unrewarded_words(view.unrewarded)} got no reward")
    if view.dead_letters:
        parts.append(f"{view.dead_letters} dead letters")
    if view.facts.recent_news:
        parts.append(view.facts.recent_news)
    return "  |  ".join(parts)


def screen(view: LiveView) -> Panel:
    """The whole view for a terminal."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True, width=14)
    table.add_column(ratio=1)
    table.add_row("step", _progress(view))
    table.add_row("reward", _reward(view))
    if view.unrewarded.failed:
        what = f"[red]{unrewarded_words(view.unrewarded)}[/], left out of the mean: {escape(view.unrewarded.newest)}"
        table.add_row("without reward", what)
    table.add_row("lag", _lag(view))
    table.add_row("queue", _queue(view))
    table.add_row("trainer", _trainer(view))
    table.add_row("engines", _engines(view))
    mark = "[green]closes[/]" if view.closes else "[bold red]does not close[/]"
    table.add_row("ledger", f"{mark}  [dim]{view.ledger}[/]")
    if view.dead_letters:
        table.add_row("dead letters", f"[red]{view.dead_letters}[/]: `{program()} groups list RUN --state dead`")
    table.add_row("monitor", f"[link={view.facts.monitor_url}]{view.facts.monitor_url}[/link]")
    restarts = ", ".join(f"{name} x{count}" for name, count in view.facts.restarts)
    if restarts:
        table.add_row("restarted", f"[yellow]{restarts}[/]")
    rows: list[Table | Text] = [table]
    if view.facts.recent_news:
        rows.append(Text(view.facts.recent_news, style="yellow"))
    return Panel(
        Rows(*rows),
        title=f"[bold]Lagrange[/]  {view.run}",
        subtitle=", ".join(filter(None, (view.status, view.facts.elapsed, view.facts.hint))),
        border_style="cyan",
        padding=(1, 2),
    )


def _progress(view: LiveView) -> Table:
    """Steps, a bar, and the time left."""
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    total = max(view.steps_total, 1)
    line.add_row(
        f"[bold]{view.step}[/] / {view.steps_total}",
        ProgressBar(total=total, completed=min(view.step, total), complete_style="cyan", finished_style="green"),
        "" if view.eta_s is None else f"{duration(view.eta_s)} left",
    )
    return line


def _reward(view: LiveView) -> str:
    if view.reward is None:
        return "[dim]no step yet[/]"
    return f"[bold green]{view.reward:.3f}[/]  [green]{sparkline(view.rewards)}[/]"


def _lag(view: LiveView) -> str:
    if view.lag is None:
        return f"[dim]bound[/] {view.max_lag}"
    low, mean, high = view.lag
    figures = f"[bold]{low} / {mean:.2f} / {high}[/] [dim](min, mean, max of the last step)[/]"
    return f"{figures}  [dim]bound[/] {view.max_lag}[yellow]{lag_words(view)}[/]"


def _queue(view: LiveView) -> str:
    if view.waits_for_engine:
        return "[dim]waits for an engine[/]"
    return f"{view.ready} groups ready, {view.generating} generating [dim](limit by the bound {view.limit})[/]"


def _trainer(view: LiveView) -> str:
    wait = "" if view.trainer_wait is None else f"waits {view.trainer_wait:.0%} of a step, "
    speed = "" if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f} tokens a second, "
    return f"{wait}{speed}" + (f"version {view.version}" if view.version >= 0 else "[dim]no version yet[/]")


def _engines(view: LiveView) -> str:
    engines = [
        f"{e.name} [{'green' if e.state == 'serving' else 'yellow'}]{e.state}[/] "
        + (f"v{e.version}" if e.version >= 0 else f"[dim]{escape(e.why) or 'no version yet'}[/]")
        for e in view.engines
    ]
    return ", ".join([*engines, *([f"[dim]{escape(view.starting)}[/]"] if view.waits_for_engine else [])])
