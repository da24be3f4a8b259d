"""What `lagrange check` and the start of `lagrange up` find by a look at this machine: data, packages, the engine."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs import ConfigError, RunConfig, load_config
from services import examine as examination
from services.examine import examine
from services.local import up
from services.local.layout import CannotStart
from services.local.plan import Plan, plan_new
from services.local.preflight import ROOT

LOCAL = Path(__file__).parents[2] / "configs" / "local.yaml"


def rows(path: Path, number: int, *more: str) -> Path:
    good = [json.dumps({"question": f"{i}+1?", "answer": str(i + 1)}) for i in range(number)]
    path.write_text("\n".join([*good, *more]))
    return path


def on(path: Path, parameters: dict[str, Any] | None = None, **overrides: Any) -> RunConfig:
    """A run on a data set of steps of four groups."""
    task = {"name": "exact-jsonl", "parameters": {"path": str(path), **(parameters or {})}}
    return load_config(LOCAL, {"task": task, "trainer.groups_per_step": 4, "run.steps": 10, **overrides})


def test_a_data_set_that_is_here_and_malformed_is_an_error_and_one_that_is_elsewhere_none(tmp_path: Path) -> None:
    found = examine(on(rows(tmp_path / "a.jsonl", 1, "no JSON")))
    assert "a.jsonl, line 2: " in found.problems[0]
    assert ".." not in found.problems[0].replace(str(tmp_path), "")
    assert "cannot be read" in examine(on(tmp_path)).problems[0]  # a folder
    elsewhere = examine(on(tmp_path / "none.jsonl"))
    assert (elsewhere.problems, len(elsewhere.absent)) == ([], 1)


@pytest.mark.parametrize(
    ("number", "epochs", "more", "said"),
    [
        (3, 1, {}, None),
        (5, 1, {}, "5 prompts in all its epochs, enough for 1 step: the run ends with them, before run.steps = 10."),
        (5, 3, {}, "15 prompts in all its epochs, enough for 3 steps: the run ends"),
        (20, 2, {}, "40 prompts in all its epochs, enough for 10 steps."),
        (20, 2, {"task.drop_equal_groups": True}, "40 prompts in all its epochs, enough for at most 10 steps."),
    ],
)
def test_the_steps_that_a_data_set_gives_are_said_and_none_at_all_is_an_error(
    tmp_path: Path, number: int, epochs: int, more: dict[str, Any], said: str | None
) -> None:
    found = examine(on(rows(tmp_path / "a.jsonl", number), {"epochs": epochs}, **more))
    if said is None:
        assert "3 prompts in all its epochs, and a step takes trainer.groups_per_step = 4" in found.problems[0]
        assert found.facts == []
    else:
        assert found.problems == []
        ((topic, sentence),) = found.facts
        assert topic == "data set"
        assert sentence.startswith(said)


def test_a_data_set_without_an_end_is_not_counted(tmp_path: Path) -> None:
    assert examine(on(rows(tmp_path / "a.jsonl", 2))).facts == []


def test_a_sink_whose_package_is_not_installed_is_named_at_the_check_and_a_folder_of_its_name_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "SINK_PACKAGES", {"wandb": "sink_of_the_test", "tensorboard": "json"})
    sinks = load_config(LOCAL, {"trainer.sinks": ["tensorboard", "wandb"]})
    (tmp_path / "sink_of_the_test").mkdir()  # wandb leaves one
    monkeypatch.syspath_prepend(tmp_path)
    (absent,) = examine(sinks).absent
    assert absent.startswith("trainer.sinks names wandb")
    on_ray = load_config(LOCAL, {"trainer.sinks": ["wandb"], "trainer.launcher": "ray"})
    assert examine(on_ray).absent == []


def test_from_another_folder_the_engine_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = {"engine.python": "README.md", "run.directory": str(tmp_path)}  # anything that lies in the project's folder
    with pytest.raises(CannotStart, match=f"Set engine.python: {ROOT}/README.md, or call lagrange from {ROOT}"):
        plan_new(LOCAL, here)
    with pytest.raises(CannotStart, match=r"none/python is missing.*make setup"):
        plan_new(LOCAL, {**here, "engine.python": "none/python"})


def test_up_warns_as_check_does_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: Plan) -> None:
        raise ConfigError("enough seen")

    monkeypatch.setattr(up, "prepare", refuse)
    out = io.StringIO()
    asked = {"lag.max": 0, "run.directory": str(tmp_path), "engine.python": sys.executable}
    with pytest.raises(ConfigError, match="enough seen"):
        up.run(LOCAL, overrides=asked, console=Console(file=out))
    assert out.getvalue().startswith("warning  lag.max is 0: the trainer waits")
