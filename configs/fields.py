"""Every field of a configuration by its dotted name: what it may be, its default and its meaning.

Invariant: a pure function of the schema, so that nothing is described twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from configs.schema import RunConfig

KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "names and values",
}
LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
}
HUGE = 2**31 - 1  # a limit of this size is none that anybody meets


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """kind: what a value may be, in words. default: as YAML has it; "" for a field that has to be set."""

    name: str
    kind: str
    default: str
    meaning: str


def fields() -> list[FieldInfo]:
    """All fields in the order of the schema; those of an optional section follow its name."""
    schema = RunConfig.model_json_schema()
    return list(_walk(schema, schema["$defs"], ""))


def _walk(section: Mapping[str, Any], parts: Mapping[str, Any], prefix: str) -> Iterator[FieldInfo]:
    required = set(section.get("required", ()))
    for key, field in section["properties"].items():
        name, meaning = prefix + key, str(field.get("description", ""))
        choices = [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]
        inner = next((part for choice in choices if (part := _part(choice))), None)
        if inner is None:
            default = "" if key in required else _shown(field.get("default", {}))
            yield FieldInfo(name, " or ".join(map(_kind, choices)), default, meaning)
            continue
        if choices[0].get("type") == "array":
            yield FieldInfo(name, "list of sections", "[]", meaning)
            name += "[]"
        elif len(choices) < len(field.get("anyOf", choices)):
            yield FieldInfo(name, "section", "null", meaning)
        yield from _walk(parts[inner], parts, f"{name}.")


def _part(field: Mapping[str, Any]) -> str:
    """The section that a field holds, alone or in a list; "" if it holds none."""
    reference = field.get("$ref") or field.get("items", {}).get("$ref", "")
    return str(reference).rpartition("/")[2]


def _kind(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    kind = "path" if field.get("format") == "path" else KINDS.get(str(field.get("type")), "anything")
    return ", ".join(
        [kind, *(f"{words} {field[key]:g}" for key, words in LIMITS.items() if field.get(key, HUGE) < HUGE)]
    )


def _shown(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) or value == "" else str(value)
