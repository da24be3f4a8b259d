"""What several commands of the command line share: options, and how NAME=VALUE is read."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from configs import ConfigError
from configs.load import parse_yaml

NAME = "lagrange"
WIDE = 200  # columns of what goes into a file or a pipe
ConfigOption = Annotated[Path, typer.Option("--config", help="The run's configuration.")]

STANDS_ON = ("torch", "megatron-core", "ray", "redis", "pydantic", "fastapi")  # SGLang has an environment of its own


def versions() -> list[str]:
    """A line for Lagrange and for each package that it stands on and that is installed here."""
    lines = []
    for name in ("lagrange-rl", *STANDS_ON):
        try:
            lines.append(f"{name.removesuffix('-rl')} {version(name)}")
        except PackageNotFoundError:
            if not lines:
                lines.append("lagrange, run from its source without being installed")
    return lines


def program() -> str:
    """How to call this program, in a command that is suggested: by the path by which it was called, if it was by one.

    `lagrange` alone is said where it is found by that name, and by processes that were not called as a program.
    """
    called = sys.argv[0]
    by_path = Path(called).name == NAME and "/" in called and shutil.which(NAME) != called
    return shlex.quote(called) if by_path else NAME


def pairs(texts: list[str] | None, option: str) -> dict[str, Any]:
    """["a=1"] as {"a": 1}; values are read as YAML. Raises ConfigError."""
    out: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {text}: expected NAME=VALUE, as in lag.max=4")
        try:
            out[name] = parse_yaml(value)
        except ValueError as error:
            raise ConfigError(f"{option} {text}: {value!r} is not a YAML value") from error
    return out


def wide_console() -> Console:
    """As wide as the terminal; in a file or a pipe so wide that no column of a table is broken."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)
