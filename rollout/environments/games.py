"""Two environments that a tiny model can do: guess a number, and use a calculator.

Invariant: both use the characters `0-9 > < =` alone, which the tiny model's tokenizer has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rollout.environments.types import Environment, Step
from rollout.tasks.parameters import Positive
from rollout.tasks.types import Prompt, Response


@dataclass(slots=True)
class _Guessing:
    number: int

    def reset(self) -> str:
        return ""

    def step(self, text: str) -> Step:
        """The answer ">": the number is larger than the guess; "<": it is smaller, or this was no digit."""
        digit = text[:1]
        if not digit.isdigit():
            return Step("<")
        if int(digit) == self.number:
            return Step(reward=1.0, done=True)
        return Step(">" if int(digit) < self.number else "<")


@dataclass(frozen=True, slots=True)
class GuessNumber:
    """`guess-number`: a digit is guessed in at most `turns` turns; the answers are "higher" (>) and "lower" (<)."""

    seed: int
    turns: Positive = 4
    name: str = "guess-number"

    def prompt(self, index: int) -> Prompt:
        """One "=" and nothing else: the number is hidden, and a function of seed and index."""
        number = random.Random(f"{self.name}/{self.seed}/{index}").randrange(10)
        return Prompt(text="=", metadata={"number": number})

    def environment(self, prompt: Prompt) -> Environment:
        """One round."""
        return _Guessing(prompt.metadata["number"])

    def reward(self, prompt: Prompt, response: Response) -> float:
        """Of a single turn, for an evaluation without turns."""
        return _Guessing(prompt.metadata["number"]).step(response.text).reward


@dataclass(slots=True)
class _Calculating:
    digits: str
    asked: bool = False

    def reset(self) -> str:
        return ""

    def step(self, text: str) -> Step:
        """A turn that begins with "=" asks the calculator; any other is the answer."""
        total = str(sum(map(int, self.digits)))
        if text[:1] == "=" and not self.asked:
            self.asked = True
            return Step(f"{total}>")
        return Step(reward=float(text == total), done=True)


@dataclass(frozen=True, slots=True)
class Calculator:
    """`calculator`: "37<" asks for the sum of two digits; a turn "=" calls a tool that says it, the next repeats it."""

    seed: int
    turns: Positive = 2
    name: str = "calculator"

    def prompt(self, index: int) -> Prompt:
        """Two digits and "<"."""
        source = random.Random(f"{self.name}/{self.seed}/{index}")
        digits = f"{source.randrange(10)}{source.randrange(10)}"
        return Prompt(text=f"{digits}<", metadata={"digits": digits})

    def environment(self, prompt: Prompt) -> Environment:
        """One question."""
        return _Calculating(prompt.metadata["digits"])

    def reward(self, prompt: Prompt, response: Response) -> float:
        """Of a single turn, for an evaluation without turns."""
        return _Calculating(prompt.metadata["digits"], asked=True).step(response.text).reward
