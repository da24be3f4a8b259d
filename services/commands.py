"""The commands of `lagrange`; services/cli.py is its entry point.

Invariant: a command imports only what it runs (torch for the trainer alone); a problem that the user can mend is one
message on standard error and an exit code, without a traceback unless --debug is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs import ConfigError, RunConfig, load_config
from configs.secrets import API_TOKEN, read_secret
from services.evaluation.commands import add_to as add_evaluation_commands
from services.options import ConfigOption, pairs, program, versions, wide_console
from services.queue_cli.commands import add_to as add_queue_commands

if TYPE_CHECKING:
    from services.local.live import LiveView

app = typer.Typer(
    name="lagrange",
    help="Asynchronous reinforcement learning for language models, with a hard bound on policy lag.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FileArgument = Annotated[Path, typer.Argument(help="A run's configuration, for instance configs/local.yaml.")]
IndexOption = Annotated[int, typer.Option("--index", min=0, help="Which of the equal processes this is, from 0.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Overrides one field, as in lag.max=4.")
]
TargetArgument = Annotated[
    str, typer.Argument(help="A run's folder, runs/<id>, its configuration file, or its monitor's address.")
]
RunArgument = Annotated[Path, typer.Argument(help="A run's folder, runs/<id>, or its configuration file.")]


def show_versions(asked: bool) -> None:
    """What --version does."""
    if asked:
        typer.echo("\n".join(versions()))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Say which release this is, and of what it stands on.",
            callback=show_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Options of every command; `run_command` reads --debug itself."""


@app.command()
def up(
    file: Annotated[Path | None, typer.Argument(help="A run's configuration, configs/local.yaml.")] = None,
    settings: SetOption = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on with this run's folder, runs/<id>.")] = None,
    requeue: Annotated[bool, typer.Option("--requeue", help="With --resume: issue its dead letters again.")] = False,
) -> None:
    """Run a whole loop on this machine: Redis, engines, trainer, workers and services."""
    from services.local import up as local

    raise typer.Exit(local.run(file, overrides=pairs(settings, "--set"), resume=resume, requeue=requeue))


@app.command()
def check(file: FileArgument, settings: SetOption = None) -> None:
    """Say what a configuration means, and what is wrong with it. Exit code 0: it can run; 2: it cannot."""
    from configs.check import meaning
    from services.examine import examine

    config = load_config(file, pairs(settings, "--set"))
    found = examine(config)
    if found.problems:
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in found.problems))
    console = wide_console()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for topic, sentence in [*meaning(config), *found.facts]:
        table.add_row(topic, escape(sentence))
    here = "; not all that it needs is on this machine" if found.absent else ""
    console.print(f"[green]{escape(str(file))} is valid{here}.[/]")
    console.print(table)
    for label, sentences in (("warning", found.warnings), ("not here", found.absent)):
        for sentence in sentences:
            console.print(f"[yellow]{label}[/]  {escape(sentence)}")
    if found.absent:
        console.print("`lagrange up` would refuse what is not here; on another machine the file may run as it is.")


@app.command()
def schema(
    section: Annotated[str, typer.Argument(help="Only fields whose name begins so: lag, trainer.loss.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The JSON schema instead, for an editor.")] = False,
) -> None:
    """List every field of a configuration: what it may be, its default, its meaning and unit."""
    from configs.fields import fields

    if as_json:
        typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))
        return
    found = [field for field in fields() if f"{field.name}.".startswith(section)]
    if not found:
        raise ConfigError(f"no field begins with {section!r}. `{program()} schema` lists them all.")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("field", "may be", "default", "meaning"):
        table.add_column(column, overflow="fold", style="bold" if column == "field" else None)
    for field in found:
        table.add_row(*map(escape, (field.name, field.kind, field.default or "to be set", field.meaning)))
    wide_console().print(table)


@app.command()
def init(config: ConfigOption) -> None:
    """Prepare a run that an orchestrator starts process by process: folder, tiny model, records in Redis."""
    from services.deployment import initialise

    made = initialise(config)
    typer.echo(f"run {made.run.id} is ready: {made.run.folder}, model {made.model.path}")


@app.command("redis-users")
def redis_users(
    passwords: Annotated[Path, typer.Argument(help="Folder with a file redis_<role>_password for each role.")],
    out: Annotated[Path | None, typer.Option("--out", help="Where to write it; else it is printed.")] = None,
    run: Annotated[str, typer.Option("--run", help="The only run whose keys they may use; *: of every run.")] = "*",
) -> None:
    """Make Redis' access control list (aclfile): a user for each role, who may do what the role must."""
    from services import deployment

    text = deployment.redis_users(passwords, run)
    if out is None:
        typer.echo(text, nl=False)
    else:
        deployment.write_whole(out, text)


@app.command()
def engine(config: ConfigOption, index: IndexOption = 0) -> None:
    """Start one SGLang engine and register it."""
    from rollout import engine as process

    raise typer.Exit(process.main(process_config(config), index))


@app.command()
def rollout(config: ConfigOption, index: IndexOption = 0) -> None:
    """Start one rollout worker."""
    from rollout import main as process

    raise typer.Exit(process.main(process_config(config), index))


@app.command("rollout-pool")
def rollout_pool(config: ConfigOption) -> None:
    """Keep rollout.workers rollout workers running on a Ray cluster; SIGHUP: read the file again."""
    from services import ray_workers as process

    raise typer.Exit(process.run(config))


