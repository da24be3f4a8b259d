"""Puts the messages of a streamed answer together, and says what can be kept of one that broke off. Pure.

Invariant: a token is kept only if it arrived with its log-prob and every message of its sample so far named the same
version and agreed with the ones before; so nothing is kept that a whole answer would not have said.

In SGLang 0.5.23 a message that is not the last of its sample has output_ids, output_token_logprobs, completion_tokens
and the name of the engine's weights (weight_version); weight_versions and routed_experts are in the last one alone.
The name is that of every token in it: weight-sync's pauses leave no request running while weights are loaded. Ids
and log-probs are all so far, or with --incremental-streaming-output those that are new. Samples of a batch have an
`index`. Routes come too late to be kept: where they are needed, `parse_sample` refuses what broke off without them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PREFIX, END = "data:", "[DONE]"


class BadMessage(Exception):
    """A line of the stream is no message, or contradicts those before it."""


class ErrorMessage(Exception):
    """The engine sent an error in place of an answer. code: as of an HTTP status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class Arriving:
    """One sample so far. version: what all messages named, "" if they differ. last: its last message, made whole."""

    ids: list[Any] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)
    version: str | None = None
    last: dict[str, Any] | None = None

    def add(self, message: dict[str, Any]) -> None:
        """The next message. Raises BadMessage, and forgets the sample, if it contradicts those before."""
        try:
            meta = message["meta_info"]
            total, version = int(meta["completion_tokens"]), str(meta["weight_version"])
            self.ids = _extended(self.ids, message["output_ids"], total)
            self.log_probs = _extended(self.log_probs, meta["output_token_logprobs"], total)
            if meta["finish_reason"] is not None:
                self.last = {"output_ids": self.ids, "meta_info": {**meta, "output_token_logprobs": self.log_probs}}
        except (LookupError, TypeError, ValueError) as error:
            self.ids, self.log_probs = [], []
            raise BadMessage(f"a message of a stream: {error!r}") from error
        self.version = version if self.version in (None, version) else ""

    def answer(self) -> dict[str, Any] | None:
        """What /generate would have answered: the whole, or what arrived as if it had been aborted; None: nothing."""
        if self.last is not None or not self.ids:
            return self.last
        meta = {
            "finish_reason": {"type": "abort"},
            "output_token_logprobs": self.log_probs,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(self.ids)}],
        }
        return {"output_ids": self.ids, "meta_info": meta}


class Arrivals:
    """The samples of one streamed request."""

    def __init__(self, n: int) -> None:
        self.samples = [Arriving() for _ in range(n)]

    @property
    def complete(self) -> bool:
        """Whether every sample has its last message."""
        return all(sample.last is not None for sample in self.samples)

    def add(self, line: str) -> None:
        """One line of the body. Raises BadMessage, ErrorMessage."""
        if not line.startswith(PREFIX) or (text := line.removeprefix(PREFIX).strip()) == END:
            return
        try:
            message = json.loads(text)
            said = message.get("error")
            if said is not None:
                raise ErrorMessage(int(said["code"]), str(said["message"]))
            sample = self.samples[message.get("index", 0)]
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise BadMessage(f"a line of a stream is no message: {error!r}") from error
        sample.add(message)


def _extended(have: list[Any], given: Sequence[Any], total: int) -> list[Any]:
    if len(given) >= total and list(given[: len(have)]) == have:
        return list(given[:total])  # the lists may have grown since the count beside them was taken
    if len(given) == total - len(have):
        return [*have, *given]
    raise ValueError(f"{len(given)} entries of {total} do not go on after {len(have)}")
