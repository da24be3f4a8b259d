"""Server-sent events: shared, bounded, and ended by a stop."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx

from services.monitor.feed import Feed, message
from tests.monitor.conftest import Run
from tests.monitor.live import monitor_of
from tests.weight_sync.live import until


async def test_a_message_is_made_once_for_all_clients_and_a_slow_one_gets_the_newest() -> None:
    made = 0

    async def produce() -> bytes:
        nonlocal made
        made += 1
        return str(made).encode()

    feed = Feed(produce, lambda: False, every_s=0.05)
    quick, slow = feed.follow(), feed.follow()
    await anext(quick)
    await anext(slow)
    got = [await anext(quick) for _ in range(5)]
    assert [int(g) for g in got] == list(range(int(got[0]), int(got[0]) + 5))
    assert int(await anext(slow)) >= int(got[-1])
    assert made <= int(got[-1]) + 1
    await quick.aclose()
    await slow.aclose()
    assert feed.clients == 0
    await until(lambda: feed._task is not None and feed._task.done())


async def test_who_comes_after_nobody_followed_gets_what_was_made_since() -> None:
    now = "old"

    async def produce() -> bytes:
        return await asyncio.to_thread(now.encode)  # as the monitor's: some turns of the loop go by

    feed = Feed(produce, lambda: False, every_s=0.02)
    first = feed.follow()
    assert [await anext(first), await anext(first)][1] == b"old"
    await first.aclose()
    await until(lambda: feed._task is not None and feed._task.done())
    now = "new"
    both = feed.follow(), feed.follow()
    for later in both:
        await anext(later)
    for later in both:
        assert await anext(later) == b"new"
        await later.aclose()


async def test_streams_end_when_the_service_leaves() -> None:
    leaving = False

    async def produce() -> bytes:
        return b"x"

    feed = Feed(produce, lambda: leaving, every_s=0.02)

    async def read() -> int:
        return len([one async for one in feed.follow()])

    reader = asyncio.create_task(read())
    await until(lambda: feed._turn > 2)
    leaving = True
    assert await asyncio.wait_for(reader, 10) >= 2


def test_a_message_is_one_event() -> None:
    assert message("overview", "{}", 7) == b"id: 7\nevent: overview\ndata: {}\n\n"


def test_a_client_hears_of_a_step_and_the_service_stops_although_it_listens(run: Run, tmp_path: Path) -> None:
    with monitor_of(run, tmp_path) as monitor:
        steps: list[int] = []
        with httpx.stream("GET", f"{monitor.url}/v1/stream", timeout=60, trust_env=False) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                steps.append(json.loads(line.removeprefix("data: "))["progress"]["step"])
                if len(steps) == 1:
                    run.step(0.9)
                if steps[-1] == 3:
                    break
            began = time.monotonic()
            assert monitor.stop() == 0
            assert time.monotonic() - began < 20
        assert (steps[0], steps[-1]) == (2, 3)
