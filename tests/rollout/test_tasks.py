"""Tasks give the same prompt for an index everywhere, and rewards that are what they say."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError
from rollout.tasks import Prompt, Response, make_task, registry, task_names
from rollout.tasks.digits import MaxDigit, fraction_correct
from services.local.tiny_model import CHARACTERS, make_tokenizer

NAMES = ("copy", "max-digit", "reverse")


def answer(text: str) -> Response:
    return Response(text=text, ids=(), finish="stop")


@pytest.mark.parametrize("name", NAMES)
@given(index=st.integers(0, 10**9), seed=st.integers(0, 2**31 - 1))
def test_a_prompt_depends_on_seed_and_index_alone(name: str, index: int, seed: int) -> None:
    assert make_task(name, seed).prompt(index) == make_task(name, seed).prompt(index)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_vary_and_the_tiny_tokenizer_knows_their_characters(name: str) -> None:
    task = make_task(name, 1)
    prompts = {task.prompt(index).text for index in range(200)}
    assert len(prompts) > 100
    assert set("".join(prompts)) <= set(CHARACTERS)
    tokenizer = make_tokenizer()
    assert all(len(tokenizer.encode(text).ids) == 4 for text in prompts)
    assert {make_task(name, 2).prompt(index).text for index in range(200)} != prompts


@pytest.mark.parametrize(
    ("name", "text", "right", "wrong"),
    [("max-digit", "371>", "7", "3"), ("reverse", "371<", "173", "999"), ("copy", "371=", "371", "999")],
)
def test_the_right_answer_earns_one_and_a_wrong_one_nothing(name: str, text: str, right: str, wrong: str) -> None:
    task = make_task(name, 0)
    index = next(i for i in range(10**5) if task.prompt(i).text == text)
    prompt = task.prompt(index)
    assert task.reward(prompt, answer(right)) == 1.0
    for other in (wrong, "", "a"):
        assert task.reward(prompt, answer(other)) == 0.0
    assert 0.0 < task.reward(prompt, answer(right + "0")) < 1.0


@pytest.mark.parametrize(("text", "expected"), [("123", 1), ("12", 2 / 3), ("129", 2 / 3), ("1239", 3 / 4), ("9", 0)])
def test_a_partly_right_answer_earns_its_share(text: str, expected: float) -> None:
    assert fraction_correct(text, "123") == pytest.approx(expected)


@given(text=st.text(max_size=8), digits=st.text("0123456789", min_size=1, max_size=5))
def test_shares_are_between_zero_and_one_and_one_means_exactly_right(text: str, digits: str) -> None:
    share = fraction_correct(text, digits)
    assert 0 <= share <= 1
    assert (share == 1) == (text == digits)


def test_an_unknown_task_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="max-digit"):
        make_task("nothing", 0)
    assert set(NAMES) <= set(task_names())


@pytest.mark.parametrize("parameters", [{"digits": 0}, {"colour": "red"}, {"digits": "three"}])
def test_wrong_parameters_are_an_error_that_names_the_task(parameters: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="max-digit"):
        make_task("max-digit", 0, parameters)


def test_an_installed_package_adds_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "rollout.tasks.digits:MaxDigit", registry.ENTRY_POINTS)
    broken = EntryPoint("broken", "no.such.module:Task", registry.ENTRY_POINTS)
    points = {"theirs": point, "broken": broken}

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "lagrange.tasks"
        return [p for n, p in points.items() if name in (None, n)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert isinstance(make_task("theirs", 0, {"digits": 5}), MaxDigit)
    assert "theirs" in task_names()
    with pytest.raises(ConfigError, match="does not import"):
        make_task("broken", 0)


@pytest.mark.parametrize(("text", "ids"), [("", ()), ("a", (1,))])
def test_a_prompt_has_exactly_one_of_text_and_ids(text: str, ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Prompt(text=text, ids=ids)


def test_rollouts_and_tasks_do_not_import_torch() -> None:
    code = "import sys, rollout.main, rollout.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
