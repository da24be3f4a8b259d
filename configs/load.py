"""Reads and writes configuration files.

Invariant: whatever is wrong with a file comes out as one `ConfigError` whose text names the field and what to do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.fields import allowed, nearest, short_for
from configs.schema import RunConfig


class ConfigError(Exception):
    """A configuration that cannot be used; the message is meant for the user as it is."""


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a run's YAML file.

    overrides: dotted names to values, as in {"lag.max": 4}; they win over the file.
    Raises ConfigError if the file is missing, is not YAML, or does not make a valid RunConfig.
    """
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Name a file of configs/, for instance configs/local.yaml."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text in UTF-8 (byte {error.start}). Save it as UTF-8.") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if tree is None:
        raise ConfigError(f"{path}: it is empty. Begin with a copy of configs/local.yaml.")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections (run, lag, model, ...), found {_shown(tree)}.")
    for dotted, value in (overrides or {}).items():
        _assign(tree, dotted, value)
    return validated(tree, str(path))


def validated(tree: Any, where: str) -> RunConfig:
    """The configuration that a tree of plain values makes. Raises ConfigError, which begins with `where`."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = [problem for item in error.errors() for problem in _explain(item).splitlines()]
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems)) from error


def parse_yaml(text: str) -> Any:
    """What a YAML text holds: plain values. Raises ValueError, also for a key that a mapping has twice."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        where = f"line {at.line + 1}, column {at.column + 1}: " if at else ""
        tab = ". Indent with spaces, not with tabs." if "\\t" in str(error.problem) else ""
        raise ValueError(f"{where}{error.problem}{tab}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


_BOOL = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys, or a NUL that no path can have, without a word; here they are errors.

    `off` is a word, as in YAML 1.2, and not false: trainer.routing_replay has it. A switch takes both.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: [(tag, pattern) for tag, pattern in known if tag != _BOOL]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        if twice := next((key for at, key in enumerate(keys) if key.value in names[:at]), None):
            said = f"the key {twice.value!r} is there twice"
            raise yaml.constructor.ConstructorError(None, None, said, twice.start_mark)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        found = super().construct_scalar(node)
        if isinstance(found, str) and "\0" in found:
            raise yaml.constructor.ConstructorError(None, None, "a text holds a NUL", node.start_mark)
        return found


_Loader.add_implicit_resolver(_BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def save_config(config: RunConfig, path: Path) -> None:
    """Write a configuration so that `load_config` gives it back; the file appears whole or not at all."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    aside = path.with_suffix(".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for depth, name in enumerate(parents, start=1):
        if tree.get(name) is None:  # a resolved file has every section that is not used, as null
            tree[name] = {}
        child = tree[name]
        if not isinstance(child, dict):
            raise ConfigError(f"{dotted}: {'.'.join(parents[:depth])} holds {_shown(child)}, not fields of its own.")
        tree = child
    tree[leaf] = value


def _explain(item: Any) -> str:
    """One problem that pydantic found, in a line; those that configs/rules.py found, a line each."""
    place, kind = item["loc"], item["type"]
    where = ".".join(map(str, place))
    if kind == "value_error":  # of our own, which shows what may be shown
        message = str(item["ctx"]["error"])
        return f"{where}: {message}" if where else message
    if kind in ("extra_forbidden", "invalid_key"):
        meant = nearest(place)
        return f"{where}: unknown key. " + (
            f"Did you mean {meant}?" if meant else "Remove it, or look up its name with `lagrange schema`."
        )
    if kind == "missing":
        return f"{where}: missing. Add it: {allowed(place)}."
    if field := short_for(place, item["input"]):
        return f"{where}: a section belongs here. Write {place[-1]}: {{{field}: {item['input']}}}."
    bare = " without quotes" if kind == "string_type" and not isinstance(item["input"], dict | list | None) else ""
    return f"{where}: {_shown(item['input'])}{bare} is not allowed here. It may be: {allowed(place)}."


def _shown(value: Any) -> str:
    """A value that was refused, short and without the password that an address may hold."""
    if value is None:
        return "an empty value"
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "a section"
    if isinstance(value, str):
        return "this text" if "@" in value or len(value) > 80 else repr(value)
    return str(value)
