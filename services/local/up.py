"""`lagrange up`: a whole loop as local processes, watched, restarted, and ended together.

Invariant: whatever happens to `up` itself, none of its processes outlives it (processes.py, guardian.py); one run
folder has at most one `up`; the run ends with the trainer's last step or with one clear message, and after any end but
the first `lagrange up --resume runs/<id>` goes on.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from configs import ConfigError
from configs.lifetime import signals_noted
from services.local.output import console_of
from services.local.plan import only_one, plan_new, plan_resumed, prepare
from services.local.session import Commands, Session, Settings, own_command


def run(
    file: Path | None,
    *,
    overrides: dict[str, Any] | None = None,
    resume: Path | None = None,
    requeue: bool = False,
    console: Console | None = None,
    commands: Commands = own_command,
    settings: Settings | None = None,
) -> int:
    """Run `file`, or go on with the run in `resume`, to its end; returns the exit code.

    requeue: the prompts of the dead letters of `resume` are issued again.

    0: every step is trained, now or before. 130: stopped by a signal (the run resumes). Else: it failed, and a message
    has said why. Raises ConfigError and CannotStart before anything was started.
    """
    with signals_noted(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as asked:
        if requeue and resume is None:
            raise ConfigError("--requeue issues dead letters of a run again: name it by --resume runs/<id>")
        if file is not None and resume is None:
            plan = plan_new(file, overrides or {})
        elif resume is not None and file is None:
            plan = plan_resumed(resume, overrides or {}, requeue=requeue)
        elif resume is not None:
            raise ConfigError(
                f"--resume goes on under the run's own configuration, {resume}/config.yaml, and not under {file}. "
                "Leave the file out; change fields by --set NAME=VALUE."
            )
        else:
            raise ConfigError("name a configuration file, or a run to go on with: --resume runs/<id>")
        console = console or console_of(lambda: asked.append(signal.SIGPIPE))
        if plan.over:
            console.print(plan.over, soft_wrap=True, markup=False, highlight=False)
            return 0
        for warning in plan.warnings:
            console.print(f"[yellow]warning[/]  {escape(warning)}", soft_wrap=True, highlight=False)
        with only_one(plan.folder):
            prepare(plan)
            return Session(plan, commands, settings or Settings(), console, asked).run()
