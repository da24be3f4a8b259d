"""Keeps the buffers of large payloads between two messages instead of asking the kernel for each.

glibc maps large buffers afresh and gives them back when they are freed; for payloads of megabytes the page faults then
cost more than Redis does (benchmarks/broker/). Invariant: at most KEEP bytes more than in use stay with the process; on
other C libraries nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

KEEP = 256 * 2**20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


@cache
def keep_large_buffers() -> bool:
    """Ask the C library once for this process; whether it agreed."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, 32 * 2**20), (_M_TRIM_THRESHOLD, KEEP), (_M_TOP_PAD, 16 * 2**20))
    agreed = [mallopt(name, value) == 1 for name, value in settings]
    return all(agreed)
