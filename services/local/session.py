"""One running `lagrange up`: starts the processes of a plan, watches them, and ends them in order.

Invariant: every process that was started is stopped on every way out of `Session.run`, within the budget; what follows
a process's end is decided by supervision.py alone; what is shown is one snapshot (live.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live

from broker.errors import BrokerError, BrokerUnavailable, NotInitialised
from broker.queue import Broker
from broker.types import Snapshot
from configs import ConfigError
from configs.own_packages import module_path
from configs.secrets import REDIS_PASSWORD, read_secret
from services.local.layout import CannotStart, Role, embeds_redis, roles
from services.local.live import HINT, Beginning, LiveView, ProcessFacts, plain_line, screen, since, view_of
from services.local.metrics import MetricsTail
from services.local.open_run import has_begun, save_beginning
from services.local.plan import Plan, unwritable
from services.local.preflight import free_bytes
from services.local.processes import Processes, explain_log
from services.local.report import write_report
from services.local.starting import start_log
from services.local.supervision import (
    STOPPED,
    End,
    Ended,
    History,
    Leave,
    News,
    RestartPolicy,
    after_exit,
    describe_exit,
    farewell,
    recorded,
)
from services.options import program

Commands = Callable[[Role], Sequence[str]]
FULL_BYTES = 1024**2  # with less, Redis takes no writes and no checkpoint ends, or soon


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that processes get to end by themselves before they are killed; their sum stays well below ten.

    users: all that talk to Redis, at the same time. redis: the server, after them, so that they can hand work back.
    """

    users: float = 6.0
    redis: float = 1.5


@dataclass(frozen=True, slots=True)
class Settings:
    """How `up` behaves; tests change it. line_every_s: pace of the plain output when there is no terminal."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    budget: Budget = field(default_factory=Budget)
    poll_s: float = 0.1
    look_every_s: float = 0.5
    line_every_s: float = 5.0
    redis_start_s: float = 15.0


def own_command(role: Role) -> list[str]:
    """The command line of a role: this interpreter, and the same command that compose and Kubernetes use.

    -P: as in those, no file of the current folder takes the place of a module of ours.
    """
    return [sys.executable, "-P", "-m", "services", *role.command]


def child_environment() -> dict[str, str]:
    """What every process gets besides our own environment: one compute thread unless told otherwise, and the place of
    our packages if they are not installed."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1", **module_path()}


