"""Agents of the tests, written as users write theirs: with OpenAI's own client."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from rollout.tasks import Prompt

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}={% else %}<{% endif %}{% endfor %}"


async def conversation(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Says three things one after the other; the reward is the number of answers that had text."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=60) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        messages = cast("list[ChatCompletionMessageParam]", [dict(message) for message in prompt.messages])
        answers = 0.0
        for number in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
            said = answer.choices[0].message.content
            answers += bool(said)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": str(number)}]
        return answers


async def branches(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Asks once, then goes on twice at the same time, and asks something else."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=60) as client:

        async def ask(*messages: ChatCompletionMessageParam) -> str:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            return str(answer.choices[0].message.content)

        first: ChatCompletionMessageParam = {"role": "user", "content": "1"}
        said: ChatCompletionMessageParam = {"role": "assistant", "content": await ask(first)}
        two: list[ChatCompletionMessageParam] = [{"role": "user", "content": "2"}, {"role": "user", "content": "3"}]
        await asyncio.gather(*(ask(first, said, one) for one in two))
        await ask({"role": "user", "content": "456"})
        return 1.0


async def refused(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Calls what cannot be answered; the reward is the number of refusals."""
    count = 0.0
    ask: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}
    options: list[dict[str, Any]] = [
        {"temperature": 0.25},
        {"stream": True},
        {"tools": [{"type": "function"}]},
        {"n": 2},
        {"max_tokens": 0},
    ]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=60) as client:
        for option in options:
            try:
                await client.chat.completions.create(**ask, **option)
            except Exception as error:
                count += getattr(error, "status_code", None) == 400
        await client.chat.completions.create(**ask, temperature=1.0, user="me")
    async with AsyncOpenAI(base_url=base_url, api_key="another", timeout=60) as client:
        try:
            await client.chat.completions.create(**ask)
        except Exception as error:
            count += getattr(error, "status_code", None) == 401
    return count


async def silent(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Calls nothing."""
    return 1.0


async def failing(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Raises."""
    raise RuntimeError("an agent's own fault")


async def late(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Never ends."""
    await asyncio.Event().wait()
    return 1.0
