"""`reasoning-gym`: any generator of the package reasoning-gym, by its name and parameters.

Invariant: prompt `index` is item `index` of a data set of the run's seed; the generators derive each item from seed and
index, so it is the same everywhere. The score is the generator's own, in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.tasks.answers import extract, optional_module
from rollout.tasks.parameters import Positive
from rollout.tasks.source import with_instruction
from rollout.tasks.types import Prompt, Response

SIZE = 100_000  # a few generators (gsm_symbolic) make a list of this length at the start
INSTRUCTION = "{prompt}\nGive your final answer between <answer> and </answer>."


class ReasoningGym:
    """generator: such as chain_sum or gsm_symbolic. parameters: of its configuration. size: items before they repeat.

    chat, instruction, system: as of the data-set tasks. extract: rules that find the answer (answers.extract).
    """

    isolated = True

    def __init__(
        self,
        seed: int,
        generator: str,
        name: str = "reasoning-gym",
        parameters: Mapping[str, Any] | None = None,
        size: Positive = SIZE,
        chat: bool = True,
        instruction: str = INSTRUCTION,
        system: str = "",
        extract: tuple[Any, ...] = ("tag", "boxed", "line", "all"),
    ) -> None:
        package = optional_module("reasoning_gym", "reasoning-gym", "requirements/reasoning-gym.txt")
        try:
            self._items = package.create_dataset(generator, size=size, seed=seed, **(parameters or {}))
        except Exception as error:  # it raises bare errors and assertions of many kinds
            raise ValueError(f"generator {generator!r}: {type(error).__name__}: {error}") from error
        self.name, self._generator, self._size = name, generator, size
        self._chat, self._instruction, self._system, self._rules = chat, instruction, system, tuple(extract)

    def prompt(self, index: int) -> Prompt:
        """Item index of the generator."""
        item = self._items[index % self._size]
        text = with_instruction(str(item["question"]), self._instruction)
        metadata = {"index": index % self._size}
        if not self._chat:
            return Prompt(text=text, metadata=metadata, source=self._generator)
        system = ({"role": "system", "content": self._system},) if self._system else ()
        return Prompt(messages=(*system, {"role": "user", "content": text}), metadata=metadata, source=self._generator)

    def reward(self, prompt: Prompt, response: Response) -> float:
        """The generator's score of the answer that was found."""
        item = self._items[prompt.metadata["index"]]
        return float(self._items.score_answer(extract(response.text, self._rules), item))
