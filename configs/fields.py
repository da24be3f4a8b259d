"""Every field of a configuration by its dotted name: what it may be, its default and its meaning.

Invariant: pure functions of the schema, so that nothing is described twice: `lagrange schema` and the messages of
configs/load.py say the same of a field.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.schema import RunConfig
from configs.sections.section import ALLOWED

Place = Sequence[str | int]  # keys and indices from the root: ("evaluation", "tasks", 0, "samples")

KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "names and values",
}
LIMITS = {
    "minimum": "at least {:.12g}",
    "exclusiveMinimum": "above {:.12g}",
    "maximum": "at most {:.12g}",
    "exclusiveMaximum": "below {:.12g}",
    "multipleOf": "a multiple of {:.12g}",
    "maxLength": "at most {} characters",
}
USUAL_NAMES = {
    "batch_size": "trainer.groups_per_step",
    "dp": "trainer.layout.data",
    "ep": "trainer.layout.expert",
    "eps": "trainer.optimizer.epsilon",
    "grad_clip": "trainer.optimizer.clip_norm",
    "group_size": "rollout.samples_per_prompt",
    "kl_coef": "trainer.loss.reference_kl",
    "lr": "trainer.optimizer.learning_rate",
    "max_grad_norm": "trainer.optimizer.clip_norm",
    "max_lag": "lag.max",
    "max_off_policy": "lag.max",
    "max_staleness": "lag.max",
    "max_steps": "run.steps",
    "max_tokens": "rollout.max_new_tokens",
    "n": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "pp": "trainer.layout.pipeline",
    "total_steps": "run.steps",
    "tp": "trainer.layout.tensor",
    "wd": "trainer.optimizer.weight_decay",
}
"""What other programs call a field -> its name here."""
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


def allowed(place: Place) -> str:
    """What may be at a place, in words; "" if nothing may."""
    part = _at(place)
    if "properties" in part:
        needed = part.get("required")
        return f"section with {'at least ' if needed else ''}{', '.join(needed or part['properties'])}"
    return " or ".join(map(_kind, _choices(part))) if part else ""


def short_for(place: Place, value: object) -> str:
    """The field that is probably meant where a section was given a bare text: its name, path or url; "" if none is."""
    fields_there = _at(place).get("properties", {})
    if not isinstance(value, str) or not value.isascii() or "@" in value or len(value) > 80 or value in fields_there:
        return ""
    return next((name for name in ("name", "path", "url") if name in fields_there), "")


def nearest(place: Place) -> str:
    """The field that was probably meant by a place that there is not; "" if none is like it.

    One of the same section that is spelled alike, else those of other sections that are spelled the same, else the one
    that other programs call so.
    """
    *section, key = place
    if close := difflib.get_close_matches(str(key), _at(section).get("properties", ()), 1):
        return ".".join(map(str, (*section, close[0])))
    same = " or ".join(field.name for field in fields() if field.name.rpartition(".")[2] == key)
    return same or USUAL_NAMES.get(str(key), "")


def _at(place: Place) -> Mapping[str, Any]:
    """What the schema says of a place, empty if there is none such."""
    schema = RunConfig.model_json_schema()
    part: Mapping[str, Any] = schema
    for step in place:
        known = part.get("properties", {})
        found = part.get("items") if isinstance(step, int) else known.get(step, part.get("additionalProperties"))
        choice = _choices(found)[0] if isinstance(found, Mapping) else {}
        part = schema["$defs"][_reference(choice)] if _reference(choice) else choice
    return part


def _choices(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a field may be besides null."""
    return [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]


def _walk(section: Mapping[str, Any], parts: Mapping[str, Any], prefix: str) -> Iterator[FieldInfo]:
    required = set(section.get("required", ()))
    for key, field in section["properties"].items():
        name, meaning = prefix + key, str(field.get("description", ""))
        choices = _choices(field)
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
    return _reference(field) or _reference(field.get("items", {}))


def _reference(field: Mapping[str, Any]) -> str:
    return str(field.get("$ref", "")).rpartition("/")[2]


def _kind(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    if ALLOWED in field:
        return str(field[ALLOWED])
    kind = "path" if field.get("format") == "path" else KINDS.get(str(field.get("type")), "anything")
    return ", ".join(
        [kind, *(words.format(field[key]) for key, words in LIMITS.items() if field.get(key, HUGE) < HUGE)]
    )


def _shown(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) or value == "" else str(value)
