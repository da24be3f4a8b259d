"""The process that broadcasts weights, against a receiver that joins and receives as SGLang 0.5.23 does."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from services.weight_sync.distributed import Reach, Sender, SenderFailed, buckets
from tests.weight_sync.live import write_version

REACH = Reach(
    Path(sys.executable), "127.0.0.1", 1, "gloo", 900, 60.0, {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
)


def receive(port: int, sizes: list[int]) -> list[bytes]:
    """Rank 1: srt/utils/common.py init_custom_process_group, then one flat buffer for each size."""
    import torch  # the other tests of this folder do without
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    limit = timedelta(seconds=60)
    store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=limit))
    store = c10d.PrefixStore("g", store)
    group, _ = c10d._new_process_group_helper(2, 1, [], c10d.Backend("gloo"), store, group_name="g", timeout=limit)
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    received = []
    for size in sizes:
        flat = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=group)
        received.append(flat.numpy().tobytes())
    dist.destroy_process_group(group)
    return received


async def test_every_tensor_arrives_bit_for_bit_in_its_bucket(tmp_path: Path) -> None:
    folder = Path(write_version(tmp_path, 3).path)
    parts = buckets(folder, REACH.bucket_bytes)
    sender = await Sender.start(REACH)
    try:
        port = (await sender.ask({"listen": "127.0.0.1", "seconds": 60}))["port"]
        receiving = asyncio.create_task(asyncio.to_thread(receive, port, [sum(t.bytes for t in p) for p in parts]))
        await sender.ask({"join": {"group": "g", "world": 2, "backend": "gloo"}})
        prepared = [[[t.path, t.name] for t in part] for part in parts[:2]]
        answer = await sender.ask({"prepare": prepared})
        assert answer["bytes"] == sum(t.bytes for part in parts[:2] for t in part)
        for part in parts:
            answer = await sender.ask({"send": [[t.path, t.name] for t in part]})
            assert answer["bytes"] == sum(t.bytes for t in part)
        content = b"".join(await receiving)
    finally:
        await sender.end()
    files, offset = load_file(folder / "model.safetensors"), 0
    for tensor in (t for part in parts for t in part):
        values = np.frombuffer(content, np.float32, tensor.bytes // 4, offset).reshape(tensor.shape)
        assert np.array_equal(values, files[tensor.name]), tensor.name
        offset += tensor.bytes
    assert offset == len(content)


async def test_a_sender_that_was_killed_or_cannot_start_is_an_error_and_not_a_wait() -> None:
    sender = await Sender.start(REACH)
    await sender.end()
    with pytest.raises(SenderFailed):
        await sender.ask({"listen": "127.0.0.1", "seconds": 60})
    with pytest.raises(SenderFailed, match="cannot be started"):
        await Sender.start(Reach(Path("/no/such/python"), "127.0.0.1", 1, "gloo", 1, 1.0))
