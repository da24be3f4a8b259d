"""One episode of an agent, as its endpoint serves it: from a request to an answer, everything recorded.

Invariant: a call is answered with what the engines sampled for it, at most `calls` times, or refused with a reason; a
fault that concerns the whole episode (no engine; an update) is kept in `fault`, whatever the agent makes of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollout.agents.transcript import Transcript
from rollout.agents.wire import ChatRequest, Refused, completion
from rollout.client import InvalidAnswer
from rollout.codec import Codec
from rollout.environments.turns import Interrupted, Turns
from rollout.sampling import NoEngine, Unanswerable
from rollout.tasks.chat import ChatError


class Session:
    """Make one for each episode; `close` ends the calls that are under way."""

    def __init__(self, turns: Turns, codec: Codec, calls: int) -> None:
        """calls: most calls that are answered."""
        self.transcript = Transcript()
        self.fault: NoEngine | Interrupted | None = None
        self.temperature = turns.template.sampling.temperature
        self._turns, self._codec, self._calls_left = turns, codec, calls
        self._under_way: set[asyncio.Task[Any]] = set()

    async def complete(self, request: ChatRequest, number: str) -> dict[str, Any]:
        """Answer a call. number: names it. Raises Refused."""
        if self._calls_left < 1:
            raise Refused(429, "calls", "This episode has used up its calls (task.parameters.calls).")
        self._calls_left -= 1
        task = asyncio.create_task(self._complete(request, number))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.wait({task})
        if task.cancelled():
            raise Refused(503, "over", "This episode is over.")
        return task.result()

    def close(self) -> None:
        """The episode is over."""
        self._calls_left = 0
        for task in tuple(self._under_way):
            task.cancel()

    async def _complete(self, request: ChatRequest, number: str) -> dict[str, Any]:
        said = [message.said() for message in request.messages]
        try:
            text = self._codec.chat([{"role": role, "content": content} for role, content in said])
        except ChatError as error:
            raise Refused(400, "chat_template", str(error)) from error
        call = self.transcript.begin(said, text, self._codec.encode)
        asked = call.episode.turn.prompt_ids
        room = self._turns.context - len(asked)
        try:
            if room < 1:
                raise Refused(400, "context_length_exceeded", f"{len(asked)} tokens leave no room in the context.")
            limit = min(self._turns.template.sampling.max_new_tokens, room, request.limit or room)
            after = await self._turns.next(call.episode, limit)
        except (NoEngine, Interrupted) as error:
            self.fault = self.fault or error
            raise Refused(503, "no_engine", str(error)) from error
        except Unanswerable as error:
            raise Refused(400, "refused", str(error)) from error
        except InvalidAnswer as error:
            raise Refused(502, "engine", str(error)) from error
        finally:
            self.transcript.abandon(call)
        new = (*after.prompt_ids, *after.ids)[len(asked) :]
        content = self._codec.decode(new)
        self.transcript.end(call, after, content, self._codec.decode(new, special=True))
        finish = "length" if after.finish != "stop" else "stop"
        return completion(content, finish, len(asked), len(new), number)
