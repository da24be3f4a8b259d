"""The commands; services/commands.py adds them to `lagrange`.

Invariant: each opens one handle on the run that its first argument names, with a finite timeout, and closes it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from configs import ConfigError, RunConfig
from services.options import program, wide_console

if TYPE_CHECKING:
    from broker.queue import Broker
    from broker.types import GroupRecord, ListedState

WhereArgument = Annotated[Path, typer.Argument(help="A run's folder, runs/<id>, or its configuration file.")]
NEXT = "next"
GroupArgument = Annotated[
    str, typer.Argument(help="A group's id, as `groups list` shows it, or `next`: one that can be read now.")
]
STATES: tuple[ListedState, ...] = ("generating", "ready", "leased", "trained")
LOOKED_AT = 50  # groups of a state, oldest first
groups = typer.Typer(help="Look at groups and dead letters of a run.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add `queue`, `groups` and `replay`."""
    app.command()(queue)
    app.add_typer(groups, name="groups")
    app.command()(replay)


def queue(
    where: WhereArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Draw again every second until Ctrl-C.")] = False,
) -> None:
    """Show the queue at a glance: ledger, ages, bytes, who waits and why."""
    from services.queue_cli.show import queue_screen

    with opened(where) as (broker, _):
        if not watch:
            Console().print(queue_screen(broker.snapshot()))
            return
        with Live(queue_screen(broker.snapshot()), auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(1)
                    live.update(queue_screen(broker.snapshot()), refresh=True)
            except KeyboardInterrupt:
                return


@groups.command("list")
def list_groups(
    where: WhereArgument,
    state: Annotated[str, typer.Option("--state", help="generating, ready, leased, trained, or dead.")] = "ready",
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most that many.")] = 50,
) -> None:
    """List groups of one state, those that are used or lost first at the top; `dead`: the dead letters."""
    from services.queue_cli.show import dead_table, group_table

    with opened(where) as (broker, _):
        if state == "dead":
            letters = broker.dead_letters()[-limit:]
            wide_console().print(dead_table(letters) if letters else "no dead letters")
            return
        chosen = next((name for name in STATES if name == state), None)
        if chosen is None:
            raise ConfigError(f"--state {state}: expected one of {', '.join(STATES)}, dead.")
        records = broker.groups(chosen, limit)
        wide_console().print(group_table(records, broker.server_time_ms()) if records else f"no group is {chosen}")


@groups.command()
def show(where: WhereArgument, group: GroupArgument) -> None:
    """Show one group: its record, its samples if the payload is there, and their text if the model is here, too."""
    from rollout.codec import FileCodec
    from services.queue_cli.show import record_table, samples_table, spoken

    with opened(where) as (broker, config):
        record = found(broker, group)
        console = Console()
        console.print(record_table(record))
        if not record.payload_bytes:
            return
        held = broker.fetch([record.group_id])[0]
        console.print(samples_table(held))
        if config.model.path is not None and config.model.path.is_dir():
            at = record.trained_at if record.trained_at >= 0 else broker.snapshot().version
            console.print(spoken(held, FileCodec(config.model.path), at))


@groups.command()
def dump(where: WhereArgument, group: GroupArgument, file: Annotated[Path, typer.Argument(help="To write.")]) -> None:
    """Write a group with its run's settings to a file, for `lagrange replay`."""
    from services.queue_cli.dump import write_dump

    with opened(where) as (broker, config):
        record = found(broker, group)
        if not record.payload_bytes:
            raise ConfigError(f"group {group} has no payload: it is still generated, or trainer.retention is prompt.")
        payload = bytes(broker.fetch_bytes([record.group_id])[0])
        version = record.trained_at if record.trained_at >= 0 else broker.snapshot().version
        write_dump(file, config, version, record.group_id, payload)
    typer.echo(f"{file}: group {record.group_id}, {len(payload)} bytes. Look at it with `{program()} replay {file}`.")


@groups.command()
def requeue(
    where: WhereArgument, prompt: Annotated[int, typer.Argument(help="Prompt index of a dead letter.")]
) -> None:
    """Issue the prompt of a dead letter again, with all its tries."""
    with opened(where) as (broker, _):
        if not broker.requeue(prompt).done:
            raise ConfigError(f"prompt {prompt} is no dead letter. `{program()} groups list {where} --state dead`")
    typer.echo(f"prompt {prompt} is issued again")


def replay(
    file: Annotated[Path, typer.Argument(help="What `lagrange groups dump` wrote.")],
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint (Hugging Face layout) to compare.")] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="Of one token's |log-ratio|.")] = 1e-3,
) -> None:
    """Compute a dumped group again on the CPU and show the first difference. Exit code 1 if there is one."""
    from services.queue_cli import replay as again
    from services.queue_cli.dump import read_dump
    from services.queue_cli.show import replay_table

    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: no config.json there. Name a checkpoint's folder, runs/<id>/model-final.")
    held, group, config = read_dump(file)
    result = again.replay(group, config, held.version, model=model, tolerance=tolerance)
    console = Console(highlight=False)
    console.print(replay_table(result.rows))
    console.print(f"loss {result.loss:.6g} ({result.loss_name}, this group alone)")
    if result.difference:
        console.print(f"[red]first difference[/]  {escape(result.difference)}")
        raise typer.Exit(1)
    console.print("[green]no difference[/]" + ("" if model else " (policy log-probs: the engine's; --model compares)"))


def opened(where: Path) -> AbstractContextManager[tuple[Broker, RunConfig]]:
    """As open_run.opened."""
    from services.local import open_run  # a command that is not called needs no Redis client

    return open_run.opened(where)


def found(broker: Broker, group: str) -> GroupRecord:
    """The record of the group that an argument names. Raises ConfigError that says what became of it."""
    if group == NEXT:
        return readable_now(broker)
    if not group.isdecimal():
        raise ConfigError(f"{group!r} is no group. Name an id, as `lagrange groups list` shows it, or {NEXT}.")
    record = broker.group(int(group))
    if record is not None:
        return record
    for letter in broker.dead_letters():
        if int(letter["group_id"]) == int(group):
            raise ConfigError(
                f"group {group} failed and its prompt {letter['prompt_index']} is a dead letter after attempt "
                f"{letter['attempt']}: {letter['reason']}"
            )
    raise ConfigError(
        f"group {group} is closed: trained and durable, stale or failed; or there never was one. A group is kept until "
        f"the checkpoint after its step; `{NEXT}` in place of its id takes one that is there."
    )


def readable_now(broker: Broker) -> GroupRecord:
    """A group whose payload is there, of those the one that probably stays longest. Raises ConfigError."""
    for state in ("ready", "leased", "trained"):
        if kept := [record for record in broker.groups(state, LOOKED_AT) if record.payload_bytes]:
            return kept[-1]
    raise ConfigError("no group can be read now: none waits, is being trained or waits for its checkpoint. Ask again.")
