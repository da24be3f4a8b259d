"""Safetensors files, written tensor by tensor, and the manifest that vouches for them.

Invariant: a folder with a manifest.json that `verify_manifest` accepts holds exactly the bytes that were written. No
torch.

manifest.json: {"format": 1, "algorithm": "sha256", "files": {name: {"bytes", "sha256"}},
"tensors": {name: {"dtype", "shape", "file", "sha256"}}}; a tensor's checksum is of its raw little-endian bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to write. dtype: the format's word, "F32" or "BF16". bytes: size of the raw buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class SafetensorsWriter:
    """Writes the tensors of one file in the order of `entries`, holding none of them.

    The file is on disk after `close`; `abandon` gives up an unfinished one.
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self.path = path
        self._entries = list(entries)
        self._next = 0
        self._hash = hashlib.sha256()
        self._bytes = 0
        self.tensors: dict[str, dict[str, Any]] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in self._entries:
            header[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.bytes],
            }
            offset += entry.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = self.path.open("xb")
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def write(self, name: str, data: memoryview) -> None:
        """Append the tensor that is due; ValueError if another one, or another size, was announced."""
        entry = self._entries[self._next]
        if (entry.name, entry.bytes) != (name, data.nbytes):
            raise ValueError(f"{self.path.name}: {name} of {data.nbytes} bytes where {entry} was announced")
        self._next += 1
        flat = data.cast("B") if data.nbytes else memoryview(b"")
        self._put(flat)
        self.tensors[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "file": self.path.name,
            "sha256": hashlib.sha256(flat).hexdigest(),
        }

    def close(self) -> dict[str, Any]:
        """Finish the file, durably; returns its entry of the manifest. ValueError if a tensor is missing."""
        if self._next != len(self._entries):
            self.abandon()
            raise ValueError(f"{self.path.name}: {len(self._entries) - self._next} announced tensors were not written")
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        """Close the file as it is."""
        with contextlib.suppress(OSError):
            self._file.close()


def checksum(path: Path) -> dict[str, Any]:
    """{"bytes", "sha256"} of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and fsync it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that the names in it survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify_manifest(folder: Path, name: str = MANIFEST) -> list[str]:
    """What is wrong with a folder, one sentence each; empty if every file that its manifest names is intact."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / name).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{folder / name}: no usable manifest ({error})"]
    problems = []
    for file, want in files.items():
        try:
            have = checksum(folder / file)
        except OSError as error:
            problems.append(f"{folder / file}: {error.strerror}")
            continue
        if have != {key: want.get(key) for key in ("bytes", "sha256")}:
            problems.append(f"{folder / file}: differs from its checksum")
    return problems
