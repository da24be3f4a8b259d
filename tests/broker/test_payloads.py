"""Payload stores: the same behaviour by Redis keys and by a shared folder, compressed or not."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from broker.errors import CorruptPayload
from broker.queue import Broker
from broker.store import STAGED_MS, FolderPayloadStore
from broker.types import InvalidTrajectory, Refused
from tests.broker.helpers import ENGINE, WORKER, Run, finished
from tests.conftest import RUN, ConfigFactory

FOLDER = {"redis.payloads": "folder"}
PLACES = [{}, FOLDER, {"redis.compression": "zstd"}, {**FOLDER, "redis.compression": "zstd"}]


@pytest.fixture(autouse=True)
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever tests keep their files: in memory, some stay to be written over (test_spares.py)."""
    monkeypatch.setattr("broker.store.in_memory", lambda folder: False)


def begin(broker: Broker, make_config: ConfigFactory, folder: Path, place: dict[str, str]) -> Run:
    broker.initialise(make_config(**{"redis.payload_folder": str(folder), **place}))
    return Run(broker).start()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / RUN).iterdir())


@pytest.mark.parametrize("place", PLACES)
def test_payloads_come_back_bit_for_bit_and_go_with_the_commit(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path, place: dict[str, str]
) -> None:
    run = begin(broker, make_config, tmp_path, place)
    (ticket,) = run.ready(1)
    sent, (got,) = finished(ticket, RUN), broker.fetch([ticket.group_id])
    for a, b in zip(sent.trajectories, got.trajectories, strict=True):
        assert a.log_probs.tobytes() == b.log_probs.tobytes()
        assert a.routes is not None
        assert b.routes is not None
        assert (a.routes.dtype, a.routes.tobytes()) == (b.routes.dtype, b.routes.tobytes())
    run.ready(1)
    assert broker.snapshot().payload_bytes > 0
    run.step(run.pull())
    broker.commit(run.epoch, 1)
    assert broker.snapshot().payload_bytes == 0
    assert not broker._connection.client.keys("*payload:*")
    if place.get("redis.payloads"):
        assert files(tmp_path) == []


def test_a_damaged_or_missing_file_is_named_and_nothing_else_is_lost(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path
) -> None:
    run = begin(broker, make_config, tmp_path, FOLDER)
    bad, gone = run.ready(2)
    for ticket, change in ((bad, b"damaged"), (gone, None)):
        (path,) = (tmp_path / RUN).glob(f"{ticket.group_id}-*")
        if change is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-7] + change)
    with pytest.raises(CorruptPayload, match="checksum"):
        broker.fetch([bad.group_id])
    with pytest.raises(CorruptPayload, match="missing"):
        broker.fetch([gone.group_id])
    run.pull()
    for ticket in (bad, gone):
        assert broker.reject(run.epoch, ticket.group_id, "unreadable")
    run.assert_closed()
    broker.collect_payloads()
    assert files(tmp_path) == []


def test_refused_submissions_leave_no_file(broker: Broker, make_config: ConfigFactory, tmp_path: Path) -> None:
    run = begin(broker, make_config, tmp_path, FOLDER)
    ticket = run.admit()
    assert isinstance(broker.submit(finished(ticket, RUN, worker="thief")), Refused)
    assert files(tmp_path) == []
    assert broker.submit(finished(ticket, RUN)) == "accepted"
    assert broker.submit(finished(ticket, RUN)) == "accepted"
    assert len(files(tmp_path)) == 1


def test_a_group_that_cannot_be_packed_leaves_no_file_of_those_submitted_with_it(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path
) -> None:
    run = begin(broker, make_config, tmp_path, FOLDER)
    good, bad = finished(run.admit(), RUN), finished(run.admit(), RUN)
    first, second = bad.trajectories
    assert first.routes is not None
    spoilt = replace(bad, trajectories=(structs.replace(first, routes=first.routes.astype(np.uint16)), second))
    with pytest.raises(InvalidTrajectory, match="routes of several dtypes"):
        broker.submit_many([good, spoilt])
    assert files(tmp_path) == []


def test_what_a_killed_worker_staged_is_swept_when_it_is_old(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path
) -> None:
    run = begin(broker, make_config, tmp_path, FOLDER)
    (kept,) = run.ready(1)
    for name in ("17-00", ".18-00.aside", "19-00"):
        (tmp_path / RUN / name).write_bytes(b"half")
    for path in (tmp_path / RUN).iterdir():
        if path.name != "19-00":  # a submission that is under way
            os.utime(path, (1, 1))
    assert broker.collect_payloads(sweep=True) == 2
    assert [name.split("-")[0] for name in files(tmp_path)] == sorted(["19", str(kept.group_id)])
    assert STAGED_MS >= 10_000


@pytest.mark.parametrize("ahead_s", [3600, -3600], ids=["ahead", "behind"])
def test_a_sweep_goes_by_the_clock_that_dates_the_files(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    begin(broker, make_config, tmp_path, FOLDER)
    under_way, left = tmp_path / RUN / "17-00", tmp_path / RUN / "18-00"
    for path in (under_way, left):
        path.write_bytes(b"half")
    old_s = left.stat().st_mtime - 2 * STAGED_MS / 1000
    os.utime(left, (old_s, old_s))
    here = time.time
    monkeypatch.setattr(time, "time", lambda: here() + ahead_s)  # this machine's; the file system's goes on
    assert broker.collect_payloads(sweep=True) == 1
    assert files(tmp_path) == ["17-00"]


def test_a_full_folder_holds_the_worker_back_and_loses_nothing(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(broker, make_config, tmp_path, FOLDER)
    ticket = run.admit()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("broker.store._write_all", full)
        answer = broker.submit(finished(ticket, RUN))
    assert isinstance(answer, Refused)
    assert answer.reason == "memory"
    assert files(tmp_path) == []
    assert broker.submit(finished(ticket, RUN)) == "accepted"
    assert isinstance(broker._store(), FolderPayloadStore)


def test_each_rank_fetches_its_own_share_from_any_process(
    redis_url: str, broker: Broker, make_config: ConfigFactory, tmp_path: Path
) -> None:
    run = begin(broker, make_config, tmp_path, FOLDER)
    run.ready(2)
    batch = run.pull()
    for rank in range(2):  # a handle that knows the address and the run alone
        other = Broker.connect(redis_url, RUN, timeout_s=20)
        (group,) = other.fetch([batch[rank].group_id])
        assert group.group_id == batch[rank].group_id
        other.close()


def test_groups_are_admitted_and_submitted_several_at_once_with_an_answer_each(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path
) -> None:
    run = begin(broker, make_config, tmp_path, {})
    tickets = broker.admit_many(WORKER, ENGINE, 9)
    assert not isinstance(tickets, Refused)
    assert len(tickets) == 4  # the bound
    broker.release(tickets[1].group_id, WORKER)
    answers = broker.submit_many([finished(t, RUN) for t in tickets], stats={"retries": 2})
    assert [a if isinstance(a, str) else a.reason for a in answers] == ["accepted", "closed", "accepted", "accepted"]
    assert broker.snapshot().counters["retries"] == 2
    assert [r.group_id for r in broker.groups("ready")] == [tickets[i].group_id for i in (0, 2, 3)]
    assert broker.group(tickets[1].group_id) is None
    run.assert_closed()
