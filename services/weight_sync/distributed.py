"""Weights by broadcast, in buckets, through SGLang's update_weights_from_distributed.

Invariant: each engine has a process group of its own with a sender of its own (sender.py): what becomes of one is
nothing to the others, and the trainer is in none. The group is made while the engine serves, and so are the first
buffers of a version (up to AHEAD_BYTES): in the pause they are only sent. The group is used again as long as every
broadcast succeeds; after any failure it is given up together with its sender, and the engine loads the
published files once. SGLang's update session is always closed again: a session that stayed open refuses the next one.

The sender is a process and not a part of the trainer, which would then have to wait for engines, and not a part of this
process, which is to start without torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from broker.types import EngineRecord
from services.weight_sync.checksums import ITEM_BYTES, open_safetensors
from services.weight_sync.engine_client import Done, EngineClient, Lost
from services.weight_sync.staging import Staged

log = structlog.get_logger()
WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
WORDS |= {"U8": "uint8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
SENDER = Path(__file__).with_name("sender.py")
MAX_LINE_BYTES = 1 << 20
AHEAD_BYTES = 4 << 30  # the sender's memory for buffers that wait; the rest is read while the engine loads those


@dataclass(frozen=True, slots=True)
class Reach:
    """How engines are reached. python: interpreter with torch, the engine's; script: what it runs. address: of this
    host, as engines see it. ranks: of one engine. backend: "nccl" or "gloo". seconds: longest wait for one step."""

    python: Path
    address: str
    ranks: int
    backend: str
    bucket_bytes: int
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    script: Path = SENDER


class SenderFailed(Exception):
    """The sender is gone, or what it was asked did not succeed."""


class Sender:
    """A running sender process."""

    def __init__(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        self._process, self._seconds = process, seconds

    @classmethod
    async def start(cls, reach: Reach) -> Sender:
        """Raises SenderFailed."""
        try:
            process = await asyncio.create_subprocess_exec(
                str(reach.python),
                str(reach.script),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=reach.environment,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            raise SenderFailed(f"{reach.python} cannot be started: {error.strerror}") from error
        return cls(process, reach.seconds)

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Give one order; its answer. Raises SenderFailed."""
        writer, reader = self._process.stdin, self._process.stdout
        if writer is None or reader is None:
            raise SenderFailed("the sender has no pipes")
        try:
            async with asyncio.timeout(self._seconds):
                writer.write(json.dumps(order).encode() + b"\n")
                await writer.drain()
                answer = dict(json.loads(await reader.readline() or b'{"error": "the sender has ended"}'))
        except (OSError, ValueError, TimeoutError) as error:
            raise SenderFailed(f"the sender does not answer: {type(error).__name__}") from error
        if "error" in answer:
            raise SenderFailed(str(answer["error"]))
        return answer

    async def end(self) -> None:
        """Kill it: it holds nothing that is worth a farewell."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@dataclass(frozen=True, slots=True)
class Listed:
    """A tensor of a published version. dtype: torch's word."""

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(slots=True)
class Link:
    """An engine's group. made_for: address and id of the process that it was made with. sender: None if there is no
    group (any more)."""

    made_for: tuple[str, int]
    making: asyncio.Task[None] | None = None
    sender: Sender | None = None
    preparing: asyncio.Task[None] | None = None
    prepared: int = -1  # the version that `preparing` is, or was, of
    parts: Sequence[Sequence[Listed]] = ()  # its buckets


