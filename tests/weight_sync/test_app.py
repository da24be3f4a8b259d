"""The application around the loop, without engines."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from services.weight_sync import app


class Loop:
    """A reconciler whose loop ends as `error` says; None: when it is told to."""

    def __init__(self, error: Exception | None) -> None:
        self._error, self._stopped = error, asyncio.Event()

    async def run(self) -> None:
        if self._error is not None:
            raise self._error
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


@pytest.mark.parametrize("error", [None, OSError(28, "No space left on device")])
async def test_a_loop_that_fails_takes_its_process_along_and_one_that_is_told_to_end_does_not(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    loop: Any = Loop(error)
    made = app.create_app(loop, None)
    async with made.router.lifespan_context(made):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert raised == ([] if error is None else [signal.SIGTERM])
