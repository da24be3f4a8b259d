"""Processes that compute rewards, each killed when one answer takes too long.

Invariant: a process has at most one answer at a time, so killing it costs that answer alone; a process that hung,
crashed, ran out of memory or said nonsense is replaced before the next answer. The clock of an answer starts when a
process takes it, not while it waits for one. Messages are length-prefixed msgpack: plain data, never pickle. A child
ends by itself when its standard input closes, so none outlives the worker; its temporary files go with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from configs.schema import RolloutSection
from rollout.tasks import Prompt, Response

LENGTH = struct.Struct("<I")
LARGEST = 64 << 20  # bytes of one message
REMOVE_TRIES, REMOVE_AGAIN_S = 50, 0.1  # of temporary files in which a program still writes
START_S = 60.0  # a verifier's imports may take long on a busy machine


class RewardFailed(Exception):
    """This answer got no reward."""


class RewardTimeout(RewardFailed):
    """No reward within the time limit."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """processes: at most so many. timeout_s: for one answer. memory_mb: address space of one process, in MiB."""

    processes: int = 2
    timeout_s: float = 10.0
    memory_mb: int = 2048

    @classmethod
    def of(cls, rollout: RolloutSection) -> PoolLimits:
        """As configured."""
        return cls(rollout.reward_processes, rollout.reward_timeout_s, rollout.reward_memory_mb)


class ProcessPool:
    """Up to limits.processes children of `rollout.rewards.child`, started when they are needed."""

    def __init__(
        self, task: str, seed: int, parameters: Mapping[str, Any], limits: PoolLimits, environment: Mapping[str, str]
    ) -> None:
        """task, seed, parameters: as of `make_task`. environment: all that a child gets, without secrets."""
        self._hello = msgspec.msgpack.encode(
            {"task": task, "seed": seed, "parameters": dict(parameters), "memory_mb": limits.memory_mb}
        )
        self._limits, self._environment = limits, dict(environment)
        self._idle: asyncio.LifoQueue[_Child | None] = asyncio.LifoQueue()
        for _ in range(limits.processes):
            self._idle.put_nowait(None)
        self._children: set[_Child] = set()
        self._dying: list[asyncio.Task[None]] = []
        self.restarts = 0

    async def reward(self, prompt: Prompt, response: Response) -> float:
        """What task.reward gives, possibly not finite. Raises RewardFailed, RewardTimeout."""
        try:
            message = msgspec.msgpack.encode(
                {
                    "prompt": {
                        "text": prompt.text,
                        "ids": prompt.ids,
                        "messages": [dict(m) for m in prompt.messages],
                        "metadata": prompt.metadata,
                        "source": prompt.source,
                    },
                    "response": {"text": response.text, "ids": response.ids, "finish": response.finish},
                }
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardFailed(f"the prompt's metadata is not plain data: {error}") from error
        child = await self._idle.get()
        healthy = False
        try:
            if child is None:
                child = await self._start()
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    answer = await child.ask(message)
            except TimeoutError as error:
                raise RewardTimeout(f"no reward within {self._limits.timeout_s:g} s") from error
            healthy = True
            if "error" in answer:
                raise RewardFailed(str(answer["error"]))
            return float(answer["reward"])
        except (OSError, EOFError, KeyError, ValueError, TypeError, msgspec.DecodeError) as error:
            healthy = False
            raise RewardFailed(f"the reward's process ended: {error}") from error
        finally:  # also when the awaiting task was cancelled: the child's answer would come to the next one
            if child is not None and not healthy:
                self._kill(child)
                child = None
            self._idle.put_nowait(child)

    async def close(self) -> None:
        """Kill all children, and see that they are gone."""
        for child in tuple(self._children):
            self._kill(child)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.gather(*self._dying)

    async def _start(self) -> _Child:
        scratch = tempfile.TemporaryDirectory(prefix="rewards-", ignore_cleanup_errors=True)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the current folder would come before our packages
                "-m",
                "rollout.rewards.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._environment | {"TMPDIR": scratch.name},
                start_new_session=True,
            )
        except BaseException:
            scratch.cleanup()
            raise
        child = _Child(process, scratch)
        self._children.add(child)
        try:
            async with asyncio.timeout(START_S):
                answer = await child.ask(self._hello)
            if "error" in answer:
                raise RewardFailed(f"the task cannot be made in its process: {answer['error']}")
        except TimeoutError as error:
            self._kill(child)
            raise RewardFailed(f"the reward's process did not start within {START_S:g} s") from error
        except BaseException:
            self._kill(child)
            raise
        return child

    def _kill(self, child: _Child) -> None:
        if child in self._children:
            self._children.discard(child)
            self.restarts += 1
            child.kill()
            waiting = [task for task in self._dying if not task.done()]
            self._dying = [*waiting, asyncio.create_task(child.gone())]


class _Child:
    def __init__(self, process: asyncio.subprocess.Process, scratch: tempfile.TemporaryDirectory[str]) -> None:
        self._process, self._scratch = process, scratch

    async def ask(self, message: bytes) -> dict[str, Any]:
        to, back = self._process.stdin, self._process.stdout
        if to is None or back is None:
            raise EOFError("it has no pipes")
        to.write(LENGTH.pack(len(message)) + message)
        await to.drain()
        (size,) = LENGTH.unpack(await back.readexactly(LENGTH.size))
        if size > LARGEST:
            raise ValueError(f"a message of {size} bytes")
        answer = msgspec.msgpack.decode(await back.readexactly(size))
        if not isinstance(answer, dict):
            raise ValueError("an answer that is not an object")
        return answer

    async def gone(self) -> None:
        """Return when it has ended and what it had no time to remove is removed.

        A program that it ran is killed by the kernel after it, and may write until then.
        """
        await self._process.wait()
        for _ in range(REMOVE_TRIES):
            await asyncio.to_thread(self._scratch.cleanup)
            if not Path(self._scratch.name).exists():  # noqa: ASYNC240 - one call
                return
            await asyncio.sleep(REMOVE_AGAIN_S)

    def kill(self) -> None:
        """The whole process group: a verifier may have started programs."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        transport = getattr(self._process, "_transport", None)
        if transport is not None:  # closes the pipes at once; asyncio reaps the process
            transport.close()


def child_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What of our environment a reward's process gets: no secrets, no proxies."""
    kept = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    out = {name: ours[name] for name in kept if name in ours}
    out |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MPLBACKEND": "agg"}
    out["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return out