class Session:
    """See the module. `asked` grows when somebody asks us to stop (signals)."""

    def __init__(
        self, plan: Plan, commands: Commands, settings: Settings, console: Console, asked: Sequence[int]
    ) -> None:
        self._plan = plan
        self._commands = commands
        self._settings = settings
        self._console = console
        self._asked = asked
        self._roles = {role.name: role for role in roles(plan.config, plan.file)}
        self._histories: dict[str, History] = {}
        self._due: dict[str, float] = {}
        self._news = News()
        self._began = time.monotonic()
        self._beginning: Beginning | None = None
        self._snapshot: Snapshot | None = None
        self._first: Snapshot | None = None  # of this session that has a step of it
        self._served: set[str] = set()
        self._metrics = MetricsTail(plan.folder / "metrics.jsonl")
        self._processes = Processes(plan.logs)
        self._broker: Broker | None = None

    def run(self) -> int:
        """Run to the end; returns the exit code of `up` (up.run)."""
        try:
            end = self._session()
        finally:
            self._stop_all()
            self._processes.close()
        return end

    # --- start --------------------------------------------------------------------------------------------------------

    def _session(self) -> int:
        config = self._plan.config
        if embeds_redis(config):
            self._roles = {"redis": Role("redis", ()), **self._roles}
            self._start("redis")
        broker = self._broker = self._connect()
        if broker is not None:
            self._see_run_is_ours(broker)
            broker.initialise(config)
            if self._plan.resumed:
                broker.set_status("starting")  # it may say finished or stopped, which would end the workers
            if self._plan.requeue:
                for letter in broker.dead_letters():
                    broker.requeue(letter["prompt_index"], why="up --requeue")
            if self._plan.new_bound:
                broker.set_max_lag(config.lag.max)
            left = broker.snapshot()
            self._beginning = Beginning(left.time_ms, left.metrics)
            try:
                save_beginning(self._plan.folder, self._beginning)
            except OSError as error:
                raise unwritable(self._plan.folder, error) from error
            for name in self._roles:
                if name != "redis":
                    self._start(name)
        end = self._watch()
        self._finish(end)
        return end.code

    def _see_run_is_ours(self, broker: Broker) -> None:
        """Raise CannotStart if Redis holds a run of this id, and nothing in the folder says that it is the folder's."""
        if has_begun(self._plan.folder):
            return
        try:
            broker.groups("ready", 1)
        except NotInitialised:
            return
        raise CannotStart(
            f"run.id: Redis at {self._plan.config.redis.url} holds a run {broker.run_id!r} already, which may be under "
            f"way, and {self._plan.folder} is not its folder. Go on with that by `{program()} up --resume`, or choose "
            "another run.id."
        )

    def _start(self, name: str) -> None:
        role = self._roles[name]
        command = self._redis_command() if name == "redis" else list(self._commands(role))
        try:
            self._processes.start(name, command, child_environment())
        except OSError as error:
            raise CannotStart(f"{name}: cannot be started ({error.strerror}: {command[0]}).") from error

    def _redis_command(self) -> list[str]:
        from broker import server  # only an embedded Redis needs it

        config = self._plan.config
        return server.command(
            self._plan.folder / "redis",
            config.redis.port,
            config.redis.max_memory_mb,
            password=read_secret(REDIS_PASSWORD),
        )

    def _connect(self) -> Broker | None:
        """Connect to Redis, waiting for an embedded one to listen; None: we are asked to stop. Raises CannotStart."""
        config = self._plan.config
        deadline = time.monotonic() + self._settings.redis_start_s
        while not self._asked:
            try:
                return Broker.of_run(config, read_secret(REDIS_PASSWORD))
            except BrokerUnavailable as error:
                redis = self._processes.children.get("redis")
                if redis is not None and (code := redis.exit_code()) is not None:
                    raise CannotStart(
                        f"redis did not start ({describe_exit(code)}): {explain_log(redis.log)}"
                    ) from error
                if redis is None or time.monotonic() > deadline:
                    raise CannotStart(str(error)) from error
            time.sleep(self._settings.poll_s)
        return None

    # --- watch --------------------------------------------------------------------------------------------------------

    def _watch(self) -> End:
        """Until the run ends: look at the processes often, at Redis and the screen less often."""
        settings = self._settings
        next_look = next_line = 0.0
        live = Live(console=self._console, auto_refresh=False, transient=False) if self._console.is_terminal else None
        if live is not None:
            live.start()
        else:
            where = f"{self._plan.config.run.folder}  |  monitor: {self._plan.config.monitor.url}"
            self._console.print(where, soft_wrap=True, markup=False, highlight=False)
        try:
            while True:
                if self._asked:
                    return End(STOPPED, "stopped", "failed")
                now = time.monotonic()
                end = self._reap(now)
                if end is not None:
                    return end
                if now >= next_look:
                    next_look = now + settings.look_every_s
                    self._look()
                    if live is not None:
                        live.update(screen(self._view()), refresh=True)
                    elif now >= next_line:
                        next_line = now + settings.line_every_s
                        self._console.print(plain_line(self._view()), soft_wrap=True, markup=False, highlight=False)
                time.sleep(settings.poll_s)
        finally:
            if live is not None:
                self._look()
                live.update(screen(self._view(hint="")), refresh=True)
                live.stop()

    def _reap(self, now: float) -> End | None:
        """Deal with processes that ended and with restarts that are due."""
        for name, child in list(self._processes.children.items()):
            code = child.exit_code()
            if code is None:
                continue
            if code == 0:  # done, or told to end: the latest snapshot knows which
                self._look()
            ended = Ended(name, code, finished=self._finished(), served=name in self._served)
            history = self._histories.get(name, History())
            decision = after_exit(ended, history, now, self._settings.policy)
            self._processes.forget(name)
            if isinstance(decision, End):
                if decision.status == "failed":
                    why = explain_log(child.log)
                    return End(decision.code, f"{decision.why}.\n{why}\nLog: {child.log}", "failed")
                return decision
            if isinstance(decision, Leave):
                continue
            self._histories[name] = recorded(history, decision.at, now, self._settings.policy)
            self._due[name] = decision.at
            epoch = self._snapshot.epoch if name == "trainer" and self._snapshot is not None else None
            self._tell(f"{name} ended ({describe_exit(code)}) and is started again; log: {child.log}", epoch)
        for name, at in list(self._due.items()):
            if now >= at:
                del self._due[name]
                try:
                    self._start(name)
                except CannotStart as error:  # a full disk
                    return End(1, str(error), "failed")
        return None

    def _finished(self) -> str:
        """How the run ended, in words; "" if it goes on."""
        seen = self._snapshot
        if seen is not None and seen.step >= seen.steps_total > 0:
            return "all steps are trained"
        if seen is not None and seen.status == "finished":
            return f"the data set has ended after step {seen.step} of {seen.steps_total}"
        return ""

    def _look(self) -> None:
        """Take a snapshot and the new metrics; a Redis that does not answer leaves the last ones."""
        self._metrics.read()
        if self._broker is None:
            return
        try:
            self._snapshot = self._broker.snapshot()
        except BrokerError as error:
            self._hear(str(error))
            return
        self._news = self._news.seen(self._snapshot.epoch, time.monotonic())
        if free_bytes(self._plan.folder) < FULL_BYTES:
            self._hear(f"no space is left on the disk of {self._plan.folder}: make room, and all goes on by itself")
        if self._first is None and self._beginning and self._snapshot.metrics != self._beginning.metrics:
            self._first = self._snapshot
        self._served.update(e.engine_id.partition("@")[0] for e in self._snapshot.engines if e.routable)

    def _view(self, hint: str = HINT) -> LiveView:
        facts = ProcessFacts(
            elapsed_s=time.monotonic() - self._began,
            monitor_url=self._plan.config.monitor.url,
            log=start_log(self._plan.folder),
            restarts=tuple((name, h.total) for name, h in self._histories.items() if h.total),
            news=self._news.text,
            news_age_s=time.monotonic() - self._news.at,
            hint=hint,
        )
        shown = since(self._beginning, self._snapshot) if self._beginning and self._snapshot else None
        return view_of(shown, self._metrics.series("reward_mean"), facts, self._metrics.series("step_s"))

    def _hear(self, news: str, ended_epoch: int | None = None) -> None:
        self._news = News(news, time.monotonic(), ended_epoch)

    def _tell(self, news: str, ended_epoch: int | None = None) -> None:
        self._hear(news, ended_epoch)
        if not self._console.is_terminal:
            self._console.print(news, soft_wrap=True, markup=False, highlight=False)

    # --- end ----------------------------------------------------------------------------------------------------------

    def _finish(self, end: End) -> None:
        """End all but Redis, read the last snapshot, write ledger and report, and say how it went."""
        folder, given_up = self._plan.folder, list[str]()
        self._stop_users()
        if self._broker is not None:
            try:
                if end.status != "finished":
                    self._broker.set_status("stopped")
                seen = self._snapshot = self._broker.snapshot()
                if seen.step < seen.steps_total:  # else nothing would be issued again
                    given_up = [letter["reason"] for letter in self._broker.dead_letters()]
            except BrokerError as error:
                self._tell(str(error))
        if self._snapshot is not None:
            try:
                write_report(folder, self._plan.config, self._snapshot, self._first)
            except ConfigError as error:  # a full disk: how the run ended is to be said all the same
                self._console.print(str(error), soft_wrap=True, markup=False, highlight=False)
        self._console.print(farewell(end, folder, given_up), soft_wrap=True, markup=False, highlight=False)

    def _stop_all(self) -> None:
        """End everything that still runs, those that others need last."""
        self._stop_users()
        if self._broker is not None:
            self._broker.close()
        self._processes.stop(["redis"], self._settings.budget.redis)

    def _stop_users(self) -> None:
        names = [name for name in self._processes.children if name != "redis"]
        self._processes.stop(names, self._settings.budget.users)
