"""The model's chat template, rendered as its authors' own library does it.

Invariant: a template comes from a downloaded checkpoint, so it runs in jinja2's immutable sandbox; what it refuses
(`raise_exception`) and what it lacks comes out as one ChatError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollout.tasks.types import Message


class ChatError(ValueError):
    """Messages that cannot be rendered for this model."""


class ChatTemplate:
    """A checkpoint's chat template; make it with `read_template`."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        """source: jinja text. special: bos_token, eos_token, ... as the template names them."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template is not valid: {error}") from error
        self._special = special

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt's text, which ends where the assistant begins. variables: such as enable_thinking=False."""
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **self._special, **variables
            )
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template refuses the messages: {error}") from error


def read_template(folder: Path) -> ChatTemplate | None:
    """The template in chat_template.jinja or tokenizer_config.json of a checkpoint; None if it has none."""
    config: dict[str, Any] = {}
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ChatError(f"{folder}/tokenizer_config.json cannot be read: {error}") from error
    source: Any = config.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: _token(config[name]) for name in names if config.get(name) is not None}
    return ChatTemplate(source, special)


def _token(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
