"""An HTTP exchange that is cancelled leaves no connection behind: tried at each turn of the loop.

Client and server share the loop, so that the same turn finds the exchange at the same place on any machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from rollout.cancellable import cancellable

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers, and knows which connections are open."""

    def __init__(self) -> None:
        self.url, self.open = "", set[asyncio.StreamWriter]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(ANSWER)
        self.hang_up(writer)

    def hang_up(self, *writers: asyncio.StreamWriter) -> None:
        for writer in writers:
            self.open.discard(writer)
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listener = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield made
        made.hang_up(*made.open)


@cancellable
async def ask(http: httpx.AsyncClient, url: str) -> bytes:
    async with http.stream("GET", url) as response:
        return await response.aread()


def client(connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections)
    return httpx.AsyncClient(trust_env=False, verify=False, timeout=5, limits=limits)


async def cancelled_after(turns: int, task: asyncio.Task[bytes]) -> bool:
    """Whether it was cancelled before it had ended; then also a second time, as its clean-up has begun."""
    for _ in range(turns):
        await asyncio.sleep(0)
    ended = task.done()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)
    return not ended


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (a connection's end has no event)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("warm", [False, True])
async def test_a_cancelled_exchange_gives_its_place_in_the_pool_back(server: Server, warm: bool) -> None:
    turns, cancelled = 0, True
    while cancelled:
        async with client(connections=1) as http:
            if warm:
                await ask(http, server.url)
            cancelled = await cancelled_after(turns, asyncio.create_task(ask(http, server.url)))
            assert await ask(http, server.url) == b"ok", turns  # or there is no free connection: PoolTimeout
            turns += 1
    assert turns > 5


async def test_connections_that_a_cancelled_exchange_was_to_close_are_closed(server: Server) -> None:
    turns, cancelled = 0, True
    while cancelled:
        async with client(connections=4) as http:
            await asyncio.gather(*(ask(http, server.url) for _ in range(4)))
            assert len(server.open) == 4
            for writer in server.open:
                writer.write_eof()  # as an engine that stops: the pool finds that all four have ended, and closes them
            cancelled = await cancelled_after(turns, asyncio.create_task(ask(http, server.url)))
            turns += 1
        await until(lambda: not server.open)
    assert turns > 5


async def test_what_an_exchange_gives_or_raises_is_passed_on(server: Server) -> None:
    async with client(connections=1) as http:
        assert await ask(http, server.url) == b"ok"
        with pytest.raises(httpx.UnsupportedProtocol):
            await ask(http, "ftp://127.0.0.1")
