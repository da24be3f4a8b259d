"""A reward service is asked in batches, again when it fails, and never by more than in_flight requests."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from rollout.rewards import RewardFailed
from rollout.rewards.service import Service, ServiceJudge
from rollout.tasks import Prompt, Response

PROMPT = Prompt(text="?", metadata={"answer": "1"})


def said(text: str) -> Response:
    return Response(text=text, ids=(1,), finish="stop")


async def test_answers_travel_in_batches_and_get_their_own_rewards() -> None:
    sizes: list[int] = []

    def serve(request: httpx.Request) -> httpx.Response:
        items = json.loads(request.content)["items"]
        sizes.append(len(items))
        return httpx.Response(200, json={"rewards": [float(item["response"]) for item in items]})

    judge = ServiceJudge(Service("http://rewards/judge", batch=8), httpx.MockTransport(serve))
    rewards = await asyncio.gather(*(judge.reward(PROMPT, said(str(i))) for i in range(20)))
    assert rewards == [float(i) for i in range(20)]
    assert max(sizes) == 8
    assert len(sizes) == 3
    await judge.close()


async def test_failures_are_tried_again_and_then_counted_one_by_one() -> None:
    calls = 0

    def serve(_request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return httpx.Response(503) if calls < 3 else httpx.Response(200, json={"rewards": [1.0]})

    judge = ServiceJudge(Service("http://rewards/judge", tries=3), httpx.MockTransport(serve))
    assert await judge.reward(PROMPT, said("x")) == 1.0
    calls = -100
    with pytest.raises(RewardFailed, match="503"):
        await judge.reward(PROMPT, said("x"))
    assert calls == -97
    await judge.close()


@pytest.mark.parametrize("answer", [{"rewards": [1.0, 2.0]}, {"rewards": ["x"]}, [], {"rewards": [None]}])
async def test_an_answer_that_does_not_fit_is_a_failure(answer: object) -> None:
    judge = ServiceJudge(
        Service("http://rewards/judge"), httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    )
    with pytest.raises(RewardFailed):
        await judge.reward(PROMPT, said("x"))
    await judge.close()


async def test_no_more_than_in_flight_requests_run() -> None:
    running, largest = 0, 0

    async def serve(request: httpx.Request) -> httpx.Response:
        nonlocal running, largest
        running += 1
        largest = max(largest, running)
        await asyncio.sleep(0)
        running -= 1
        return httpx.Response(200, json={"rewards": [0.0] * len(json.loads(request.content)["items"])})

    service = Service("http://rewards/judge", batch=1, in_flight=2, wait_s=0)
    judge = ServiceJudge(service, httpx.MockTransport(serve))
    await asyncio.gather(*(judge.reward(PROMPT, said("x")) for _ in range(10)))
    assert largest <= 2
    await judge.close()
