"""The plainest way to broadcast weights into an SGLang engine: what `distributed` is measured against.

    PYTHON_OF_THE_ENGINE benchmarks/plain_broadcast.py URL API_KEY BUCKET_BYTES

For each line `FOLDER NAME` of standard input it brings the folder's weights into the engine, which is idle and paused,
and writes the seconds. Buckets lie in memory before the clock starts; one request at a time, and nothing else. It
imports nothing of this project: it is what SGLang takes by itself.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

GROUP = "plain"
LIMIT = timedelta(seconds=60)
dist: Any = torch.distributed
c10d: Any = dist.distributed_c10d  # what SGLang's side uses of it has no public name


class Plain:
    """Rank 0 of a group with one engine."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key, self._beside = url, key, ThreadPoolExecutor(1)
        store: Any = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
        body = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
        told = self._beside.submit(self.post, "/init_weights_update_group", group_name=GROUP, backend="gloo", **body)
        store = dist.PrefixStore(GROUP, store)
        self._group, _ = c10d._new_process_group_helper(
            2, 0, [], c10d.Backend("gloo"), store, group_name=GROUP, timeout=LIMIT
        )
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}
        told.result()

    def post(self, path: str, **body: object) -> None:
        """Ask the engine; an answer other than success is an error."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = answer.read()
        if not json.loads(content)["success"]:
            raise RuntimeError(f"{path}: {content!r}")

    def push(self, folder: Path, name: str, limit: int) -> float:
        """Seconds."""
        parts = [
            (part, torch.cat([t.flatten().view(torch.uint8) for t in part.values()])) for part in cut(folder, limit)
        ]
        began = time.perf_counter()
        self.post("/begin_weight_update")
        for number, (part, flat) in enumerate(parts, 1):
            told = self._beside.submit(
                self.post,
                "/update_weights_from_distributed",
                names=list(part),
                dtypes=[str(t.dtype).removeprefix("torch.") for t in part.values()],
                shapes=[list(t.shape) for t in part.values()],
                group_name=GROUP,
                load_format="flattened_bucket",
                weight_version=name,
                flush_cache=number == len(parts),
            )
            dist.broadcast(flat, src=0, group=self._group)
            told.result()
        self.post("/end_weight_update")
        return time.perf_counter() - began


def cut(folder: Path, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """A version's tensors in buckets of about `limit` bytes."""
    part: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > limit:
                yield part
                part = {}
            part[name] = tensor
    yield part


def main(url: str, key: str, limit: int) -> None:
    """Until standard input ends."""
    plain = Plain(url, key)
    for line in sys.stdin:
        folder, name = line.split()
        sys.stdout.write(f"{plain.push(Path(folder), name, limit)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