class Distributed:
    """See the module. reach: how engines are reached. wake: called when a group was made, or could not be.

    links: by engine.
    """

    one_call = False

    def __init__(self, reach: Reach, wake: Callable[[], None]) -> None:
        self.fallbacks = 0
        self.links: dict[str, Link] = {}
        self.reach, self._wake = reach, wake
        self._ending: set[asyncio.Task[None]] = set()

    def ready(self, engine: EngineRecord, client: EngineClient, staged: Staged, waited_s: float) -> bool:
        """Whether there is a group with the engine's present process and buffers to send it, or none could be made."""
        link = self.links.get(engine.engine_id)
        if link is None or link.made_for != (engine.url, engine.pid):
            if link is not None:
                ending = asyncio.create_task(self._end(link))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            link = Link((engine.url, engine.pid))
            link.making = asyncio.create_task(self._make(link, group_of(engine), client), name=group_of(engine))
            self.links[engine.engine_id] = link
        if link.making is not None and not link.making.done():
            return False
        if link.sender is None:
            return True
        if link.preparing is not None and not link.preparing.done():
            return False
        if link.prepared != staged.version:
            link.prepared = staged.version
            link.preparing = asyncio.create_task(
                self._prepare(link, link.sender, staged), name=f"prepare {staged.version}"
            )
            return False
        return True

    async def load(
        self, engine: EngineRecord, client: EngineClient, staged: Staged, name: str, *, drain: bool
    ) -> Done[None] | Lost:
        """See Transport; the engine is paused."""
        link = self.links.get(engine.engine_id)
        if link is None or link.sender is None:
            self.links.pop(engine.engine_id, None)  # the next version gets a new try
            self.fallbacks += 1
            return await client.load(staged.folder, name, drain=drain)
        outcome: Done[None] | Lost = Lost("given up")
        try:
            outcome = await self._broadcast(link, link.sender, group_of(engine), client, staged, name)
        finally:
            if isinstance(outcome, Lost):
                await self._end(link)
        return outcome

    async def close(self) -> None:
        """End all senders."""
        links, self.links = list(self.links.values()), {}
        await asyncio.gather(*(self._end(link) for link in links), *self._ending)

    async def _make(self, link: Link, group: str, client: EngineClient) -> None:
        reach, world = self.reach, 1 + self.reach.ranks
        try:
            link.sender = sender = await Sender.start(reach)
            port = (await sender.ask({"listen": reach.address, "seconds": reach.seconds}))["port"]
            await client.leave_group(group)  # of a process before this one, if there was any
            outcome = await _both(
                sender.ask({"join": {"group": group, "world": world, "backend": reach.backend}}),
                client.join_group(group, reach.address, port, world, reach.backend),
            )
            if isinstance(outcome, Lost):
                raise SenderFailed(outcome.detail)
        except SenderFailed as error:
            log.warning("no group with an engine", group=group, problem=str(error))
            await self._end(link)
        finally:
            self._wake()

    async def _prepare(self, link: Link, sender: Sender, staged: Staged) -> None:
        """Have the first buffers of a version made. What cannot be read will fail in the load as well."""
        link.parts = ()
        try:
            link.parts = await asyncio.to_thread(buckets, staged.folder, self.reach.bucket_bytes)
            await sender.ask({"prepare": [_named(part) for part in within(link.parts, AHEAD_BYTES)]})
        except (SenderFailed, OSError, ValueError) as error:
            log.warning("a broadcast cannot be prepared", version=staged.version, problem=str(error))
            await self._end(link)
        finally:
            self._wake()

    async def _broadcast(
        self, link: Link, sender: Sender, group: str, client: EngineClient, staged: Staged, name: str
    ) -> Done[None] | Lost:
        begun = await client.begin_update()
        if isinstance(begun, Lost):  # perhaps a process before this one left a session open
            await client.end_update()
            begun = await client.begin_update()
        outcome: Done[None] | Lost = begun
        try:
            if isinstance(begun, Done):
                parts = link.parts if link.prepared == staged.version else ()
                parts = parts or await asyncio.to_thread(buckets, staged.folder, self.reach.bucket_bytes)
                outcome = await _both(_send_all(sender, parts), _receive_all(client, group, parts, name))
        except (SenderFailed, OSError, ValueError) as error:
            outcome = Lost(str(error))
        finally:
            ended = await client.end_update()
        return ended if isinstance(outcome, Done) else outcome

    async def _end(self, link: Link) -> None:
        for task in (link.making, link.preparing):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        sender, link.sender = link.sender, None
        if sender is not None:
            await sender.end()


async def _send_all(sender: Sender, parts: Sequence[Sequence[Listed]]) -> None:
    """Runs ahead of the engine, so that the next bucket is ready while the engine loads one."""
    for part in parts:
        await sender.ask({"send": _named(part)})


def _named(part: Sequence[Listed]) -> list[list[str]]:
    return [[t.path, t.name] for t in part]


def within(parts: Sequence[Sequence[Listed]], limit_bytes: int) -> list[Sequence[Listed]]:
    """The first buckets, as many as are together at most limit_bytes."""
    ends = itertools.accumulate(sum(t.bytes for t in part) for part in parts)
    return [part for part, end in zip(parts, ends, strict=True) if end <= limit_bytes]


async def _receive_all(
    client: EngineClient, group: str, parts: Sequence[Sequence[Listed]], name: str
) -> Done[None] | Lost:
    outcome: Done[None] | Lost = Lost("the version holds no tensor")
    for number, part in enumerate(parts, 1):
        tensors = [(t.name, t.dtype, t.shape) for t in part]
        outcome = await client.receive(group, tensors, name, flush=number == len(parts))
        if isinstance(outcome, Lost):
            break
    return outcome


async def _both(asked: Coroutine[Any, Any, Any], told: Coroutine[Any, Any, Done[None] | Lost]) -> Done[None] | Lost:
    """What the engine answers, once the sender is done, too; the first failure of either ends it."""
    sending, answering = asyncio.create_task(asked), asyncio.create_task(told)
    try:
        await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            await sending
        outcome = await answering
        if isinstance(outcome, Done):
            await sending
        return outcome
    finally:
        for task in (sending, answering):
            task.cancel()
        await asyncio.gather(sending, answering, return_exceptions=True)


def group_of(engine: EngineRecord) -> str:
    """Name of an engine's group: always the same, so that a later process can take the place of one that was killed."""
    return f"weights-of-{engine.engine_id}"


def buckets(folder: Path, limit_bytes: int) -> list[list[Listed]]:
    """The tensors of a version in buckets of at most limit_bytes, or of one tensor that is larger.

    Wide elements come first, so that each tensor is aligned in its bucket. Raises UnreadableWeights, OSError.
    """
    found: list[Listed] = []
    for path in sorted(folder.glob("*.safetensors")):
        with open_safetensors(path) as tensors:
            found += [Listed(str(path), t.name, WORDS[t.dtype], t.shape, ITEM_BYTES[t.dtype]) for t in tensors]
    made: list[list[Listed]] = []
    room = 0
    for tensor in sorted(found, key=lambda t: -t.item_bytes):
        if not made or tensor.bytes > room:
            made.append([])
            room = limit_bytes
        made[-1].append(tensor)
        room -= tensor.bytes
    return made
