"""Broadcasts published weights to one engine: a child process of weight-sync that runs in the engine's environment.

Invariant: it holds one process group, of itself (rank 0) and the ranks of one engine; the trainer is in none. It
carries out one order at a time and answers each with one line; it ends with its standard input. It imports nothing of
this project, so that weight-sync needs no torch, and both ends of a broadcast have the same torch and NCCL.

Orders and answers are JSON lines; an answer with "error" means that nothing is known of the group any more.
    {"listen": "127.0.0.1", "seconds": 120}                  -> {"port": 40123}
    {"join": {"group": "g", "world": 2, "backend": "gloo"}}  -> {}                once every rank is there
    {"send": [["model.safetensors", "lm_head.weight"], ...]} -> {"bytes": 1234}   as one flat buffer, in this order
    {"prepare": [[["model.safetensors", "lm_head.weight"], ...], ...]} -> {"bytes": 1234}   buffers that will be sent,
        made now, while the engine still serves; whatever was prepared before is dropped
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TextIO

import torch
from safetensors import safe_open

dist: Any = torch.distributed
c10d: Any = dist.distributed_c10d  # what SGLang's side uses of it has no public name


class Group:
    """The process group, rank 0 of it. seconds: longest wait for the others, in joining and in a broadcast."""

    def __init__(self, address: str, seconds: float) -> None:
        self._limit = timedelta(seconds=seconds)
        self._store = dist.TCPStore(address, 0, None, True, self._limit, wait_for_workers=False)
        self._group: Any = None
        self._prepared: dict[str, torch.Tensor] = {}
        self.device = "cpu"

    @property
    def port(self) -> int:
        """Where the others find the store."""
        return int(self._store.port)

    def join(self, group: str, world: int, backend: str) -> None:
        """As SGLang's init_custom_process_group does on the other side (0.5.23, srt/utils/common.py)."""
        if backend == "nccl":
            self.device = "cuda"
        store = dist.PrefixStore(group, self._store)
        self._group, _ = c10d._new_process_group_helper(
            world, 0, [], c10d.Backend(backend), store, group_name=group, timeout=self._limit
        )
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world)}

    def prepare(self, parts: list[list[tuple[str, str]]]) -> int:
        """Make the buffers of later `send`s; their size in bytes."""
        self._prepared.clear()
        self._prepared = {json.dumps(tensors): _flat(tensors).to(self.device) for tensors in parts}
        return sum(flat.numel() for flat in self._prepared.values())

    def send(self, tensors: list[tuple[str, str]]) -> int:
        """Broadcast tensors, each named by its file and its name in it, as one flat buffer; its size in bytes."""
        prepared = self._prepared.pop(json.dumps(tensors), None)
        flat = _flat(tensors).to(self.device) if prepared is None else prepared
        dist.broadcast(flat, src=0, group=self._group)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return flat.numel()


def _flat(tensors: list[tuple[str, str]]) -> torch.Tensor:
    return torch.cat(list(_bytes_of(tensors)))


def _bytes_of(tensors: list[tuple[str, str]]) -> Iterator[torch.Tensor]:
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path, name in tensors:
            if path not in files:
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
            yield files[path].get_tensor(name).contiguous().flatten().view(torch.uint8)


def serve(orders: TextIO, answers: TextIO) -> None:
    """Until the orders end."""
    group: Group | None = None
    for line in orders:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if "listen" in order:
                group = Group(order["listen"], order["seconds"])
                answer["port"] = group.port
            elif group is None:
                answer["error"] = "not listening"
            elif "join" in order:
                group.join(**order["join"])
            elif "prepare" in order:
                answer["bytes"] = group.prepare(order["prepare"])
            else:
                answer["bytes"] = group.send(order["send"])
        except Exception as error:  # whatever it is, the other end has to know
            answer["error"] = f"{type(error).__name__}: {error}"[:300]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        serve(sys.stdin, answers)
