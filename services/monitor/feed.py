"""Server-sent events: one message a second for any number of clients.

Invariant: a message is made once, whoever follows, and only while someone does; a slow client misses messages instead
of storing them up; the first that a client gets is of now, however long nobody followed; at most `MOST_CLIENTS` follow
at a time; a stream ends soon after the service was asked to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

EVERY_S = 1.0
MOST_CLIENTS = 100


def message(event: str, data: str, number: int | None = None) -> bytes:
    """One server-sent event. data: without line breaks (JSON)."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {event}\ndata: {data}\n\n".encode()


class Feed:
    """Of one application; all methods belong to its event loop."""

    def __init__(
        self, produce: Callable[[], Awaitable[bytes]], leaving: Callable[[], bool], every_s: float = EVERY_S
    ) -> None:
        """produce: makes the present message. leaving: whether streams are to end."""
        self._produce, self._leaving, self._every_s = produce, leaving, every_s
        self._latest, self._turn = b"", 0
        self._old = 0  # the last turn that was made before somebody followed again
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.clients = 0

    @property
    def full(self) -> bool:
        """Whether another client has to be turned away."""
        return self.clients >= MOST_CLIENTS

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Messages from now on, the newest each time."""
        self.clients += 1
        if self._task is None or self._task.done():
            self._old = self._turn
            self._task = asyncio.create_task(self._beat(), name="feed")
        turn = self._old
        try:
            yield b"retry: 1000\n\n"
            while not self._leaving():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._after(turn), self._every_s)
                if self._turn > turn:
                    turn = self._turn
                    yield self._latest
        finally:
            self.clients -= 1

    async def _after(self, turn: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._turn > turn)

    async def _beat(self) -> None:
        while self.clients and not self._leaving():
            made = await self._produce()
            async with self._changed:
                self._latest, self._turn = made, self._turn + 1
                self._changed.notify_all()
            await asyncio.sleep(self._every_s)
