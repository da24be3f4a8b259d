"""Answers are found in what models write, and compared as people would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.load import ConfigError
from rollout.tasks import Prompt, Response, answers, make_task
from rollout.tasks.answers import boxed, check_reference, extract, same_choice
from rollout.tasks.data_set import last_block

PUBLISHED = {
    "dapo-math-17k": {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "Solve it. The last line is Answer: $Answer"}],
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    },
    "gsm8k": {"question": "How many?", "answer": "There are <<17*2=34>>34.\n#### 34"},
    "math": {"problem": "Find x.", "solution": "So $x=\\boxed{34}$.", "level": "Level 1", "type": "Algebra"},
    "aime24": {"ID": "2024-I-1", "Problem": "Find it.", "Solution": "...", "Answer": 34},
}


def said(text: str) -> Response:
    return Response(text=text, ids=(), finish="stop")


@pytest.mark.parametrize("name", PUBLISHED)
def test_data_sets_are_read_as_they_are_published(tmp_path: Path, name: str) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(PUBLISHED[name]))
    task = make_task(name, 0, {"path": str(path)})
    prompt = task.prompt(0)
    assert (task.name, prompt.metadata["answer"], prompt.source) == (name, "34", "rows")
    assert prompt.messages[-1]["role"] == "user"
    assert task.reward(prompt, said("<think>35?</think> so\n\\boxed{34}")) == 1.0
    assert task.reward(prompt, said("I think\nAnswer: 34")) == 1.0
    assert task.reward(prompt, said("\\boxed{35}")) == 0.0
    assert task.reward(prompt, said("")) == 0.0


HARD = [json.loads(line) for line in Path(__file__).with_name("hard_answers.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("kind", sorted({row["kind"] for row in HARD}))
def test_hard_formats_are_judged_by_their_mathematics(kind: str) -> None:
    pytest.importorskip("math_verify")
    wrong = [
        row
        for row in HARD
        if row["kind"] == kind
        and answers.same_mathematics(row["response"], check_reference(row["answer"])) is not row["right"]
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("The answer is (B).", "B"),
        ("Answer: B", "B"),
        ("**Answer:** B", "B"),
        (r"so \boxed{\text{B}}", "B"),
        ("A is wrong.\nAnswer: C", "C"),
        ("<think>Answer: A</think>Answer: D", "D"),
        ("Answer: Z", None),
        ("no idea", None),
    ],
)
def test_a_choice_is_found(text: str, chosen: str | None) -> None:
    assert [letter for letter in "ABCD" if same_choice(text, letter, 4)] == ([chosen] if chosen else [])


@pytest.mark.parametrize(
    ("text", "inner"), [(r"\boxed{a{b}c}", "a{b}c"), (r"\boxed{1} \boxed{2}", "2"), (r"\boxed{1", None), ("", None)]
)
def test_braces_of_a_box_are_balanced(text: str, inner: str | None) -> None:
    assert boxed(text) == inner


def test_rules_are_tried_in_order() -> None:
    assert extract("<answer>7</answer>", ("boxed", "tag")) == "7"
    assert extract("it is 1,234.5 or so", ("last-number",)) == "1,234.5"
    assert extract("nothing", ("boxed", "tag", "line", "last-number")) is None


def test_a_package_that_is_missing_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"requirements/tasks\.txt"):
        answers.optional_module("no_such_module", "no-such-package", "requirements/tasks.txt")


def test_exact_and_function_tasks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "capital?", "answer": "Paris"}))
    exact = make_task("exact-jsonl", 0, {"path": str(path), "extract": ["tag", "all"]})
    assert exact.reward(exact.prompt(0), said("<answer> paris. </answer>")) == 1.0
    assert exact.reward(exact.prompt(0), said("London")) == 0.0
    where = "tests.tasks.test_answers:length_of"
    function = make_task("function-jsonl", 0, {"path": str(path), "function": where})
    assert function.reward(function.prompt(0), said("abc")) == 3.0
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_task("function-jsonl", 0, {"path": str(path), "function": "tests.tasks.nothing:f"})


def length_of(text: str, _answer: str, _metadata: dict[str, object]) -> float:
    return float(len(text))


def test_the_last_block_of_a_response_is_its_program() -> None:
    assert last_block("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```") == "y = 2\n"
    assert last_block("no block") == ""


def test_a_prompt_may_be_messages_alone() -> None:
    assert Prompt(messages=({"role": "user", "content": "x"},)).text == ""
    with pytest.raises(ValueError, match="exactly one"):
        Prompt(text="x", messages=({"role": "user", "content": "x"},))
