"""Prompts of JSON-lines files: read, filtered, ordered, mixed. What every data-set task is built on.

Invariant: `Source.row` is a pure function of the index; all files are read and checked when the task is made, so a
malformed row is known before the first sample is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads that of typing from Python 3.12 on

from rollout.datasets import BadRow, FiniteMixture, Mixture, Rows, read_rows, row_of
from rollout.datasets.rows import Malformed
from rollout.datasets.rows import field as value_at
from rollout.tasks.answers import check_reference
from rollout.tasks.parameters import Positive, Share
from rollout.tasks.types import Message, Prompt

# Names of prompt and answer as the data sets of the field are published; the first that a row has counts.
PROMPT_FIELDS = ("prompt", "problem", "Problem", "question", "messages")
ANSWER_FIELDS = ("answer", "Answer", "reward_model.ground_truth", "ground_truth", "solution", "Solution")
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
PLACEHOLDER = "{prompt}"
Order = Literal["shuffled", "file", "easy-first"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row that can be used. content: text, or messages. extra: further fields that the reward asked for."""

    content: str | tuple[Message, ...]
    answer: str
    extra: dict[str, Any]
    pass_rate: float | None


class OneSource(TypedDict, total=False):
    """One of several files. weight: its share of the prompts, in any unit; by default its number of rows."""

    path: str
    name: str
    weight: Annotated[float, Field(gt=0)]
    prompt_field: str | None
    answer_field: str | None


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Parameters that all data-set tasks share; docs/add-a-task.md has one line on each."""

    path: str = ""
    sources: Sequence[OneSource] = ()
    prompt_field: str | None = None
    answer_field: str | None = None
    instruction: str = ""
    system: str = ""
    chat: bool = True
    order: Order = "shuffled"
    epochs: Positive | None = None
    malformed: Malformed = "error"
    pass_rate_field: str | None = None
    pass_rate: tuple[Share, Share] = (0.0, 1.0)
    limit: Positive | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one task; make it with `Source.of`."""

    settings: SourceSettings
    seed: int
    names: tuple[str, ...]
    files: tuple[Rows[Row], ...]
    mixture: Mixture | FiniteMixture
    skipped: int = 0

    @classmethod
    def of(cls, settings: SourceSettings, seed: int, extra: Sequence[str] = ()) -> Source:
        """Read all files. extra: fields that a row must have besides prompt and answer. Raises BadRow, ValueError."""
        if bool(settings.path) == bool(settings.sources):
            raise ValueError("set exactly one of path and sources")
        if settings.order not in ("shuffled", "file", "easy-first"):
            raise ValueError(f"order is {settings.order!r}, expected shuffled, file or easy-first")
        if settings.order == "easy-first" and not settings.pass_rate_field:
            raise ValueError("order: easy-first needs pass_rate_field, the row's field with its pass rate")
        files, names, weights = [], [], []
        alone: OneSource = {"path": settings.path}
        for one in settings.sources or (alone,):
            unknown = set(one) - {"path", "name", "weight", "prompt_field", "answer_field"}
            if unknown or "path" not in one:
                raise ValueError(f"a source has path, name, weight, prompt_field and answer_field, not {dict(one)}")
            path = Path(str(one["path"]))
            read = _reader(
                one.get("prompt_field", settings.prompt_field),
                one.get("answer_field", settings.answer_field),
                settings,
                tuple(extra),
            )
            rows = read_rows(path, read, malformed=settings.malformed)
            if settings.order == "easy-first":
                ordered = sorted(rows.rows, key=lambda row: -(row.pass_rate or 0.0))
                rows = Rows(rows.path, tuple(ordered), rows.skipped)
            files.append(Rows(rows.path, rows.rows[: settings.limit], rows.skipped))
            names.append(str(one.get("name", path.stem)))
            weights.append(float(one.get("weight", len(rows.rows))))
        mixture: Mixture | FiniteMixture
        mixture = endless = Mixture.of(weights, seed)
        if settings.epochs is not None:
            mixture = FiniteMixture.of(endless, [settings.epochs * len(rows.rows) for rows in files])
        return cls(settings, seed, tuple(names), tuple(files), mixture, sum(rows.skipped for rows in files))

    @property
    def rows(self) -> int:
        """Rows that can be used, over all files."""
        return sum(len(rows.rows) for rows in self.files)

    @property
    def prompts(self) -> int | None:
        """Prompts until the last epoch has ended; None: there is no end."""
        return None if self.settings.epochs is None else self.settings.epochs * self.rows

    def row(self, index: int) -> tuple[str, Row]:
        """The source's name and the row of a prompt's index. Raises IndexError after the last epoch."""
        try:
            which, at = self.mixture.place(index)
        except IndexError:
            names = ", ".join(self.names)
            raise IndexError(f"{self.settings.epochs} epochs of {names} end before prompt {index}") from None
        rows = self.files[which].rows
        shuffle = self.settings.order == "shuffled"
        return self.names[which], rows[row_of(at, len(rows), self.seed + which, shuffle=shuffle)]

    def prompt(self, index: int) -> Prompt:
        """The prompt of an index, with the answer in its metadata."""
        name, row = self.row(index)
        metadata = {"answer": row.answer, **row.extra}
        if isinstance(row.content, tuple):
            return Prompt(messages=(*self._system(), *row.content), metadata=metadata, source=name)
        text = with_instruction(row.content, self.settings.instruction)
        if not self.settings.chat:
            return Prompt(text=text, metadata=metadata, source=name)
        user: Message = {"role": "user", "content": text}
        return Prompt(messages=(*self._system(), user), metadata=metadata, source=name)

    def _system(self) -> tuple[Message, ...]:
        return ({"role": "system", "content": self.settings.system},) if self.settings.system else ()


