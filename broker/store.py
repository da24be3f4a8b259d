"""Where payloads lie: a port, and two places: Redis keys, or files in a folder that all hosts of the run share.

Invariant: bytes become visible under a group's id only through the submit transition, which records where they are;
what was staged for a submission that never came disappears (Redis: it expires; folder: `sweep`). The transitions free
a payload: a key at once, a file by its name on the list `freed`, from which any client deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from broker import wire
from broker.commands import Buffer, Command, Payload
from broker.connection import Connection, OutOfMemory
from broker.errors import BrokerError
from broker.keys import Keys
from broker.spares import Spares, in_memory, lock, release
from broker.types import Group

STAGED_MS = 600_000
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCKED_S = 1.0  # whoever looks for spares has the lock of a payload for moments at most
_LOOK_AGAIN_S = 0.001
_PIECES = 1000  # of one writev; the limit of Linux is 1024


@dataclass(frozen=True, slots=True)
class Staged:
    """A payload on its way in: `commands` to send before the submit transition, and its `key` or its `file`."""

    payload: Payload
    commands: tuple[Command, ...] = ()
    key: str = ""
    file: str = ""


class PayloadStore(Protocol):
    """Payloads by group id."""

    def stage(self, group_id: int, payload: Payload) -> Staged:
        """Lay bytes aside. OutOfMemory if there is no room."""
        ...

    def settle(self, staged: Staged, accepted: bool) -> None:
        """The answer of the submit transition is known."""
        ...

    def asks(self, group_ids: Sequence[int]) -> Command:
        """What to ask Redis in order to fetch the bytes of accepted groups, at least one."""
        ...

    def found(self, answer: Sequence[Any]) -> list[bytes | memoryview | None]:
        """Their bytes, from Redis' answer; None where there are none."""
        ...

    def collect(self) -> int:
        """Delete what transitions have freed; how many."""
        ...

    def sweep(self) -> int:
        """Delete what crashed clients left behind; how many."""
        ...

    def end(self) -> None:
        """The run has ended: give back what only its speed was for."""
        ...


