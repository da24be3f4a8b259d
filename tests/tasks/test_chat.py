"""Chat templates are rendered as transformers renders them, in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.tasks.chat import ChatError, ChatTemplate, read_template

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)
MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})
EXPECTED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_a_template_is_found_where_checkpoints_have_it(tmp_path: Path, place: str) -> None:
    config: dict[str, object] = {"eos_token": {"content": "<|im_end|>"}}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    else:
        config["chat_template"] = CHATML if place == "config" else [{"name": "default", "template": CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = read_template(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == EXPECTED


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no system role') }}", "{{ messages.__class__.__mro__ }}", "{{ missing.field }}"]
)
def test_what_a_template_refuses_or_may_not_do_is_one_error(source: str) -> None:
    with pytest.raises(ChatError):
        ChatTemplate(source, {}).render(MESSAGES)
