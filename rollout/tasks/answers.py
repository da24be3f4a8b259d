"""Finds the answer in a response, and compares it. Pure; math-verify is imported when it is needed.

Invariant: a response without an answer is wrong, never an error; what is wrong with the reference answer of a row is
found when the rows are read (`check_reference`), not when a response is judged.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from configs.load import ConfigError

LAST_LINE = re.compile(r"(?im)^[^\S\n]*(?:[*_#>\s]*)(?:final\s+)?answer\s*(?:is)?\s*[*_]*\s*[:=]\s*[*_]*\s*(.+?)\s*$")
CHOICE = re.compile(r"(?i)answer\s*(?:is)?\s*[:=]?\s*[*_$\\a-z{]*?\(?\b([A-Z])\b\)?")
ALONE = re.compile(r"^[\s*_(]*([A-Z])[*_).:]*\s*$")
THOUSANDS = re.compile(r"(?<=\d)\\[,!;:](?=\d{3}(?!\d))")  # 10\,000, which math-verify reads as a product
Rule = Literal["boxed", "line", "tag", "last-number", "all"]


def after_thinking(text: str) -> str:
    """What follows the reasoning of a thinking model; all of it if it does not think."""
    return text.rpartition("</think>")[2]


def boxed(text: str) -> str | None:
    """Content of the last \\boxed{...} or \\fbox{...}, braces balanced; None if there is none."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
    return None


def extract(text: str, rules: tuple[Rule, ...] = ("boxed", "tag", "line")) -> str | None:
    """The answer by the first rule that finds one, after the reasoning; None if none does.

    boxed: the last \\boxed{}; tag: <answer>...</answer>; line: the last "Answer: ..."; last-number; all: the text.
    """
    text = after_thinking(text)
    finders: Mapping[str, Callable[[str], str | None]] = {
        "boxed": boxed,
        "tag": lambda t: _last(re.findall(r"(?s)<answer>(.*?)</answer>", t)),
        "line": lambda t: _last(LAST_LINE.findall(t)),
        "last-number": lambda t: _last(re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?", t)),
        "all": lambda t: t,
    }
    for rule in rules:
        found = finders[rule](text)
        if found is not None and found.strip():
            return found.strip()
    return None


def same_text(found: str | None, reference: str) -> bool:
    """Whether two answers are the same but for case, spaces and a full stop at the end."""
    return found is not None and _plain(found) == _plain(reference)


def same_choice(text: str, reference: str, choices: int = 26) -> bool:
    """Whether a response chooses the letter `reference`: boxed, tagged, "Answer: B", "the answer is (B)", or "B" alone.

    choices: how many letters there are; a response that names another letter chooses none.
    """
    text = after_thinking(text)
    found = extract(text, ("boxed", "tag", "line"))
    letter = None
    for candidate in (found, text):
        if candidate is None:
            continue
        match = ALONE.match(re.sub(r"\\text\{(.*?)\}", r"\1", candidate)) or re.match(
            r"^\s*\(?([A-Z])[).:]\s", candidate
        )
        letter = match.group(1) if match else _last(CHOICE.findall(candidate))
        if letter:
            break
    return letter is not None and letter.upper() == reference.strip().upper() and ord(letter.upper()) - 65 < choices


def same_mathematics(text: str, reference: str) -> bool:
    """Whether math-verify holds the answer in `text` for equal to `reference`. Only for the main thread of a process.

    The answer is the last \\boxed{}, <answer> tag or "Answer:" line; a response without any of these is searched for
    its last expression, as math-verify does. No time limit of its own: the reward's process has one.
    """
    verifier = math_verifier()
    found = extract(text)
    candidate = f"\\boxed{{{found}}}" if found is not None else after_thinking(text)
    expected = verifier.parse(_written_out(f"\\boxed{{{reference}}}"), parsing_timeout=None)
    given = verifier.parse(_written_out(candidate), parsing_timeout=None)
    if not expected or not given:
        return same_text(found, reference)
    return bool(verifier.verify(expected, given, timeout_seconds=None)) or same_text(found, reference)


def math_verifier() -> Any:
    """The module math_verify. Raises ConfigError if it is not installed."""
    return optional_module("math_verify", "math-verify", "requirements/tasks.txt")


def optional_module(name: str, package: str, requirements: str) -> Any:
    """Import a package that slim images lack. Raises ConfigError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"task: this task needs {package}, which is not installed ({error}). "
            f"Install it: pip install -r {requirements}, or lagrange-rl[tasks]."
        ) from error


def check_reference(answer: str) -> str:
    """A reference answer as it is compared: GSM8K's after ####, MATH's out of \\boxed{}. Raises ValueError if empty."""
    if "####" in answer:
        answer = answer.rpartition("####")[2].replace(",", "")
    elif (inner := boxed(answer)) is not None:
        answer = inner
    if not answer.strip():
        raise ValueError("the answer is empty")
    return answer.strip()


def _written_out(text: str) -> str:
    """What math-verify does not read, in a form that it does."""
    return THOUSANDS.sub("", text).replace("\\varnothing", "\\emptyset")


def _last(found: list[str]) -> str | None:
    return found[-1] if found else None


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip().strip("$").rstrip(".").strip()).casefold()
