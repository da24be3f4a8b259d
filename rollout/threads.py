"""Blocking calls from an event loop, in threads that never hold up the end of the process.

Invariant: the awaiting task goes on after at most `timeout_s`, whatever the call does. A call that is given up runs on
in its thread (Python cannot end it); it is a daemon, so the process can exit. The executors of the standard library
join their threads at exit, which a hanging reward would turn into a hanging worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T], timeout_s: float) -> T:
    """The result of `call()`, made in a thread of its own. Raises what it raises, or TimeoutError after timeout_s."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # it belongs to the task that awaits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, daemon=True, name="blocking-call").start()
    async with asyncio.timeout(timeout_s):  # not wait_for, which before Python 3.12 may swallow a cancellation
        return await future
