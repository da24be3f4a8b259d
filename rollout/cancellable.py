"""HTTP exchanges that may be cancelled at any moment.

Invariant: an exchange that is cancelled has ended when the cancellation is passed on, and leaves no connection behind:
neither one that its pool counts as busy for good, nor one that the pool has let go of without closing it.

httpcore shields its clean-up from anyio's cancellation alone; asyncio's own breaks into it (httpx issue 1461, httpcore
issue 830). So the exchange runs in a task of its own, and what is cancelled is an anyio scope inside that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import anyio

P = ParamSpec("P")
T = TypeVar("T")


def cancellable(exchange: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make an exchange by httpx one that cleans up when it is cancelled. Time limits inside it are to be anyio's."""

    @functools.wraps(exchange)
    async def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        scope = anyio.CancelScope()

        async def within() -> T:
            with scope:
                return await exchange(*args, **kwargs)
            raise asyncio.CancelledError

        task = asyncio.create_task(within())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            scope.cancel()
            while not task.done():  # the clean-up waits for no peer: to be cancelled again is no reason to leave it
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({task})
            raise

    return whole
