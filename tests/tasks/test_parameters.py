"""A parameter of another kind than the task's signature names is one message before anything starts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from configs import ConfigError
from rollout.tasks import Prompt, Response, make_task, registry
from rollout.tasks.parameters import check_parameters

WRONG = (True, -1, 0, 2.5, "x", [1, "a"], {"a": 1}, float("nan"))


@dataclass(frozen=True)
class Foreign:
    """As a package of somebody else's has it."""

    seed: int
    largest: int = 9
    name: str = "foreign"

    def prompt(self, index: int) -> Prompt:
        return Prompt(text=str(index))

    def reward(self, prompt: Prompt, response: Response) -> float:
        return 0.0


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": "B"}) + "\n" for i in range(5)))
    return str(file)


@pytest.mark.parametrize(("name", "parameter"), [("max-digit", "digits"), ("guess-number", "turns")])
@pytest.mark.parametrize("value", WRONG)
def test_a_number_that_is_none_or_out_of_range_is_refused_by_its_name(name: str, parameter: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"task\.parameters of '{name}': {parameter}.* is "):
        make_task(name, 0, {parameter: value})


@pytest.mark.parametrize(
    ("parameter", "wrong"),
    [
        ("prompt_field", (True, 2.5, [1], {})),
        ("instruction", (True, 1, None, [])),
        ("epochs", ("x", 0, 2.5, True)),
        ("limit", (0, -1, "x", True)),
        ("pass_rate", (0.5, [0.5], [0.1, 2.0], "x")),
        ("chat", ("no", 1)),
        ("choices", (0, True, "x")),
    ],
)
def test_a_shared_parameter_of_data_sets_is_refused_before_a_row_is_asked_for(
    rows: str, parameter: str, wrong: tuple[object, ...]
) -> None:
    for value in wrong:
        with pytest.raises(ConfigError, match=parameter):
            make_task("choice-jsonl", 0, {"path": rows, parameter: value})


@pytest.mark.parametrize("sources", [0, "x", [1], [{"path": 1}], [{"path": "p", "weight": 0}], {}])
def test_sources_are_a_list_of_files(sources: object) -> None:
    with pytest.raises(ConfigError, match="sources"):
        make_task("choice-jsonl", 0, {"sources": sources})


def test_what_yaml_writes_for_a_kind_is_taken(rows: str) -> None:
    task = make_task("choice-jsonl", 0, {"path": rows, "pass_rate": [0, 1], "epochs": None, "chat": False})
    assert task.prompt(0).text is not None
    assert make_task("code-jsonl", 0, {"path": code(rows), "timeout_s": 2}).name == "code-jsonl"


def code(rows: str) -> str:
    file = Path(rows).with_name("code.jsonl")
    file.write_text(json.dumps({"prompt": "1?", "tests": [{"input": "", "output": "1"}]}) + "\n")
    return str(file)


def test_a_task_of_another_package_is_held_to_its_own_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("foreign", f"{__name__}:Foreign", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group, name=None: [point] if name == "foreign" else [])
    assert make_task("foreign", 0, {"largest": 4}).prompt(1).text == "1"
    with pytest.raises(ConfigError, match="largest is 'four'"):
        make_task("foreign", 0, {"largest": "four"})


@pytest.mark.parametrize(
    ("task", "parameters", "said"),
    [
        ("copy", {"digit": 1}, "unknown: digit. There are digits, name."),
        ("guess-number", {"turn": 1, "a": 2}, "unknown: a, turn. There are turns, name."),
        ("math-jsonl", {"pth": "x"}, "unknown: pth. There are answer_field, chat"),
        ("reasoning-gym", {}, "missing: generator. There are generator, name, parameters"),
        ("service-jsonl", {"path": "x"}, "missing: url. Look up"),
    ],
)
def test_a_name_that_a_task_does_not_take_or_lacks_is_told_what_it_takes(
    task: str, parameters: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"task.parameters of {task!r}: {said}")):
        make_task(task, 0, parameters)


def test_a_signature_that_says_nothing_or_what_nobody_knows_checks_nothing() -> None:
    class Odd:
        pass

    def untyped(seed, odd=None):  # type: ignore[no-untyped-def]
        return seed, odd

    def unknown(seed: int, odd: Odd) -> None: ...

    def unresolved(seed: int, odd: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821

    for factory in (untyped, unknown, unresolved):
        check_parameters(factory, {"odd": [1]})
