"""A process that computes rewards: `python -m rollout.rewards.child`, started by the pool alone.

Invariant: it makes its task once, answers one message at a time, and ends when its input closes. Its memory is limited
before the task's code is imported; what the task prints goes nowhere, since standard output carries the answers.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import Any, BinaryIO

import msgspec

from rollout.rewards.pool import LENGTH
from rollout.tasks import Prompt, Response, Task, make_task


def main() -> int:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    questions = sys.stdin.buffer
    task: Task | None = None
    while (message := _read(questions)) is not None:
        try:
            if task is None:
                limit_memory(int(message["memory_mb"]))
                task = make_task(message["task"], int(message["seed"]), message["parameters"])
                answer: dict[str, Any] = {"ready": True}
            else:
                answer = {"reward": float(task.reward(_prompt(message["prompt"]), _response(message["response"])))}
        except Exception as error:  # a task's code may fail in any way
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        data = msgspec.msgpack.encode(answer)
        answers.write(LENGTH.pack(len(data)) + data)
        answers.flush()
    return 0


def limit_memory(mebibytes: int) -> None:
    """Allocations beyond so much address space fail in this process and in those it starts; no core files."""
    size = mebibytes << 20
    with contextlib.suppress(ValueError, OSError):  # a lower hard limit stands
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    return msgspec.msgpack.decode(stream.read(size), type=dict[str, Any])


def _prompt(data: dict[str, Any]) -> Prompt:
    messages = tuple(data["messages"])
    return Prompt(data["text"], tuple(data["ids"]), data["metadata"], messages, data["source"])


def _response(data: dict[str, Any]) -> Response:
    return Response(data["text"], tuple(data["ids"]), data["finish"])


if __name__ == "__main__":
    sys.exit(main())
