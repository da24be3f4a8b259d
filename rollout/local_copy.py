"""The newest version's files on the engine's own host (`weights.transport: delta`), made before anybody pauses.

Invariant: a folder `v000123` under the root is complete and has the checksums of that version's manifest; it is built
aside and appears by a rename. It is built from the version that is there already and the published delta; whatever does
not fit (another base, a torn file, a wrong checksum, no delta) makes a full copy instead, and is counted. Besides the
version that is being built one older one is kept: the base, which the engine may be loading.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from broker import delta
from broker.errors import BrokerError
from broker.types import VersionRecord
from rollout.ports import EngineRegistry

LOG = structlog.get_logger()
LOOK_S = 1.0  # between two looks at what is published; a message wakes it sooner


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A version on this host. bytes_read: of the shared files. problem: why no delta was applied, "" if one was."""

    version: int
    folder: Path
    bytes_read: int
    problem: str = ""


class Keeper:
    """Has the newest published version under `root`; `run` is its whole life, and removes everything at its end.

    latest: what lies there now, None before the first.
    """

    def __init__(self, engine_id: str, root: Path, registry: EngineRegistry) -> None:
        self.latest: LocalCopy | None = None
        self._engine_id, self._root, self._registry = engine_id, root, registry
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        changes = self._registry.listen(lambda message: _pass_on(message, loop, self._wake.set))
        try:
            while True:
                self._wake.clear()
                try:
                    await asyncio.to_thread(self._look)
                except (delta.CannotApply, OSError, BrokerError) as error:
                    LOG.warning("no local copy of the weights", problem=str(error))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_S)
        finally:
            changes.close()
            shutil.rmtree(self._root, ignore_errors=True)

    def _look(self) -> None:
        published = self._registry.published()
        if published is None or (self.latest is not None and self.latest.version == published.version):
            return
        began = time.monotonic()
        made = self.latest = bring(published, self._root)
        seconds = round(time.monotonic() - began, 3)
        LOG.info("local copy", version=made.version, bytes=made.bytes_read, seconds=seconds, problem=made.problem)
        self._registry.heartbeat_engine(self._engine_id, made.version, str(made.folder))


def _pass_on(message: str, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
    if message.startswith(("version", "listening")):
        loop.call_soon_threadsafe(wake)


def bring(record: VersionRecord, root: Path) -> LocalCopy:
    """Have a published version under `root`. Raises delta.CannotApply, OSError (a full disk) if it cannot be had."""
    published, folder = Path(record.path), root / f"v{record.version:06d}"
    root.mkdir(parents=True, exist_ok=True)
    if folder.exists() and delta.checksum_of(folder) == record.checksum:
        return LocalCopy(record.version, folder, 0)
    base = _only_the_newest(root, besides=folder)
    if delta.checksum_of(published) != record.checksum:
        raise delta.CannotApply(f"{published.name}: the manifest is not the one that was published")
    aside = root / f".{folder.name}.partial"
    problem = "there is no version to build on"
    if base is not None:
        try:
            read = delta.apply(published, base, _empty(aside))
            aside.rename(folder)
            return LocalCopy(record.version, folder, read)
        except (delta.CannotApply, OSError) as error:
            problem = str(error)
    read = delta.copy(published, _empty(aside))
    aside.rename(folder)
    return LocalCopy(record.version, folder, read, problem)


def _only_the_newest(root: Path, besides: Path) -> Path | None:
    """Remove all but the newest complete version; that one, or None."""
    complete = sorted((p for p in root.glob("v*") if p != besides), key=lambda p: (len(p.name), p.name))
    for path in [besides, *root.glob(".*.partial"), *complete[:-1]]:
        shutil.rmtree(path, ignore_errors=True)
    return complete[-1] if complete else None


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
