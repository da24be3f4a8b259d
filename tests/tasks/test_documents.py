"""The page on tasks is true: its example is a task, and its table names what there is."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from typer.testing import CliRunner

from configs import load_config
from rollout.agents import AgentTask
from rollout.tasks import Response, make_task, registry
from rollout.tasks.source import SourceSettings
from services.commands import app
from services.local.tiny_model import CHARACTERS

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-task.md").read_text(encoding="utf-8")


def block(language: str, page: str = PAGE) -> str:
    found = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_pages_example_is_a_task_and_a_run_with_it_can_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = ModuleType("my_package.tasks")
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, "my_package.tasks", module)
    exec(compile(block("python"), "docs/add-a-task.md", "exec"), module.__dict__)
    assert len(block("python").strip().split("\n")) <= 27
    ((name, value),) = tomllib.loads(block("toml"))["project"]["entry-points"][registry.ENTRY_POINTS].items()
    point = EntryPoint(name, value, registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group, name=None: [point] if name in (None, "sum") else [])
    file = tmp_path / "sum.yaml"
    file.write_text(block("yaml"))
    checked = CliRunner().invoke(app, ["check", str(file)])
    assert checked.exit_code == 0, checked.exception
    assert "warning" not in checked.output
    config = load_config(file)
    task = make_task(config.task.name, config.run.seed, config.task.parameters)
    rewards = []
    for index in range(50):
        prompt = task.prompt(index)
        a, b = map(int, prompt.text[:-1].split("+"))
        assert set(prompt.text + str(a + b)) <= set(CHARACTERS)
        assert len(str(a + b)) == config.rollout.max_new_tokens
        assert task.reward(prompt, Response(str(a + b), (), "stop")) == 1.0
        rewards += [task.reward(prompt, Response(said, (), "length")) for said in ("", "", "", *CHARACTERS)]
    assert 0.05 < sum(rewards) / len(rewards) < 0.3  # of the untrained model, whose 32 tokens are equally likely


def test_the_pages_function_judges_the_rows_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE[PAGE.index("## A function is enough") :]
    module = ModuleType("my_rewards")
    exec(compile(block("python", page), "docs/add-a-task.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    asked = yaml.safe_load(block("yaml", page))["task"]
    (tmp_path / asked["parameters"]["path"]).write_text('{"question": "capital?", "answer": "Paris"}')
    monkeypatch.chdir(tmp_path)
    task = make_task(asked["name"], 0, asked["parameters"])
    assert [task.reward(task.prompt(0), Response(said, (), "stop")) for said in ("It is Paris.", "Rome")] == [1.0, 0.0]


async def test_the_page_on_agents_shows_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    module = ModuleType("my_package.agent")
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, "my_package.agent", module)
    exec(compile(block("python", page), "docs/agents.md", "exec"), module.__dict__)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    asked = yaml.safe_load(block("yaml", page))["task"]
    task = make_task(asked["name"], 0, {**asked["parameters"], "path": str(tmp_path / "rows.jsonl")})
    assert isinstance(task, AgentTask)
    assert (task.agent_timeout_s, task.agent_calls) == (600, 32)


def test_the_page_names_every_task_and_every_parameter_of_data_sets() -> None:
    missing = [name for name in registry.BUILT_IN if f"`{name}`" not in PAGE]
    missing += [name for name in SourceSettings.__dataclass_fields__ if f"`{name}" not in PAGE]
    assert not missing
