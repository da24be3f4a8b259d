"""What the fake engine's "model" computes.

Invariant: functions of (version, position, token), so that a test can tell which weights made a token.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np


def fake_log_prob(version: str, position: int, token: int) -> float:
    """The log-prob that the fake gives to `token` at sequence position `position` under `version`."""
    digest = hashlib.sha256(f"{version}/{position}/{token}".encode()).digest()
    return -(1 + int.from_bytes(digest[:2], "little") / 65536.0)


def is_fake_log_prob(value: float, version: str, position: int, token: int) -> bool:
    """Whether `value` is what `version` gives to `token` at `position` (after a trip through float32)."""
    return math.isclose(value, fake_log_prob(version, position, token), rel_tol=1e-6)


def fake_routes(version: str, rows: int, layers: int, top_k: int, experts: int) -> np.ndarray:
    """int32 [rows, layers, top_k]: the fake's routes of positions 0 .. rows - 1 under `version`."""
    base = int.from_bytes(hashlib.sha256(version.encode()).digest()[:2], "little")
    position, layer, k = np.meshgrid(np.arange(rows), np.arange(layers), np.arange(top_k), indexing="ij")
    return ((base + position * 3 + layer + k) % experts).astype(np.int32)


def folder_checksum(folder: str | Path) -> str:
    """16 hex digits over the names and bytes of a folder's *.safetensors: changes when a weight does."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
