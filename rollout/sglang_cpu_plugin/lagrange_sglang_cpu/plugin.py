"""SGLang plugin (entry point group `sglang.srt.plugins`), which SGLang loads in each of its processes.

Invariant: acts only when SGLANG_USE_CPU_ENGINE=1.

Host allocation (needed by sglang 0.5.23 for --enable-return-routed-experts): the buffer that collects the routes is
allocated through srt/mem_cache/pool_host/common.py, which registers it with CUDA whatever the device is ("Torch not
compiled with CUDA enabled"). On a CPU an ordinary allocation is what is wanted.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Entry point: replace the allocation for device "cpu"."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.mem_cache.pool_host import common  # only SGLang's own processes have it

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate


def _allocate(
    dims: Any,
    dtype: Any,
    device: Any,
    pin_memory: Any,
    allocator: Any,
    registration_granularity_bytes: Any = None,
) -> Any:
    """Nothing is pinned and nothing registered."""
    return allocator.allocate(dims, dtype=dtype, device=device)
