"""Folders of published weights: names, checksum, and which may go.

Invariant: a folder is removed only after its version was forgotten in the registry, and never while it is among the
newest that the configuration keeps or an engine serves it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from trainer.ports import TrainerBroker

_NAME = re.compile(r"^v(\d{6,})$")


def folder_of(root: Path, version: int) -> Path:
    """root/v000123."""
    return root / f"v{version:06d}"


def checksum_of(folder: Path) -> str:
    """SHA-256 of the folder's manifest, which vouches for every file in it."""
    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


def versions_on_disk(root: Path) -> list[int]:
    """Versions that have a folder, rising."""
    if not root.is_dir():
        return []
    return sorted(int(m[1]) for path in root.iterdir() if (m := _NAME.match(path.name)))


def removable(on_disk: Iterable[int], in_use: Collection[int], keep: int) -> list[int]:
    """Versions whose weights nobody needs: not in use and not among the `keep` newest. keep >= 1."""
    ordered = sorted(on_disk)
    return [v for v in ordered[: max(len(ordered) - keep, 0)] if v not in in_use]


def remove_leftover(folder: Path) -> None:
    """Delete what an export left that was never announced (its process died in between)."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_old(broker: TrainerBroker, root: Path, keep: int) -> list[int]:
    """Forget and delete what is removable; returns those versions."""
    in_use = {engine.version for engine in broker.engines()}
    gone = removable(versions_on_disk(root), in_use, keep)
    for version in gone:
        broker.forget_version(version)
        shutil.rmtree(folder_of(root, version), ignore_errors=True)
    return gone
