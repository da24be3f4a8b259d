"""Files of closed groups that the next payloads are written over: in memory, what a file costs most is its fresh pages.

Invariant: a file is written over only while nobody has it mapped, and no reader takes it for the group that it held.
Whoever maps a file holds a shared lock on it (flock), which lasts as long as the mapping; whoever keeps it or writes
over it has the exclusive one or leaves it alone; and a reader looks again, under its lock, that the name is still the
file's. Locks are of one host, so this is for file systems in memory (tmpfs); elsewhere nothing is kept. A spare that
cannot be had (another user's, a link, gone with the folder) is no error: a file is made, or deleted, instead.
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
        device, mounts = folder.stat().st_dev, os.fsdecode(_MOUNTS.read_bytes()).splitlines()
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


def release(descriptor: int) -> None:
    """Close a file and give up its lock, which a child that was forked meanwhile would go on holding."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        release(descriptor)


def _renamed(path: Path, name: Path) -> bool:
    try:
        path.rename(name)
    except OSError:
        return False
    return True


class Spares:
    """Files in `folder` that wait to be written over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: list[Path] = []

    def take(self, path: Path) -> int | None:
        """One of them under a new name, open for writing and locked until it is closed; None if there is none."""
        for spare in self._found():
            try:
                descriptor = os.open(spare, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:  # another writer has it, or it is of another user
                continue
            if lock(descriptor, fcntl.LOCK_EX):
                os.utime(descriptor)  # or a sweep would take it for what a crash left
                if _renamed(spare, path):  # else another writer had it between the two
                    return descriptor
            release(descriptor)
        return None

    def _found(self) -> Iterator[Path]:
        """Those that were there when the folder was last read, which may be many; then those that are there now."""
        for again in (False, True):
            if again:
                self._seen = self._there()
            with contextlib.suppress(IndexError):
                while True:
                    yield self._seen.pop()

    def keep(self, paths: Sequence[Path], most: int) -> list[Path]:
        """Keep files of closed groups, delete those beyond `most` bytes in all; returns those that are still mapped."""
        kept, mapped = 0, []
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
        for spare in self._there():
            with contextlib.suppress(FileNotFoundError):  # taken meanwhile
                kept += spare.lstat().st_size
        for path in paths:
            with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor:
                size = os.fstat(descriptor).st_size
                if not lock(descriptor, fcntl.LOCK_EX):
                    mapped.append(path)
                elif kept + size <= most and _renamed(path, self.folder / path.name):
                    kept += size
                else:
                    path.unlink()
        return mapped

    def clear(self) -> None:
        """Delete all of them."""
        for spare in self._there():
            with contextlib.suppress(OSError):
                spare.unlink()

    def _there(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except OSError:
            return []
