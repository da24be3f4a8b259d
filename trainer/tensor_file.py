"""Tensors in a safetensors file.

Invariant: whatever keeps a file from being written (a full disk, a folder that went away) is an OSError, as from any
other file. The library raises an exception of its own, which whoever is ready for a full disk would not catch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous tensors that share no memory. Raises OSError."""
    try:
        save_file(dict(tensors), str(path))
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
