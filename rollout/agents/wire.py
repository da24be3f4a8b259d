"""What an OpenAI client sends and gets: POST /v1/chat/completions, GET /v1/models. Pure.

Invariant: a request that would be sampled otherwise than the trainer assumes (another temperature, top_p, stop texts)
or that this endpoint does not carry out (tools, streaming, n) is refused with the field's name, never half done.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.agents.transcript import Said

MODEL = "policy"


class Refused(Exception):
    """A call that is not answered. status: of HTTP; code: a stable word."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class Part(BaseModel):
    """A piece of a message's content."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. What a client repeats of our answers (refusal, annotations) comes empty and means nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[Any] | None = Field(None, max_length=0)

    def said(self) -> Said:
        """Role and text."""
        parts = self.content if isinstance(self.content, list) else []
        return self.role, "".join(part.text for part in parts) if parts else str(self.content or "")


class ChatRequest(BaseModel):
    """The fields that are carried out; others are refused."""

    model_config = ConfigDict(extra="forbid")
    model: str = MODEL
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: Literal[1] | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def limit(self) -> int | None:
        """Most new tokens, if the client says so."""
        return self.max_completion_tokens or self.max_tokens


def read_request(body: bytes, temperature: float) -> ChatRequest:
    """A request. temperature: the run's, which the trainer divides its logits by. Raises Refused."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(400, "unsupported", f"{where}: {first['msg']}. See docs/agents.md.") from error
    if request.temperature is not None and request.temperature != temperature:
        raise Refused(
            400,
            "temperature",
            f"temperature is {request.temperature:g}, but the run trains at rollout.temperature = {temperature:g}. "
            "Leave it out.",
        )
    return request


def completion(text: str, finish: str, prompt_tokens: int, tokens: int, number: str) -> dict[str, Any]:
    """The answer to a call."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        },
    }


def models() -> dict[str, Any]:
    """The answer of /v1/models: whatever name a client gives, it gets the policy."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "lagrange"}]}
