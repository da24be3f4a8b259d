"""Payloads in memory: files of closed groups are written over, and never under the arrays of a reader."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.queue import Broker
from broker.spares import Spares, in_memory, lock
from broker.store import FolderPayloadStore
from broker.types import Group, Ticket
from tests.broker.helpers import Run, finished
from tests.conftest import RUN, ConfigFactory

MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not in_memory(MEMORY), reason="/dev/shm is no tmpfs here")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of payloads in memory."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as made:
        yield Path(made)


@pytest.fixture
def run(broker: Broker, make_config: ConfigFactory, folder: Path) -> Run:
    """A run whose payloads lie there."""
    broker.initialise(make_config(**{"redis.payloads": "folder", "redis.payload_folder": str(folder)}))
    return Run(broker).start()


def inodes(folder: Path) -> dict[int, str]:
    """The files of groups."""
    return {path.stat().st_ino: path.name for path in (folder / RUN).iterdir() if path.is_file()}


def spares(folder: Path) -> list[Path]:
    return list((folder / RUN / "spare").iterdir())


def tokens(group: Group) -> list[bytes]:
    return [t.response_ids.tobytes() for t in group.trajectories]


def submit(run: Run, response: int) -> Ticket:
    ticket = run.admit()
    assert run.broker.submit(finished(ticket, RUN, response=response)) == "accepted"
    return ticket


def close(run: Run) -> None:
    """Train and commit what is ready."""
    run.step(run.pull())
    run.publish()
    run.broker.commit(run.epoch, run.version)


def test_a_file_is_written_over_once_its_arrays_are_gone_and_not_before(run: Run, folder: Path) -> None:
    first, _ = submit(run, 900), submit(run, 900)
    old = inodes(folder)
    (held,) = run.broker.fetch([first.group_id])
    before = tokens(held)
    close(run)
    assert len(spares(folder)) == 1  # the other one
    submit(run, 800), submit(run, 800)
    assert len(old.keys() & inodes(folder).keys()) == 2  # the one that is mapped, and the one that was written over
    assert tokens(held) == before
    del held
    close(run)
    assert len(spares(folder)) == 3
    again = [submit(run, 7), submit(run, 1000)]
    assert len(spares(folder)) == 1
    for group, response in zip(run.broker.fetch([t.group_id for t in again]), (7, 1000), strict=True):
        sent = finished(again[0], RUN, response=response)
        assert tokens(group) == tokens(sent)


def late(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """What happens between a reader's opening of a file and its lock."""

    def slow(*arguments: Any) -> bool:
        monkeypatch.undo()
        meanwhile()
        return lock(*arguments)

    monkeypatch.setattr("broker.store.lock", slow)


def read(run: Run, group_id: int) -> list[bytes | memoryview | None]:
    place = run.broker._store()
    return place.found(run.broker._connection.commands([place.asks([group_id])])[0])