class RedisPayloadStore:
    """One Redis key for each payload, in the run's own slot."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    def stage(self, group_id: int, payload: Payload) -> Staged:
        """See PayloadStore; a staged payload expires after ten minutes."""
        name = self._keys.staged(group_id)
        return Staged(payload, (("SET", name, payload, "PX", STAGED_MS),), key=name)

    def settle(self, staged: Staged, accepted: bool) -> None:
        """Nothing: the transition moved or freed the key."""

    def asks(self, group_ids: Sequence[int]) -> Command:
        """See PayloadStore."""
        return ("MGET", *map(self._keys.payload, group_ids))

    def found(self, answer: Sequence[Any]) -> list[bytes | memoryview | None]:
        """See PayloadStore."""
        return list(answer)

    def collect(self) -> int:
        """Nothing: the transitions free keys themselves."""
        return 0

    def sweep(self) -> int:
        """Nothing: staged keys expire."""
        return 0

    def end(self) -> None:
        """Nothing is kept."""


class FolderPayloadStore:
    """One file for each payload under `folder`: written aside, synced, renamed; read by mapping it.

    A file's name holds the group's id and its checksum, so no two contents share a name. The folder is one that all
    hosts see under the same path; on one host it may lie in memory (/dev/shm), where files of closed groups are written
    over (broker/spares.py).
    """

    def __init__(self, connection: Connection, keys: Keys, folder: Path) -> None:
        self._connection = connection
        self._keys = keys
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._spares = Spares(folder / "spare") if in_memory(folder) else None
        except OSError as error:
            raise BrokerError(
                f"redis.payload_folder: {folder} cannot be made ({error.strerror}). Name a folder that every host "
                "of the run can write."
            ) from error

    def stage(self, group_id: int, payload: Payload) -> Staged:
        """See PayloadStore."""
        name = f"{group_id}-{payload.checksum}"
        self._write(name, payload)
        return Staged(payload, file=name)

    def settle(self, staged: Staged, accepted: bool) -> None:
        """A refused file goes; an accepted one that a sweep took meanwhile is written again."""
        path = self.folder / staged.file
        if not accepted:
            path.unlink(missing_ok=True)
        elif not path.exists():
            self._write(staged.file, staged.payload)

    def asks(self, group_ids: Sequence[int | str]) -> Command:
        """See PayloadStore: the groups' records, which name their files."""
        return ("MGET", *map(self._keys.group, group_ids))

    def found(self, answer: Sequence[Any]) -> list[bytes | memoryview | None]:
        """See PayloadStore; the bytes are the file's pages, mapped."""
        return [None if name is None else self._map(name) for name in _files(answer)]

    def collect(self) -> int:
        """See PayloadStore. In memory, files are kept to be written over: with them, the run stays within its limit."""
        freed, stored, most = self._connection.commands(
            [
                ("LPOP", self._keys.named("freed"), 1000),
                ("HGET", self._keys.named("ledger"), "bytes"),
                ("HGET", self._keys.policy, "max_bytes"),
            ]
        )
        paths = [self.folder / name.decode() for name in freed or ()]
        if self._spares is None:
            for path in paths:
                path.unlink(missing_ok=True)
            return len(paths)
        mapped = self._spares.keep(paths, int(most or 0) - int(stored or 0)) if paths else []
        if mapped:  # their turn comes when the arrays are gone
            self._connection.commands([("RPUSH", self._keys.named("freed"), *(path.name for path in mapped))])
        return len(paths) - len(mapped)

    def end(self) -> None:
        """See PayloadStore; files that are still mapped can be deleted, too."""
        if self._spares is not None:
            self._spares.clear()
            while names := self._connection.commands([("LPOP", self._keys.named("freed"), 1000)])[0]:
                for name in names:
                    (self.folder / name.decode()).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Files older than ten minutes, by the clock that dated them, that no group's record names."""
        before, old = self._now() - STAGED_MS / 1000, []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file() and entry.stat().st_mtime < before:
                    old.append(entry.name)
        ids = [_id_of(name) for name in old]
        known = _files(self._connection.commands([self.asks(ids)])[0]) if ids else []
        gone = [name for name, blob in zip(old, known, strict=True) if blob != name]
        for name in gone:
            (self.folder / name).unlink(missing_ok=True)
        return len(gone)

    def _now(self) -> float:
        """Seconds since 1970 by the folder's own clock: it may lie on another machine, whose clock is not ours."""
        os.utime(self.folder)  # without a time: a network file system's server dates it
        return self.folder.stat().st_mtime

    def _write(self, name: str, payload: Payload) -> None:
        aside = self.folder / f".{name}.{uuid.uuid4().hex[:8]}"
        try:
            descriptor = self._spares.take(aside) if self._spares else None
            if descriptor is None:
                descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
            try:
                _write_all(descriptor, payload.parts)
                os.ftruncate(descriptor, payload.size)  # one that is written over may have been longer
                os.fsync(descriptor)
            finally:
                release(descriptor)
            aside.rename(self.folder / name)
        except OSError as error:
            aside.unlink(missing_ok=True)
            if error.errno in _FULL:
                if self._spares:
                    self._spares.clear()
                raise OutOfMemory(f"redis.payload_folder: {self.folder} is full") from error
            raise BrokerError(f"redis.payload_folder: {self.folder} cannot be written ({error.strerror}).") from error

    def _map(self, name: str) -> memoryview | None:
        path, end = self.folder / name, time.monotonic() + _LOCKED_S
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                # Pages are mapped as the checksum comes to them, some at a time; with MAP_POPULATE, each by itself.
                if self._spares is None or (lock(descriptor, fcntl.LOCK_SH) and _is_named(descriptor, path)):
                    return memoryview(mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
            except ValueError:  # an empty file
                return memoryview(b"")
            finally:
                os.close(descriptor)
            if time.monotonic() >= end:
                return None
            time.sleep(_LOOK_AGAIN_S)


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    left: list[Any] = [memoryview(part) for part in parts]
    while left:
        done = os.writev(descriptor, left[:_PIECES])
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left and done:
            left[0] = left[0][done:]


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that has the name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _files(records: Sequence[bytes | None]) -> list[str | None]:
    """The file that each group's record names."""
    return [None if record is None else msgspec.msgpack.decode(record).get("blob") for record in records]


def _id_of(name: str) -> str:
    return name.lstrip(".").split("-")[0]


def store_of_run(connection: Connection, keys: Keys) -> tuple[PayloadStore | None, wire.Codec]:
    """The place and the codec that the run's policy names; None if there is no policy."""
    names = ("payloads", "payload_folder", "compression")
    asked = connection.commands([("HMGET", keys.policy, *names)])[0]
    payloads, folder, compression = ("" if value is None else value.decode() for value in asked)
    codec: wire.Codec = "zstd" if compression == "zstd" else "raw"
    if payloads == "folder":
        return FolderPayloadStore(connection, keys, Path(folder) / keys.run), codec
    return (RedisPayloadStore(connection, keys) if payloads else None), codec


def submission(group: Group, staged: Staged) -> list[str | int]:
    """What lua/submit.lua wants to know of one group."""
    oldest = group.oldest_version
    return [
        group.group_id,
        group.worker,
        staged.payload.size,
        staged.payload.checksum,
        "" if oldest is None else oldest,
        group.response_tokens,
        sum(t.tokens for t in group.trajectories),
        len(group.trajectories),
        staged.file,
        group.task,
    ]
