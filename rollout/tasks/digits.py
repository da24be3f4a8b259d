"""Three tasks on a few random digits: small enough to be learned on a CPU, and their best answer is known.

Invariant: prompts use the characters `0-9 > < =` alone, which every tokenizer of this project has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rollout.tasks.types import Prompt, Response

Digits = Annotated[int, Field(ge=1, le=64)]


@dataclass(frozen=True, slots=True)
class MaxDigit:
    """`max-digit`: "371>" is to be answered by the largest digit, "7". Reward: 1 for that, 1/2 if text follows it."""

    seed: int
    digits: Digits = 3
    name: str = "max-digit"

    def prompt(self, index: int) -> Prompt:
        """Random digits and ">"."""
        digits = _digits(self.name, self.seed, index, self.digits)
        return Prompt(text=f"{digits}>", metadata={"answer": max(digits)})

    def reward(self, prompt: Prompt, response: Response) -> float:
        """1.0 for the answer; with rollout.max_new_tokens = 1 there is nothing between that and 0.0."""
        return fraction_correct(response.text, prompt.metadata["answer"])


@dataclass(frozen=True, slots=True)
class Reverse:
    """`reverse`: "371<" is to be answered by the digits in reverse, "173". Reward: share of places that are right."""

    seed: int
    digits: Digits = 3
    name: str = "reverse"

    def prompt(self, index: int) -> Prompt:
        """Random digits and "<"."""
        digits = _digits(self.name, self.seed, index, self.digits)
        return Prompt(text=f"{digits}<", metadata={"answer": digits[::-1]})

    def reward(self, prompt: Prompt, response: Response) -> float:
        """Share of places with the right digit, in [0, 1]; text past the answer's length counts as wrong."""
        return fraction_correct(response.text, prompt.metadata["answer"])


@dataclass(frozen=True, slots=True)
class Copy:
    """`copy`: "371=" is to be answered by the same digits, "371". Reward: share of the places that are right."""

    seed: int
    digits: Digits = 3
    name: str = "copy"

    def prompt(self, index: int) -> Prompt:
        """Random digits and "="."""
        digits = _digits(self.name, self.seed, index, self.digits)
        return Prompt(text=f"{digits}=", metadata={"answer": digits})

    def reward(self, prompt: Prompt, response: Response) -> float:
        """Share of places with the right digit, in [0, 1]; text past the answer's length counts as wrong."""
        return fraction_correct(response.text, prompt.metadata["answer"])


def fraction_correct(text: str, answer: str) -> float:
    """Share of places that `text` has right, in [0, 1]; 1 only for exactly `answer`. Characters past its end are wrong.

    Even a policy that never ends its responses has something to learn from: otherwise ending and answering would have
    to be found at once, which with 32 tokens happens once in a thousand samples.
    """
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return right / max(len(text), len(answer))


def _digits(name: str, seed: int, index: int, count: int) -> str:
    # A source of its own for each prompt: any worker can make any prompt without the ones before it.
    source = random.Random(f"{name}/{seed}/{index}")
    return "".join(source.choice("0123456789") for _ in range(count))
