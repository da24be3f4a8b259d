"""From a configuration file, or a run to go on with, to a folder that is ready to start.

Invariant: nothing is written before everything that can be checked was checked, and a run's folder is held by at most
one `lagrange up`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import ConfigError, RunConfig, load_config, save_config
from configs.schema import TinyModel
from services.examine import examine
from services.local.layout import CannotStart, new_run_id, resolve
from services.local.open_run import LOCK, read_ledger
from services.local.preflight import free_bytes, problems
from services.options import program


@dataclass(frozen=True, slots=True)
class Plan:
    """A run to start. config: resolved (layout.resolve). tiny: the model still to be made, if any.

    new_bound: lag.max was asked for now, so it replaces the one that steering may have left in Redis.
    over: how the run ended, if it did and there is nothing left to start; else "". requeue: its dead letters are issued
    again. warnings: what it wastes, as `lagrange check` says it.
    """

    config: RunConfig
    tiny: TinyModel | None
    resumed: bool
    new_bound: bool = False
    over: str = ""
    requeue: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.run.folder

    @property
    def file(self) -> Path:
        """The resolved configuration that every process reads."""
        return self.folder / "config.yaml"

    @property
    def logs(self) -> Path:
        """The folder of the log files."""
        return self.folder / "logs"


def plan_new(file: Path, overrides: dict[str, Any]) -> Plan:
    """A new run of `file`, with an id and a folder of its own. Raises ConfigError and CannotStart."""
    asked = load_config(file, overrides)
    warnings = examined(asked, file)
    directory = asked.run.directory.absolute()
    taken = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    run_id = asked.run.id or new_run_id(asked.run.name, time.localtime(), taken)
    folder = directory / run_id
    if (folder / "config.yaml").exists():
        raise CannotStart(
            f"run.id: {folder} exists. Go on with it by `{program()} up --resume {folder}`, or choose another run.id."
        )
    return _checked(asked, Plan(resolve(asked, run_id, directory), asked.model.tiny, resumed=False, warnings=warnings))


def plan_resumed(folder: Path, overrides: dict[str, Any], *, requeue: bool = False) -> Plan:
    """Go on with the run in `folder`, which may have been moved. requeue: with its dead letters, too.

    Raises ConfigError and CannotStart.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"--resume {folder}: no config.yaml there. Name the folder of a run, runs/<id>.")
    if late := next((name for name in overrides if f"{name}.".startswith("model.tiny.")), None):
        raise ConfigError(
            f"{late}: the run has its model since it began (model.path in {file}), and its checkpoints are of that. "
            "Leave it out, or start a new run with it."
        )
    if named := {"run.id", "run.directory"} & set(overrides):
        raise ConfigError(
            f"{min(named)}: a run that goes on has the name of its folder, {folder.absolute()}. Leave it out; to have "
            "the run elsewhere, move that folder."
        )
    with only_one(folder):  # its ports are in use while another `up` runs: say so, rather than move them
        config = load_config(file, overrides)
        warnings = examined(config, file)
        place = folder.absolute()
        if config.model.path == config.run.folder / "model":
            config = config.model_copy(
                update={"model": config.model.model_copy(update={"path": place / "model"})},
            )
        over = nothing_left(folder, read_ledger(folder), config.run.steps, changed=bool(overrides) or requeue)
        resolved = resolve(config, place.name, place.parent, move_taken_ports=True)
    if over:
        return Plan(resolved, None, resumed=True, over=over)
    new_bound = any(name.partition(".")[0] in ("lag", "weights") for name in overrides)
    plan = Plan(resolved, None, resumed=True, new_bound=new_bound, requeue=requeue, warnings=warnings)
    return _checked(resolved, plan)


def nothing_left(folder: Path, ledger: Mapping[str, Any], steps: int, *, changed: bool) -> str:
    """What is said of a run that has ended when it is to go on to `steps` steps, "" if there is something left to do.

    ledger: its last snapshot. changed: fields were set anew or dead letters are to be issued again, which may give an
    ended data set more prompts. Raises ConfigError if it has done more than `steps`.
    """
    finished = ledger.get("status") == "finished"
    done = int(ledger.get("step" if finished else "durable_step", 0))
    if steps < done:
        raise ConfigError(f"run.steps: {folder} has done {done} steps, {steps} are less. Set more, or leave it out.")
    if not finished or (steps > done and changed):
        return ""
    report = f"What it did: {folder / 'report.html'}"
    if steps > done:
        return f"{folder} has finished: its data set ended after step {done} of {steps}. {report}"
    longer = f"{program()} up --resume {folder} --set run.steps=N, with N above {done}"
    return f"{folder} has finished: all {done} steps are trained. {report}\nTrain longer by: {longer}"


def examined(config: RunConfig, file: Path) -> tuple[str, ...]:
    """What a run would waste. Raises ConfigError if trainer or workers could not use its configuration at all: an
    engine's start is long to wait for that."""
    found = examine(config)
    if problems := [*found.problems, *found.absent]:
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in problems))
    return tuple(found.warnings)


def prepare(plan: Plan) -> None:
    """Make the run's folder, the tiny model and the resolved configuration. Raises CannotStart if the disk refuses."""
    from services.local.tiny_model import write_tiny_model  # a run that is refused needs no numpy

    try:
        plan.logs.mkdir(parents=True, exist_ok=True)
        if plan.tiny is not None and plan.config.model.path is not None:
            write_tiny_model(plan.tiny, plan.config.run.seed, plan.config.model.path)
        save_config(plan.config, plan.file)
    except OSError as error:
        raise unwritable(plan.folder, error) from error


def unwritable(folder: Path, error: OSError) -> CannotStart:
    """What is said of a folder that is read-only, full or another user's."""
    return CannotStart(
        f"{folder}: cannot be written ({error.strerror}). Make it writable, or set run.directory to another place."
    )


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the run's folder; CannotStart if another `up` holds it. The kernel lets go when we end, however we end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise unwritable(folder, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise CannotStart(
                f"{folder}: another `lagrange up` runs here (process {holder}). Stop it first."
            ) from error
        try:
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        except OSError as error:
            raise unwritable(folder, error) from error
        yield


def _checked(asked: RunConfig, plan: Plan) -> Plan:
    found = problems(asked, free=free_bytes(plan.folder))
    if found:
        raise CannotStart("\n".join(found))
    return plan
