"""Rewards from an HTTP service, in batches.

Invariant: at most `in_flight` requests run at a time, and callers wait (a worker's groups are bounded, so the waiting
is the back-pressure); each request ends within timeout_s; what can be tried again is tried `tries` times with growing
pauses, and then every answer of the batch is one counted failure.

POST url {"items": [{"prompt": text or messages, "response": text, "finish": ..., "metadata": {...}}, ...]}
-> 200 {"rewards": [number or null, ...]} of the same length; null: no reward for this one. 429 and 5xx are tried again.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from rollout.cancellable import cancellable
from rollout.rewards.pool import RewardFailed, RewardTimeout
from rollout.tasks.types import Prompt, Response


@dataclass(frozen=True, slots=True)
class Service:
    """Where and how. batch: items of one request at most; wait_s: how long the first item waits for others."""

    url: str
    timeout_s: float = 30.0
    tries: int = 3
    batch: int = 64
    wait_s: float = 0.02
    in_flight: int = 4
    token: str | None = None


class ServiceJudge:
    """A Judge (rollout/rewards/judge.py) in front of a service."""

    def __init__(self, service: Service, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """transport: for tests."""
        self._service = service
        headers = {"Authorization": f"Bearer {service.token}"} if service.token else {}
        self._http = httpx.AsyncClient(headers=headers, timeout=service.timeout_s, transport=transport, trust_env=False)
        self._free = asyncio.Semaphore(service.in_flight)
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[float]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def reward(self, prompt: Prompt, response: Response) -> float:
        """See Judge."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        content: Any = [dict(m) for m in prompt.messages] or prompt.text or list(prompt.ids)
        item = {
            "prompt": content,
            "response": response.text,
            "finish": response.finish,
            "metadata": prompt.metadata,
            "source": prompt.source,
        }
        self._waiting.append((item, future))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        return await future

    async def close(self) -> None:
        """End everything; who still waits is told."""
        tasks = [task for task in (self._sender, *self._sending) if task is not None]
        for task in tasks:
            task.cancel()
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(RewardFailed("the worker ends"))
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def _send_all(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._service.batch:
                await asyncio.sleep(self._service.wait_s)
            await self._free.acquire()  # before the batch is made: it grows while all requests are in flight
            batch, self._waiting = self._waiting[: self._service.batch], self._waiting[self._service.batch :]
            batch = [one for one in batch if not one[1].done()]  # who was cancelled needs no answer
            task = asyncio.create_task(self._send(batch))
            self._sending.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._free.release()

    async def _send(self, batch: list[tuple[dict[str, Any], asyncio.Future[float]]]) -> None:
        if not batch:
            return
        try:
            rewards = await self._ask([item for item, _ in batch])
        except RewardFailed as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(type(error)(str(error)))
            return
        for (_, future), reward in zip(batch, rewards, strict=True):
            if future.done():
                continue
            if reward is None or not abs(reward) < float("inf"):
                future.set_exception(RewardFailed(f"the service gives {reward} for this answer"))
            else:
                future.set_result(reward)

    async def _ask(self, items: list[dict[str, Any]]) -> list[float | None]:
        problem: RewardFailed = RewardFailed("not tried")
        for attempt in range(self._service.tries):
            if attempt:
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(0.1 * 4**attempt, 5.0))
            try:
                response = await self._post(items)
            except (httpx.TimeoutException, TimeoutError):
                problem = RewardTimeout(f"{self._service.url}: no answer within {self._service.timeout_s:g} s")
                continue
            except (httpx.HTTPError, TypeError, ValueError) as error:
                problem = RewardFailed(f"{self._service.url}: {type(error).__name__}: {error}")
                continue
            if response.status_code == 200:
                return _rewards(response, len(items))
            problem = RewardFailed(f"{self._service.url}: {response.status_code} {response.text[:200]}")
            if response.status_code != 429 and response.status_code < 500:
                break
        raise problem

    @cancellable
    async def _post(self, items: list[dict[str, Any]]) -> httpx.Response:
        with anyio.fail_after(self._service.timeout_s):
            return await self._http.post(self._service.url, json={"items": items})


def _rewards(response: httpx.Response, count: int) -> list[float | None]:
    try:
        rewards = response.json()["rewards"]
        out = [None if reward is None else float(reward) for reward in rewards]
    except (ValueError, KeyError, TypeError) as error:
        raise RewardFailed(f'{response.url}: the answer is not {{"rewards": [...]}}') from error
    if len(out) != count:
        raise RewardFailed(f"{response.url}: {len(out)} rewards for {count} answers")
    return out
