"""Every field of the configuration that a page names is one, with a value that it takes and the default that it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from configs.load import parse_yaml
from configs.schema import RunConfig
from tests.deploy.test_commands_in_documents import code, every_page, text_of

SECTIONS = RunConfig.model_fields
EXAMPLES = {"task.parameters"}  # whatever a task takes


def accepts(dotted: str, value: Any = None, *, checked: bool = False) -> None:
    """The configuration has this field, and it takes the value if it is to be checked."""
    model: Any = RunConfig
    *parents, leaf = dotted.split(".")
    for number, name in enumerate(parents):
        assert name in model.model_fields, dotted
        model = inner(model.model_fields[name].annotation)
        if ".".join(parents[: number + 1]) in EXAMPLES:
            return
        assert model is not None, dotted
    assert leaf in model.model_fields, dotted
    if checked:
        field = model.model_fields[leaf]
        try:
            TypeAdapter(field.annotation).validate_python(value)
        except ValidationError as error:
            pytest.fail(f"{dotted}: {value}: {error}")


def inner(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one (or nothing)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        annotation.model_rebuild()  # a section may name one that is defined below it
        return annotation
    return next((found for part in getattr(annotation, "__args__", ()) if (found := inner(part))), None)


def leaves(tree: dict[str, Any], parent: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of everything in a tree that is no section."""
    out: list[tuple[str, Any]] = []
    for name, value in tree.items():
        nested = isinstance(value, dict) and value and f"{parent}{name}" not in EXAMPLES
        out += leaves(value, f"{parent}{name}.") if nested else [(f"{parent}{name}", value)]
    return out


@every_page
def test_the_fields_that_it_names_are_the_configurations(page: Path) -> None:
    for words in code(text_of(page)):
        for section, fields, value in re.findall(r"^([a-z_]+)((?:\.[a-z_]+)+)(?:: (\S+|[\[{].*[\]}]))?$", words):
            if section in SECTIONS and fields not in (".yaml", ".py", ".md"):
                any_value = not value or re.fullmatch("[A-Z]", value)  # a letter stands for one
                accepts(f"{section}{fields}", None if any_value else parse_yaml(value), checked=not any_value)


@every_page
def test_what_it_sets_can_be_set(page: Path) -> None:
    for dotted, value in re.findall(r"--set ([a-z_.]+)=([^\s`)]+)", text_of(page)):
        accepts(dotted, parse_yaml(value), checked=not re.fullmatch("[A-Z]+", value))


@every_page
def test_its_pieces_of_configuration_are_of_fields_that_take_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    pieces = [*re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL), *re.findall(r"`([a-z_]+: \{.*?\})`", text)]
    pieces += re.findall(r"\n\n((?:    [^\n]*\n)+)", text)
    for piece in pieces:
        try:
            tree = parse_yaml(piece)
        except ValueError:
            continue  # shell
        if isinstance(tree, dict) and set(tree) <= set(SECTIONS):
            for dotted, value in leaves(tree):
                accepts(dotted, value, checked="..." not in str(value))


@every_page
def test_the_defaults_that_it_names_are_those(page: Path) -> None:
    for dotted, value in re.findall(
        r"`([a-z_]+(?:\.[a-z_]+)+)` \((?:default )?`?([\d.,]*\d|true|false|null)`?[,)]", text_of(page)
    ):
        model: Any = RunConfig
        *parents, leaf = dotted.split(".")
        for name in parents:
            model = inner(model.model_fields[name].annotation)
        assert model.model_fields[leaf].get_default(call_default_factory=True) == parse_yaml(value.replace(",", "")), (
            dotted
        )
