"""Reads and writes configuration files.

Invariant: whatever is wrong with a file comes out as one `ConfigError` whose text names the field and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.schema import RunConfig


class ConfigError(Exception):
    """A configuration that cannot be used; the message is meant for the user as it is."""


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a run's YAML file.

    overrides: dotted names to values, as in {"lag.max": 4}; they win over the file.
    Raises ConfigError if the file is missing, is not YAML, or does not make a valid RunConfig.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Name a file of configs/, for instance configs/local.yaml."
        ) from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections (run, lag, model, ...), found {type(tree).__name__}")
    for dotted, value in (overrides or {}).items():
        _assign(tree, dotted, value)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "\n".join(_explain(item) for item in error.errors())) from error


def save_config(config: RunConfig, path: Path) -> None:
    """Write a configuration so that `load_config` gives it back; the file appears whole or not at all."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    aside = path.with_suffix(".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for name in parents:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{dotted}: {name} is not a section")
        tree = child
    tree[leaf] = value


def _explain(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "configuration"
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key. Remove it, or look up its name with `lagrange schema`."
    if item["type"] == "missing":
        return f"{where}: missing. Add it."
    message = item["msg"].removeprefix("Value error, ")
    return message if where == "configuration" else f"{where}: {message} (got {item.get('input')!r})"
