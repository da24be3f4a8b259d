"""Folders of published weights: names, and which may go.

Invariant: a folder is removed only after its version was forgotten in the registry, and never while it is among the
newest that the configuration keeps, an engine serves it, or an engine may be loading it. A lease needs no folder: what
it samples comes from the engine's memory, and an engine that loads again takes the newest version.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import structlog

from broker import delta
from broker.types import EngineRecord, EngineState, VersionRecord
from trainer.ports import TrainerBroker

log = structlog.get_logger(__name__)
BUSY = frozenset({EngineState.PAUSING, EngineState.UPDATING, EngineState.LOADING, EngineState.VERIFYING})

_NAME = re.compile(r"^v(\d{6,})$")


def folder_of(root: Path, version: int) -> Path:
    """root/v000123."""
    return root / f"v{version:06d}"


def versions_on_disk(root: Path) -> list[int]:
    """Versions that have a folder, rising."""
    if not root.is_dir():
        return []
    return sorted(int(m[1]) for path in root.iterdir() if (m := _NAME.match(path.name)))


def removable(on_disk: Iterable[int], in_use: Collection[int], keep: int) -> list[int]:
    """Versions whose weights nobody needs: not in use and not among the `keep` newest. keep >= 1."""
    ordered = sorted(on_disk)
    return [v for v in ordered[: max(len(ordered) - keep, 0)] if v not in in_use]


def needed_by(engine: EngineRecord, published: Sequence[VersionRecord], update_ms: float) -> set[int]:
    """Versions that an engine may read from: the one that it serves, and while it changes all that it may have chosen.

    It chooses the newest of the moment in which an update begins. That was at most update_ms, the limit of one update,
    before its last change of state, so that moment's newest version and all later ones are kept.
    """
    needed = {engine.version} if engine.version >= 0 else set()
    if engine.state not in BUSY:
        return needed
    earliest = engine.since_ms - update_ms
    rising = sorted(published, key=lambda r: r.version)  # their times may not rise: clocks are set back
    first = max((r.version for r in takewhile(lambda r: r.published_ms <= earliest, rising)), default=-1)
    return needed | {r.version for r in published if r.version >= first}


def write_delta(root: Path, version: int) -> None:
    """Write what changed since the version before, beside the files; whoever finds none takes the full files."""
    before = max((v for v in versions_on_disk(root) if v < version), default=None)
    if before is None:
        return
    try:
        made = delta.write(folder_of(root, before), folder_of(root, version))
    except (delta.CannotApply, OSError) as error:
        log.warning("delta.failed", version=version, problem=str(error))
        return
    log.info("delta.written", version=version, base=before, changed=made.changed, words=made.words, bytes=made.bytes)


def remove_unfinished(root: Path) -> None:
    """Delete the folders of `root` that somebody began to write and never finished: no later one takes their names."""
    for folder in root.glob(".*.partial"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftover(folder: Path) -> None:
    """Delete what an export left that was never announced (its process died in between)."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_old(broker: TrainerBroker, root: Path, keep: int, update_s: float) -> list[int]:
    """Forget and delete what is removable; returns those versions. update_s: limit of one update, in seconds."""
    published = broker.versions()
    in_use = {version for engine in broker.engines() for version in needed_by(engine, published, 1000 * update_s)}
    gone = removable(versions_on_disk(root), in_use, keep)
    for version in gone:
        broker.forget_version(version)
        shutil.rmtree(folder_of(root, version), ignore_errors=True)
    return gone
