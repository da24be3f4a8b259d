"""Client of an SGLang engine's control API.

Invariant: every call ends within its timeout with a typed outcome, `Done` only if the engine said so in an answer that
does not contradict itself; everything else (timeout, reset, 4xx, 5xx, unreadable answer, success: false) is `Lost`, and
the caller must assume the worse of "it happened" and "it did not".

The cache is flushed with every load: without that, cached prompts keep keys and values, and routes, of the old weights.
The pause modes `in_place` and `retract` are not offered: the first continues on the old weights' cache, the second lets
the new weights rewrite the routes of tokens that the old ones sampled (docs/weight-sync.md).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio
import httpx

from rollout.cancellable import cancellable

MAX_ANSWER_BYTES = 32 << 20
ABORTED_S = 0.9  # until aborted requests have left; longer would cost more than it saves
ABORT_AGAIN_S = 0.25  # then twice that, and so on
T = TypeVar("T")


@dataclass(frozen=True)
class Done(Generic[T]):
    """The engine confirmed it."""

    value: T


@dataclass(frozen=True, slots=True)
class Lost:
    """It failed, or nobody knows. refused: nobody listens at the address, so nothing was sent."""

    detail: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine says of itself. weights: its name of the weights; paused: None if it does not say."""

    weights: str
    paused: bool | None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. probe: short questions; load: one load; pause: until aborted requests left; drain: until running ones
    ended by themselves; poll: between two looks at what runs."""

    probe: float = 5.0
    load: float = 120.0
    pause: float = 30.0
    drain: float = 60.0
    poll: float = 0.02


class EngineClient:
    """One engine. `http` is shared and closed by its owner."""

    def __init__(self, http: httpx.AsyncClient, url: str, timeouts: Timeouts, api_key: str | None = None) -> None:
        self._http, self._url, self._timeouts = http, url.rstrip("/"), timeouts
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def weights(self) -> Done[str] | Lost:
        """Its name of what it has loaded."""
        info = await self._json("GET", "/model_info", self._timeouts.probe)
        if isinstance(info, Lost):
            return info
        name = info.value.get("weight_version")
        return Done(name) if isinstance(name, str) else Lost("/model_info names no weight_version")

    async def probe(self) -> Done[Served] | Lost:
        """What it serves now, and whether it is paused."""
        weights = await self.weights()
        if isinstance(weights, Lost):
            return weights
        ready = await self._send("GET", "/ready", self._timeouts.probe)
        paused = {200: False, 503: True}.get(ready.value[0]) if isinstance(ready, Done) else None
        return Done(Served(weights.value, paused))

    async def running(self) -> Done[int] | Lost:
        """Requests that run or wait inside the engine."""
        answer = await self._json("GET", "/v1/loads", self._timeouts.probe)
        if isinstance(answer, Lost):
            return answer
        try:
            loads = answer.value["loads"]
            return Done(sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads))
        except (KeyError, TypeError, ValueError):
            return Lost("/v1/loads does not say how many requests run")

    async def abort(self) -> Done[None] | Lost:
        """End all running requests; their partial answers go back to the workers."""
        answer = await self._send("POST", "/abort_request", self._timeouts.probe, {"abort_all": True})
        if isinstance(answer, Lost):
            return answer
        return Done(None) if answer.value[0] == 200 else Lost(f"/abort_request answered {answer.value[0]}")

    async def drain(self, limit_s: float) -> Done[bool] | Lost:
        """Wait until nothing runs: Done(True); Done(False) if something still runs after limit_s seconds."""
        clock = asyncio.get_running_loop().time
        end = clock() + limit_s
        while True:
            running = await self.running()
            if isinstance(running, Lost):
                return running
            if running.value == 0 or clock() >= end:
                return Done(running.value == 0)
            await asyncio.sleep(self._timeouts.poll)

    async def quiet(self, *, drain: bool) -> None:
        """Have nothing run, if that can be had: so a pause need not wait, for which SGLang looks once a second.

        drain: let running requests end, for the drain time at most; what still runs is aborted and goes back to the
        workers.
        """
        done = await self.drain(self._timeouts.drain if drain else 0.0)
        if done == Done(False):
            await self.abort()
            await self.drain(ABORTED_S)

    async def pause(self) -> Done[None] | Lost:
        """Abort what runs (its partial answers go back to the workers) and hold new requests back."""
        return _acknowledged(await self._json("POST", "/pause_generation", self._timeouts.pause, {"mode": "abort"}))

    async def resume(self, tries: int = 3) -> Done[None] | Lost:
        """Let requests through again; harmless for an engine that is not paused. Done: it says that it takes them."""
        outcome: Done[None] | Lost = Lost("no try")
        for attempt in range(tries):
            outcome = _acknowledged(await self._json("POST", "/continue_generation", self._timeouts.probe, {}))
            if isinstance(outcome, Done):
                outcome = await self._takes_requests()
            if isinstance(outcome, Done) or outcome.refused:
                return outcome
            if attempt + 1 < tries:
                await asyncio.sleep(self._timeouts.poll * 2**attempt)
        return outcome

    async def _takes_requests(self) -> Done[None] | Lost:
        ready = await self._send("GET", "/ready", self._timeouts.probe)
        if isinstance(ready, Lost):
            return ready
        return Lost("still paused after it was continued") if ready.value[0] == 503 else Done(None)

    async def load(self, folder: Path | str, name: str, *, drain: bool) -> Done[None] | Lost:
        """Load the weights of `folder` (absolute, as the engine sees it), flush the cache, and call them `name`.

        An engine that is not paused holds new requests back, waits until the running ones have left, and loads
        (SGLang's own readers-writer lock: nothing can slip in between). drain: they have the drain time to end; then,
        else at once, they are aborted, and their partial answers go back to the workers. An abort misses a request that
        was let in and has not reached the scheduler yet, so it is repeated for as long as the load does not answer.
        """
        body = {"model_path": str(folder), "flush_cache": True, "abort_all_requests": not drain, "weight_version": name}
        drain_s = self._timeouts.drain if drain else 0.0
        limit_s, wait_s, again_s = self._timeouts.load + drain_s, drain_s or ABORT_AGAIN_S, ABORT_AGAIN_S
        asked = asyncio.ensure_future(self._json("POST", "/update_weights_from_disk", limit_s, body))
        try:
            while not (await asyncio.wait({asked}, timeout=wait_s))[0]:
                await self.abort()
                wait_s, again_s = again_s, 2 * again_s
            return _succeeded(asked.result())
        finally:
            asked.cancel()
            await asyncio.wait({asked})  # who cancelled this load may close the connections next

    async def join_group(self, group: str, address: str, port: int, world: int, backend: str) -> Done[None] | Lost:
        """Let all its ranks join a process group as ranks 1, 2, ...; rank 0 waits for them at address:port."""
        body: dict[str, Any] = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world}
        body |= {"group_name": group, "backend": backend}
        return _succeeded(await self._json("POST", "/init_weights_update_group", self._timeouts.load, body))

    async def leave_group(self, group: str) -> Done[None] | Lost:
        """Let it leave a group; Lost if it is in none of that name."""
        body = {"group_name": group}
        return _succeeded(await self._json("POST", "/destroy_weights_update_group", self._timeouts.probe, body))

    async def begin_update(self) -> Done[None] | Lost:
        """Open an update session: only inside one it receives weights."""
        return _succeeded(await self._json("POST", "/begin_weight_update", self._timeouts.load, {}))

    async def end_update(self) -> Done[None] | Lost:
        """Close the session; Lost, and harmless, if none is open."""
        return _succeeded(await self._json("POST", "/end_weight_update", self._timeouts.load, {}))

    async def receive(
        self, group: str, tensors: Sequence[tuple[str, str, tuple[int, ...]]], name: str, *, flush: bool
    ) -> Done[None] | Lost:
        """Receive one flat buffer from rank 0 of a group: tensors, by name, dtype and shape, in this order."""
        names, dtypes, shapes = zip(*tensors, strict=True)
        body: dict[str, Any] = {"names": names, "dtypes": dtypes, "shapes": shapes, "load_format": "flattened_bucket"}
        body |= {"group_name": group, "weight_version": name, "flush_cache": flush, "abort_all_requests": False}
        return _succeeded(await self._json("POST", "/update_weights_from_distributed", self._timeouts.load, body))

    async def rename(self, name: str) -> Done[None] | Lost:
        """Call the weights `name` from now on; running requests go on, each token carries the name of its moment."""
        body = {"new_version": name, "abort_all_requests": False}
        answer = await self._json("POST", "/update_weight_version", self._timeouts.probe, body)
        if isinstance(answer, Lost):
            return answer
        if answer.value.get("success") is not True or answer.value.get("new_version") != name:
            return Lost("the engine does not confirm the new name of its weights")
        return Done(None)

    async def checksums(self) -> Done[dict[str, str]] | Lost:
        """Checksum of every parameter; with several ranks the names carry the rank: `rank/name`."""
        answer = await self._json("POST", "/weights_checker", self._timeouts.load, {"action": "checksum"})
        if isinstance(answer, Lost):
            return answer
        try:
            if answer.value["success"] is not True:
                return Lost("the checksum answered success: false")
            ranks = [dict(rank["checksums"]) for rank in answer.value["ranks"]]
        except (KeyError, TypeError, ValueError):
            return Lost("/weights_checker gives no checksums")
        if not ranks or not all(ranks):
            return Lost("/weights_checker gives no checksums")
        if len(ranks) == 1:
            return Done(ranks[0])
        return Done({f"{i}/{name}": value for i, rank in enumerate(ranks) for name, value in rank.items()})

    async def _json(
        self, method: str, path: str, limit_s: float, body: Mapping[str, Any] | None = None
    ) -> Done[dict[str, Any]] | Lost:
        answer = await self._send(method, path, limit_s, body)
        if isinstance(answer, Lost):
            return answer
        status, content = answer.value
        if status != 200:
            return Lost(f"{path} answered {status}")
        try:
            decoded = json.loads(content)
        except ValueError:
            return Lost(f"{path} answered something that is not JSON")
        return Done(decoded) if isinstance(decoded, dict) else Lost(f"{path} answered no object")

    @cancellable
    async def _send(
        self, method: str, path: str, limit_s: float, body: Mapping[str, Any] | None = None
    ) -> Done[tuple[int, bytes]] | Lost:
        try:
            with anyio.fail_after(limit_s):
                request = self._http.stream(method, self._url + path, json=body, headers=self._headers, timeout=limit_s)
                async with request as response:
                    content = bytearray()
                    async for part in response.aiter_bytes():
                        content += part
                        if len(content) > MAX_ANSWER_BYTES:
                            return Lost(f"{path} answered more than {MAX_ANSWER_BYTES} bytes")
                    return Done((response.status_code, bytes(content)))
        except httpx.ConnectError:
            return Lost(f"{path}: connection refused", refused=True)
        except (TimeoutError, httpx.TimeoutException):
            return Lost(f"{path}: no answer within {limit_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Lost(f"{path}: {type(error).__name__}")


def _succeeded(answer: Done[dict[str, Any]] | Lost) -> Done[None] | Lost:
    if isinstance(answer, Lost):
        return answer
    said = answer.value.get("success")
    return Done(None) if said is True else Lost(f"answered success: {said!r}")


def _acknowledged(answer: Done[dict[str, Any]] | Lost) -> Done[None] | Lost:
    """Pause and continue say status: ok; a body that says otherwise contradicts its 200."""
    if isinstance(answer, Lost):
        return answer
    status = answer.value.get("status", "ok")
    return Done(None) if status == "ok" else Lost(f"answered status {status!r}")
