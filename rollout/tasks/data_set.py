"""Tasks on JSON-lines files: mathematics, multiple choice, exact answers, programs, one's own function, a service.

Invariant: rewards are 0 or 1 unless a task says otherwise; every task here is `isolated`, except the service: its
verifier runs in a process that is killed when it hangs.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, ClassVar

from rollout.rewards.programs import Limits, run_program
from rollout.rewards.service import Service
from rollout.tasks.answers import extract, math_verifier, same_choice, same_mathematics, same_text
from rollout.tasks.own_code import load_function
from rollout.tasks.parameters import Positive, Seconds, check_parameters
from rollout.tasks.source import BOXED, Source, SourceSettings
from rollout.tasks.types import NoReward, Prompt, Response

SHARED = frozenset(f.name for f in fields(SourceSettings))


class DataSetTask(ABC):
    """What the tasks below share: prompts of a Source. parameters: SourceSettings and the task's own."""

    isolated = True
    extra_fields: tuple[str, ...] = ()
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, seed: int, name: str, **parameters: Any) -> None:
        shared = {**self.defaults, **parameters}
        unknown = set(shared) - SHARED
        if unknown:
            raise TypeError(f"unknown: {', '.join(sorted(unknown))}. There are {', '.join(sorted(SHARED))}")
        check_parameters(SourceSettings, shared)
        self.name = name
        self.source = Source.of(SourceSettings(**shared), seed, self.extra_fields)

    def prompt(self, index: int) -> Prompt:
        """See Source."""
        return self.source.prompt(index)

    @abstractmethod
    def reward(self, prompt: Prompt, response: Response) -> float:
        """Each task has its own."""


class Mathematics(DataSetTask):
    """`math-jsonl`: a final answer that math-verify compares; `instruction` asks for \\boxed{}."""

    defaults: ClassVar[Mapping[str, Any]] = {"instruction": BOXED}

    def __init__(self, seed: int, name: str = "math-jsonl", **parameters: Any) -> None:
        math_verifier()
        super().__init__(seed, name, **parameters)

    def reward(self, prompt: Prompt, response: Response) -> float:
        """1 if the answer is mathematically that of the row."""
        return float(same_mathematics(response.text, prompt.metadata["answer"]))


class MultipleChoice(DataSetTask):
    """`choice-jsonl`: the row's answer is a letter."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "instruction": 'Answer with the letter of the right choice alone, in the form "Answer: X".'
    }

    def __init__(self, seed: int, name: str = "choice-jsonl", choices: Positive = 26, **parameters: Any) -> None:
        self._choices = choices
        super().__init__(seed, name, **parameters)

    def reward(self, prompt: Prompt, response: Response) -> float:
        """1 if the response chooses the row's letter."""
        return float(same_choice(response.text, prompt.metadata["answer"], self._choices))


class Exact(DataSetTask):
    """`exact-jsonl`: the answer, but for case and spaces. extract: rules by which it is found (answers.extract)."""

    def __init__(
        self, seed: int, name: str = "exact-jsonl", extract: tuple[Any, ...] = ("all",), **parameters: Any
    ) -> None:
        self._rules = tuple(extract)
        unknown = set(self._rules) - {"boxed", "line", "tag", "last-number", "all"}
        if unknown:
            raise ValueError(f"extract: unknown {', '.join(sorted(map(str, unknown)))}")
        super().__init__(seed, name, **parameters)

    def reward(self, prompt: Prompt, response: Response) -> float:
        """1 if they are the same."""
        return float(same_text(extract(response.text, self._rules), prompt.metadata["answer"]))


class Function(DataSetTask):
    """`function-jsonl`: a function of one's own by its dotted name, (text, answer, metadata) -> float."""

    def __init__(self, seed: int, function: str, name: str = "function-jsonl", **parameters: Any) -> None:
        self._function = load_function(function)
        super().__init__(seed, name, **parameters)

    def reward(self, prompt: Prompt, response: Response) -> float:
        """What the function gives."""
        return float(self._function(response.text, prompt.metadata["answer"], prompt.metadata))


class Programs(DataSetTask):
    """`code-jsonl`: a Python program that is run on the row's `tests`, [{"input": ..., "output": ...}, ...].

    timeout_s, memory_mb: of one run. partial: the share of tests that pass, else all or nothing.
    """

    extra_fields = ("tests",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "instruction": "Write a Python program that reads standard input, in one ```python block."
    }

    def __init__(
        self,
        seed: int,
        name: str = "code-jsonl",
        timeout_s: Seconds = 2.0,
        memory_mb: Positive = 512,
        partial: bool = False,
        **parameters: Any,
    ) -> None:
        self._limits, self._partial = Limits(timeout_s=timeout_s, memory_mb=memory_mb), partial
        super().__init__(seed, name, **parameters)

    def reward(self, prompt: Prompt, response: Response) -> float:
        """Tests passed."""
        tests = prompt.metadata["tests"]
        program = last_block(response.text)
        if not program or not tests:
            return 0.0
        passed = 0
        for test in tests:
            result = run_program(program, str(test["input"]), self._limits)
            right = result.exit_code == 0 and same_output(result.output, str(test["output"]))
            if not right and not self._partial:
                return 0.0
            passed += right
        return passed / len(tests)


class ServiceTask(DataSetTask):
    """`service-jsonl`: rewards come from an HTTP service, in batches (rollout/rewards/service.py).

    token_variable: the environment variable that holds its bearer token.
    """

    isolated = False

    def __init__(
        self,
        seed: int,
        url: str,
        name: str = "service-jsonl",
        timeout_s: Seconds = 30.0,
        tries: Positive = 3,
        batch: Positive = 64,
        in_flight: Positive = 4,
        token_variable: str = "LAGRANGE_REWARD_TOKEN",
        **parameters: Any,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}, expected http:// or https://")
        token = os.environ.get(token_variable) or None
        self.service = Service(url, timeout_s, tries, batch, in_flight=in_flight, token=token)
        super().__init__(seed, name, **parameters)

    def reward(self, prompt: Prompt, response: Response) -> float:
        """Not used: the judge asks the service."""
        raise NoReward("the rewards of this task come from its service")


def last_block(text: str) -> str:
    """The last fenced block of a response, without its fence and language; "" if there is none."""
    parts = text.split("```")
    if len(parts) < 3:
        return ""
    block = parts[-2] if len(parts) % 2 else parts[-3] if len(parts) > 3 else ""
    first, newline, rest = block.partition("\n")
    return rest if newline and (first.strip().isalnum() or not first.strip()) else block


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are the same but for spaces at line ends and blank lines at the end."""
    lines = [[line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected)]
    return lines[0] == lines[1]