def test_a_reader_that_is_late_finds_nothing_rather_than_the_next_group(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = submit(run, 900), submit(run, 900)

    def closed_and_written_over() -> None:
        close(run)
        submit(run, 900), submit(run, 900)
        assert spares(folder) == []

    late(monkeypatch, closed_and_written_over)
    assert read(run, first.group_id) == [None]


def test_a_reader_finds_nothing_in_a_file_that_is_being_written_over(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = submit(run, 900), submit(run, 900)
    place = run.broker._store()
    assert isinstance(place, FolderPayloadStore)
    kept = place._spares
    assert kept is not None
    taken: list[int] = []

    def half_written() -> None:
        close(run)
        for i in range(2):
            descriptor = kept.take(folder / RUN / f".aside{i}")
            assert descriptor is not None
            taken.append(descriptor)

    late(monkeypatch, half_written)
    assert read(run, first.group_id) == [None]
    for descriptor in taken:
        os.close(descriptor)


def test_a_spare_is_taken_by_one_writer_and_not_while_a_late_reader_holds_it(folder: Path) -> None:
    kept, path = Spares(folder / "spare"), folder / "1-00"
    path.write_bytes(b"bytes")
    assert kept.keep([path], 5) == []
    with (folder / "spare" / path.name).open("rb") as reader:
        assert lock(reader.fileno(), fcntl.LOCK_SH)
        assert kept.take(folder / "aside") is None
    taken = kept.take(folder / "aside")
    assert taken is not None
    assert kept.take(folder / "another") is None
    os.close(taken)


def test_no_more_is_kept_than_the_limit_leaves(run: Run, folder: Path) -> None:
    submit(run, 900), submit(run, 900)
    size = run.broker.snapshot().payload_bytes
    client, policy = run.broker._connection.client, run.broker._keys.policy
    client.hset(policy, "max_bytes", size - 1)
    close(run)
    assert len(spares(folder)) == 1
    assert inodes(folder) == {}


def test_a_run_that_ended_leaves_no_file(run: Run, folder: Path) -> None:
    first, _ = submit(run, 900), submit(run, 900)
    held = run.broker.fetch([first.group_id])
    close(run)
    assert spares(folder)
    run.broker.set_status("finished")
    assert (inodes(folder), spares(folder)) == ({}, [])
    assert tokens(held[0]) == tokens(finished(first, RUN, response=900))


def test_a_reader_finds_a_payload_that_was_submitted_again_while_it_looked(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = submit(run, 900)
    (name,) = inodes(folder).values()
    again = folder / RUN / ".again"
    again.write_bytes((folder / RUN / name).read_bytes())
    late(monkeypatch, lambda: again.rename(folder / RUN / name))
    (group,) = run.broker.fetch([ticket.group_id])
    assert tokens(group) == tokens(finished(ticket, RUN, response=900))


def test_a_reader_waits_for_a_writer_that_took_the_payload_for_a_spare(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = submit(run, 900)
    (name,) = inodes(folder).values()
    with (folder / RUN / name).open("rb") as writer:
        assert lock(writer.fileno(), fcntl.LOCK_EX)
        monkeypatch.setattr("broker.store.time.sleep", lambda _: fcntl.flock(writer.fileno(), fcntl.LOCK_UN))
        (group,) = run.broker.fetch([ticket.group_id])
    assert tokens(group) == tokens(finished(ticket, RUN, response=900))


def test_a_child_that_a_writer_forks_meanwhile_does_not_keep_readers_out(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(run, 900), submit(run, 900)
    close(run)
    copies: list[int] = []  # a child has such copies of the descriptors

    def forked(descriptor: int, size: int) -> None:
        copies.append(os.dup(descriptor))
        os.truncate(descriptor, size)

    monkeypatch.setattr("broker.store.os.ftruncate", forked)
    ticket = submit(run, 900)
    monkeypatch.undo()
    assert len(spares(folder)) == 1
    (group,) = run.broker.fetch([ticket.group_id])
    assert tokens(group) == tokens(finished(ticket, RUN, response=900))
    for descriptor in copies:
        os.close(descriptor)


def test_a_run_goes_on_without_the_folder_of_spares(run: Run, folder: Path) -> None:
    submit(run, 900), submit(run, 900)
    close(run)
    shutil.rmtree(folder / RUN / "spare")
    submit(run, 900), submit(run, 900)
    close(run)
    assert len(spares(folder)) == 2
    shutil.rmtree(folder / RUN / "spare")
    run.broker.set_status("finished")
    assert inodes(folder) == {}


def test_spares_in_a_folder_of_another_user_are_neither_taken_nor_kept(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(run, 900), submit(run, 900)
    close(run)
    rename = Path.rename

    def refused(path: Path, name: Path) -> Path:
        if "spare" in (path.parent.name, name.parent.name):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return rename(path, name)

    monkeypatch.setattr(Path, "rename", refused)
    submit(run, 900), submit(run, 900)
    assert len(inodes(folder)) == 2
    close(run)
    assert (len(inodes(folder)), len(spares(folder))) == (0, 2)


def test_nothing_is_written_through_a_link_among_the_spares(folder: Path) -> None:
    kept, other = Spares(folder / "spare"), folder / "other"
    other.write_bytes(b"bytes")
    kept.keep([], 0)
    (folder / "spare" / "1-00").symlink_to(other)
    assert kept.take(folder / "aside") is None
    kept.clear()
    assert other.read_bytes() == b"bytes"


def test_names_of_mounts_need_not_be_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(
        b"1 0 0:999 / /media/caf\xe9 rw - vfat /dev/sdz rw\n" + Path("/proc/self/mountinfo").read_bytes()
    )
    monkeypatch.setattr("broker.spares._MOUNTS", mounts)
    assert in_memory(MEMORY)