def with_instruction(text: str, instruction: str) -> str:
    """The instruction after the text, or around it if it has the placeholder {prompt}."""
    if PLACEHOLDER in instruction:
        return instruction.replace(PLACEHOLDER, text)
    return f"{text}\n{instruction}" if instruction else text


def _reader(
    prompt_field: str | None, answer_field: str | None, settings: SourceSettings, extra: tuple[str, ...]
) -> Callable[[Mapping[str, Any]], Row | None]:
    low, high = settings.pass_rate

    def read(row: Mapping[str, Any]) -> Row | None:
        rate = None
        if settings.pass_rate_field:
            rate = float(value_at(row, settings.pass_rate_field))
            if not low <= rate <= high:
                return None
        content = _first(row, (prompt_field,) if prompt_field else PROMPT_FIELDS, "prompt")
        answer = _first(row, (answer_field,) if answer_field else ANSWER_FIELDS, "answer") if not extra else ""
        wanted = {name: value_at(row, name) for name in extra}
        if isinstance(content, list):
            content = tuple(_message(one) for one in content)
        elif not isinstance(content, str):
            raise TypeError(f"the prompt is {type(content).__name__}, expected text or a list of messages")
        if not content or (isinstance(content, str) and not content.strip()):
            raise ValueError("the prompt is empty")
        return Row(content, check_reference(str(answer)) if not extra else "", wanted, rate)

    return read


def _message(one: Any) -> Message:
    if not isinstance(one, Mapping) or not isinstance(one.get("role"), str) or not isinstance(one.get("content"), str):
        raise TypeError("a message is an object of role and content")
    return {"role": one["role"], "content": one["content"]}


def _first(row: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    for name in names:
        try:
            found = value_at(row, name)
        except KeyError:
            continue
        if found is not None:
            return found
    raise KeyError(f"there is no {what}: none of the fields {', '.join(names)}")


__all__ = ["BOXED", "BadRow", "Row", "Source", "SourceSettings", "with_instruction"]
