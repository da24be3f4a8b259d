"""Where a function of the user's own is found, in every process that asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import ConfigError
from rollout.rewards.pool import PoolLimits, ProcessPool, child_environment
from rollout.tasks import Response, make_task
from rollout.tasks.own_code import load_function
from services.local.layout import Role
from services.local.session import own_command

LOCAL = Path(__file__).parents[2] / "configs" / "local.yaml"
JUDGE = """
import helper_of_the_test
def judge(text, answer, metadata):
    return helper_of_the_test.same(text, answer)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module, one that it imports, and rows."""
    (tmp_path / "rewards_of_the_test.py").write_text(JUDGE)
    (tmp_path / "helper_of_the_test.py").write_text("def same(a, b):\n    return float(a == b)\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    known = set(sys.modules)
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("_of_the_test") and name not in known]:
        del sys.modules[name]


async def test_a_module_beside_the_caller_judges_here_and_in_the_processes_of_rewards(folder: Path) -> None:
    for name in ("rollout.py", "configs.py", "json.py"):  # such a file takes no place of ours
        (folder / name).write_text("raise SystemExit('shadowed')\n")
    parameters = {"path": "rows.jsonl", "function": "rewards_of_the_test:judge"}
    task = make_task("function-jsonl", 0, parameters)
    prompt, right = task.prompt(0), Response("2", (), "stop")
    assert task.reward(prompt, right) == 1.0
    pool = ProcessPool("function-jsonl", 0, parameters, PoolLimits(1), child_environment(os.environ))
    try:
        assert await pool.reward(prompt, right) == 1.0
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("content", "function", "said"),
    [
        ("", "nothing_of_the_test:judge", "No module named 'nothing_of_the_test', neither installed nor in {folder},"),
        ("", "broken_of_the_test:judge", "broken_of_the_test.py'> has no 'judge'"),
        ("def judge(:", "broken_of_the_test:judge", "SyntaxError: "),
        ("1 / 0", "broken_of_the_test:judge", "ZeroDivisionError: division by zero"),
        ("import nothing_of_the_test", "broken_of_the_test:judge", "No module named 'nothing_of_the_test'"),
        ("", "configs:judge", "configs/__init__.py'> has no 'judge'"),
    ],
)
def test_a_function_that_cannot_be_had_is_one_message(folder: Path, content: str, function: str, said: str) -> None:
    (folder / "broken_of_the_test.py").write_text(content)
    with pytest.raises(ConfigError) as caught:
        make_task("function-jsonl", 0, {"path": "rows.jsonl", "function": function})
    assert said.format(folder=folder) in str(caught.value)


def test_the_current_folder_is_looked_at_last_and_only_when_it_is_needed(folder: Path) -> None:
    before = list(sys.meta_path)
    (folder / "fractions.py").write_text("raise SystemExit('shadowed')\n")
    assert load_function("fractions:Fraction")(1, 2) == 0.5
    assert sys.meta_path == before
    for _ in range(2):
        assert load_function("rewards_of_the_test.judge")("2", "2", {}) == 1.0
    assert sys.meta_path[:-1] == before


def test_a_process_that_up_starts_finds_them_too_and_no_file_there_takes_the_place_of_a_module(folder: Path) -> None:
    for name in ("services.py", "configs.py", "trainer.py", "types.py"):
        (folder / name).write_text("raise SystemExit('shadowed')\n")
    task = "task={name: function-jsonl, parameters: {path: rows.jsonl, function: 'rewards_of_the_test:judge'}}"
    command = own_command(Role("any", ("check", str(LOCAL), "--set", task)))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
