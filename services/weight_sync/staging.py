"""Staging: a version is read and checked in full before any engine is paused for it.

Invariant: a `Staged` version was complete when it was read: every file that its manifest names has the size and the
checksum that the manifest gives, no weights file is there that it does not name. Reading brings the files into the page
cache, so that the engine's load, for which requests wait, reads from memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.delta import MANIFEST
from broker.types import VersionRecord
from services.weight_sync.checksums import UnreadableWeights, expected_checksums

MAX_MANIFEST_BYTES = 16 << 20
BLOCK_BYTES = 4 << 20
READERS = 8  # files that are read and hashed at the same time: one core hashes 0.5 to 2 GB/s, a large model has 60 GB


class IncompleteVersion(Exception):
    """The folder of a version is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that may be loaded. checksums: what an engine must report for it, empty if that cannot be known."""

    record: VersionRecord
    folder: Path
    bytes: int
    checksums: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The version's number."""
        return self.record.version


def stage(record: VersionRecord, exact_dtype: str | None) -> Staged:
    """Check a version's folder against its manifest; reads every byte.

    exact_dtype: the engines' number format if their parameter checksums can be derived from the files, else None.
    Raises IncompleteVersion.
    """
    folder = Path(os.path.abspath(record.path))  # noqa: PTH100 - a link stays the name that engines know
    manifest = _read_manifest(folder)
    if manifest.get("version", record.version) != record.version:
        raise IncompleteVersion(
            f"the manifest of version {record.version} is that of version {manifest.get('version')}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise IncompleteVersion(f"the manifest of version {record.version} names no files")
    with ThreadPoolExecutor(READERS) as readers:
        total = sum(readers.map(lambda item: _check(folder, str(item[0]), item[1]), files.items()))
    unnamed = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in files)
    if unnamed:
        raise IncompleteVersion(f"version {record.version} holds {unnamed[0]}, which its manifest does not name")
    try:
        sums = expected_checksums(folder, exact_dtype) if exact_dtype else {}
    except (UnreadableWeights, OSError) as error:
        raise IncompleteVersion(f"version {record.version}: {_reason(error)}") from error
    return Staged(record, folder, total, sums)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        with (folder / MANIFEST).open("rb") as file:
            manifest = json.loads(file.read(MAX_MANIFEST_BYTES))
    except (OSError, ValueError) as error:
        raise IncompleteVersion(f"{folder.name}: the manifest cannot be read ({_reason(error)})") from error
    if not isinstance(manifest, dict):
        raise IncompleteVersion(f"{folder.name}: the manifest is no object")
    return manifest


def _check(folder: Path, name: str, entry: Any) -> int:
    """Size in bytes of a file that is as the manifest says."""
    if "/" in name or name in ("", ".", ".."):
        raise IncompleteVersion(f"{folder.name}: the manifest names a file outside the folder")
    wanted = entry.get("sha256") if isinstance(entry, dict) else entry
    size = entry.get("bytes") if isinstance(entry, dict) else None
    digest = hashlib.sha256()
    try:
        with (folder / name).open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
            found = file.tell()
    except OSError as error:
        raise IncompleteVersion(f"{folder.name}/{name}: {_reason(error)}") from error
    if size is not None and size != found:
        raise IncompleteVersion(f"{folder.name}/{name} has {found} bytes, the manifest says {size}")
    if digest.hexdigest() != wanted:
        raise IncompleteVersion(f"{folder.name}/{name} does not have the checksum that the manifest gives")
    return found


def _reason(error: Exception) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
