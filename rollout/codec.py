"""The model's tokenizer, read from the checkpoint's tokenizer.json.

Invariant: encoding adds no special tokens that the text does not name; decoding leaves them out unless asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from configs.load import ConfigError
from rollout.tasks.chat import ChatError, read_template


class Codec(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of token ids, without special tokens unless `special`."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Messages as the text that the model's chat template makes of them. Raises ChatError."""


class FileCodec:
    """A `Codec` of a tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        """folder: of the checkpoint. Raises ConfigError if its tokenizer.json cannot be read."""
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"model.path: {path} cannot be read ({error}). A checkpoint needs its tokenizer.json."
            ) from error
        self._template = read_template(folder)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """See Codec."""
        if self._template is None:
            raise ChatError("the model has no chat template. Set task.parameters.chat: false, or use a chat model.")
        return self._template.render(messages)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of token ids, without special tokens unless `special`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)
