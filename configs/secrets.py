"""Secrets come from the environment, or from files that it names.

Invariant: a secret is never part of a configuration, a command line, a log or a report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from configs.load import ConfigError

REDIS_PASSWORD = "LAGRANGE_REDIS_PASSWORD"
REDIS_USER = "LAGRANGE_REDIS_USER"  # no secret: the role, where Redis has a user for each (broker/access.py)
API_TOKEN = "LAGRANGE_API_TOKEN"
ENGINE_API_KEY = "LAGRANGE_ENGINE_API_KEY"


def read_secret(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The secret `name`: the variable of that name, else the content of the file that `<name>_FILE` names, else None.

    Raises ConfigError if the file cannot be read or is empty.
    """
    if value := environment.get(name, ""):
        return value
    file = environment.get(f"{name}_FILE", "")
    if not file:
        return None
    try:
        value = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{name}_FILE: {file} cannot be read ({error.strerror}). Name a readable file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}_FILE: {file} is not text. Name a text file.") from error
    if not value:
        raise ConfigError(f"{name}_FILE: {file} is empty. Write the secret into it.")
    return value


def redis_user(environment: Mapping[str, str] = os.environ) -> str | None:
    """As whom a process signs in to Redis; None: as its default user."""
    return environment.get(REDIS_USER) or None