@app.command()
def trainer(config: ConfigOption) -> None:
    """Start the trainer, with all its ranks on this machine."""
    from trainer import main as process

    raise typer.Exit(process.run(process_config(config)))


@app.command("weight-sync")
def weight_sync(config: ConfigOption) -> None:
    """Start the service that carries new versions to the engines."""
    from services.weight_sync import main as process

    raise typer.Exit(process.run(process_config(config)))


@app.command()
def monitor(config: ConfigOption) -> None:
    """Start the service that shows queue, staleness and ledger over HTTP."""
    from services.monitor import main as process

    raise typer.Exit(process.run(process_config(config)))


@app.command()
def status(target: TargetArgument) -> None:
    """Show a running run once: step, lag, queue, engines and ledger."""
    from services.local.live import screen

    with looker(target, hint="lagrange watch follows") as look:
        Console().print(screen(look()))


@app.command()
def watch(
    target: TargetArgument,
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Follow a running run until Ctrl-C; it goes on when this ends. A monitor that is away is waited for.

    Into a pipe or a file it writes a line for each look.
    """
    import time

    from rich.live import Live

    from services.local.live import plain_line, screen
    from services.local.open_run import NotRunning

    console = Console()

    def show(view: LiveView) -> None:
        if console.is_terminal:
            live.update(screen(view), refresh=True)
        else:
            console.print(plain_line(view), soft_wrap=True, markup=False, highlight=False)

    try:
        with (
            looker(target, hint="Ctrl-C ends the view, the run goes on") as look,
            Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live,
        ):
            show(look())
            while True:
                time.sleep(every)
                try:
                    show(look())
                except NotRunning:
                    raise
                except user_errors() as error:
                    console.print(f"[yellow]{escape(str(error))}[/]")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def looker(target: str, hint: str) -> AbstractContextManager[Callable[[], LiveView]]:
    """How to see the run at `target` (a folder, a configuration file or a monitor's URL) now."""
    if not target.startswith(("http://", "https://")):
        if not Path(target).exists():
            raise ConfigError(
                f"{target}: no such folder or file. Name runs/<id>, the run's configuration file, or its monitor's "
                "address, http://HOST:PORT."
            )
        return local_looker(Path(target), hint)
    from services.monitor.remote import ask, view_of_overview

    overview = ask(target, read_secret(API_TOKEN))
    return nullcontext(lambda: view_of_overview(overview(), target, hint))


@contextmanager
def local_looker(where: Path, hint: str) -> Iterator[Callable[[], LiveView]]:
    """As `looker`, of a run that a folder or a configuration file names: asks its Redis."""
    from services.local.live import ProcessFacts, since, view_of
    from services.local.metrics import read_metrics, series_of
    from services.local.open_run import located, opened, read_beginning, see_it_runs
    from services.local.starting import start_log
    from services.monitor.diagnosis import why_no_step_comes

    _, folder = located(where)
    with opened(where) as (broker, config):

        def look() -> LiveView:
            see_it_runs(config, folder)
            snapshot, records = broker.snapshot(), read_metrics(folder / "metrics.jsonl")
            elapsed = records[-1].get("time_s") if records else None  # of a run that `up` did not start
            if began := read_beginning(folder):
                snapshot, elapsed = since(began, snapshot), (snapshot.time_ms - began.time_ms) / 1000
            rewards, seconds = series_of(records, "reward_mean"), series_of(records, "step_s")
            news = why_no_step_comes(snapshot) if snapshot.metrics and snapshot.status == "running" else None
            facts = ProcessFacts(elapsed, config.monitor.url, start_log(folder), news=news or "", hint=hint)
            return view_of(snapshot, rewards, facts, seconds)

        yield look


@app.command()
def report(where: RunArgument) -> None:
    """Draw runs/<id>/report.html again from the run's metrics and ledger, which Redis has while the run is in it."""
    from services.local.open_run import located, snapshot_if_any
    from services.local.report import draw_report

    config, folder = located(where)
    if not folder.is_dir():
        raise ConfigError(
            f"{where}: the folder of its run, {folder} (run.directory and run.id), is not on this machine. "
            "Draw the report where it is."
        )
    now, why_none = snapshot_if_any(where)
    typer.echo(str(draw_report(folder, config, now)))
    if now is None and not (folder / "ledger.json").exists():
        typer.echo(f"without its ledger: there is no ledger.json, which `up` saves as it ends. {why_none}", err=True)


add_queue_commands(app)
add_evaluation_commands(app)


def process_config(file: Path) -> RunConfig:
    """The configuration of one process of a run. Raises ConfigError."""
    from services.deployment import process_config as derive  # `check` and `schema` need no Redis client

    return derive(file)


def user_errors() -> tuple[type[Exception], ...]:
    """Exceptions whose text is meant for the user. The broker's are known only where its client was imported."""
    found: list[type[Exception]] = [ConfigError]
    for module, names in (
        ("services.local.layout", ("CannotStart",)),
        ("services.local.open_run", ("NotRunning",)),
        ("broker.errors", ("BrokerError",)),
        ("services.monitor.remote", ("CannotWatch",)),
    ):
        loaded = sys.modules.get(module)
        found += [getattr(loaded, name) for name in names if hasattr(loaded, name)]
    return tuple(found)


def run_command() -> None:
    """Run the command that sys.argv names; ends the process with its exit code (services/cli.py)."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv or not isinstance(error, user_errors()):
            raise
        sys.stderr.write(f"{error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
