"""`lagrange eval` and `lagrange evaluator`; services/commands.py adds them.

Invariant: what is wrong with the call is a ConfigError before an engine is started.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from configs import ConfigError
from services.options import ConfigOption, pairs


def add_to(app: typer.Typer) -> None:
    """Add both."""
    app.command("eval")(evaluate)
    app.command()(evaluator)


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint in Hugging Face layout, or a published version.")],
    task: Annotated[str, typer.Option("--task", help="Name of a task (docs/add-a-task.md).")],
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples of each prompt.")] = 8,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts 0 to N - 1 of the task.")] = 100,
    parameters: Annotated[
        list[str] | None, typer.Option("--parameter", metavar="NAME=VALUE", help="Of the task, path=data/aime24.jsonl.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Such as rollout.max_new_tokens=4096.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Also append the record to this .jsonl file.")] = None,
) -> None:
    """Score a checkpoint on a task: avg@k and pass@k with 95 % intervals. Starts one engine and ends it."""
    from broker.logs import configure_logs
    from rollout.evaluation.alone import alone_config, evaluate_alone
    from rollout.evaluation.engine import EngineFailed

    configure_logs("", "eval")
    if output is not None:  # before minutes of work whose result would be lost
        try:
            output.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError(f"--output {output} cannot be written ({error.strerror}). Name another file.") from error
    config = alone_config(checkpoint, task, pairs(parameters, "--parameter"), pairs(settings, "--set"))
    try:
        record = asyncio.run(evaluate_alone(config, prompts=prompts, samples=samples))
    except EngineFailed as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    Console().print(table(record))


def evaluator(config: ConfigOption) -> None:
    """Evaluate published versions of a run while it trains, on an engine of its own, as `evaluation` says."""
    from rollout.evaluation.follow import main
    from services.deployment import process_config

    raise typer.Exit(main(process_config(config)))


def table(record: dict[str, Any]) -> Table:
    """Scores of a record for people."""
    out = Table(title=f"{record['task']}: {record['prompts']} prompts, {record['samples']} samples each")
    for column in ("score", "value", "95 % interval"):
        out.add_column(column, justify="left" if column == "score" else "right")
    for name, score in record.items():
        if isinstance(score, dict) and "low" in score:
            out.add_row(name, f"{score['value']:.4f}", f"{score['low']:.4f} to {score['high']:.4f}")
    out.caption = (
        f"mean length {record['mean_tokens']:.1f} tokens, cut {record['truncated']:.1%}, "
        f"missing {record['missing']}, {record['seconds']:.1f} s"
    )
    return out
