"""Files of closed groups that the next payloads are written over: in memory, what a file costs most is its fresh pages.

Invariant: a file is written over only while nobody has it mapped, and no reader takes it for the group that it held.
Whoever maps a file holds a shared lock on it (flock), which lasts as long as the mapping; whoever keeps it or writes
over it has the exclusive one or leaves it alone; and a reader looks again, under its lock, that the name is still the
file's. Locks are of one host, so this is for file systems in memory (tmpfs); elsewhere nothing is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")


def in_memory(folder: Path) -> bool:
    """Whether the folder lies in a tmpfs."""
    try:
        device, mounts = folder.stat().st_dev, _MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(line.split()[2] == number and line.partition(" - ")[2].startswith("tmpfs ") for line in mounts)


def lock(descriptor: int, kind: int) -> bool:
    """Take a lock on an open file, fcntl.LOCK_SH or LOCK_EX; False if somebody's is in the way."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Spares:
    """Files in `folder` that wait to be written over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: list[Path] = []
        folder.mkdir(exist_ok=True)

    def take(self, path: Path) -> int | None:
        """One of them under a new name, open for writing and locked until it is closed; None if there is none."""
        for spare in self._found():
            try:
                descriptor = os.open(spare, os.O_WRONLY | os.O_CLOEXEC)
            except OSError:  # another writer has it, or it is of another user
                continue
            try:
                if lock(descriptor, fcntl.LOCK_EX):
                    os.utime(descriptor)  # or a sweep would take it for what a crash left
                    spare.rename(path)
                    return descriptor
            except FileNotFoundError:  # another writer had it between the two
                pass
            os.close(descriptor)
        return None

    def _found(self) -> Iterator[Path]:
        """Those that were there when the folder was last read, which may be many; then those that are there now."""
        for again in (False, True):
            if again:
                self._seen = list(self.folder.iterdir())
            with contextlib.suppress(IndexError):
                while True:
                    yield self._seen.pop()

    def keep(self, paths: Sequence[Path], most: int) -> list[Path]:
        """Keep files of closed groups, delete those beyond `most` bytes in all; returns those that are still mapped."""
        kept, mapped = 0, []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # taken meanwhile
                kept += entry.stat().st_size
        for path in paths:
            with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor:
                size = os.fstat(descriptor).st_size
                if not lock(descriptor, fcntl.LOCK_EX):
                    mapped.append(path)
                elif kept + size > most:
                    path.unlink()
                else:
                    path.rename(self.folder / path.name)
                    kept += size
        return mapped

    def clear(self) -> None:
        """Delete all of them."""
        for spare in self.folder.iterdir():
            spare.unlink(missing_ok=True)
