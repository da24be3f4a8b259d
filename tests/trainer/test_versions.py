"""Which published weights may go."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from broker.types import EngineRecord, EngineState, VersionRecord
from tests.trainer.helpers import given
from trainer.versions import BUSY, needed_by, removable

PUBLISHED = [VersionRecord(v, v, f"/v{v}", "", published_ms=1000 * v) for v in range(1, 9)]


def engine(state: EngineState, version: int, since_ms: int) -> EngineRecord:
    return EngineRecord("e", "http://e", state, version, since_ms=since_ms)


def test_an_engine_that_serves_needs_its_version_alone() -> None:
    assert needed_by(engine(EngineState.SERVING, 3, 5000), PUBLISHED, 2000) == {3}
    assert needed_by(engine(EngineState.JOINING, -1, 5000), PUBLISHED, 2000) == set()


@pytest.mark.parametrize("state", sorted(BUSY))
def test_weights_that_an_engine_may_be_loading_stay(state: EngineState) -> None:
    # Its update began between 3.5 s and 5.5 s: it took version 3, 4 or 5.
    assert needed_by(engine(state, 2, 5500), PUBLISHED, 2000) == {2, 3, 4, 5, 6, 7, 8}
    assert needed_by(engine(state, -1, 500), PUBLISHED, 2000) == {1, 2, 3, 4, 5, 6, 7, 8}


def test_weights_that_an_engine_may_be_loading_stay_although_the_clock_of_redis_was_set_back_meanwhile() -> None:
    set_back = [VersionRecord(v, v, f"/v{v}", "", published_ms=1000 * v - 900_000 * (v > 5)) for v in range(1, 9)]
    assert needed_by(engine(EngineState.UPDATING, 2, 5500), set_back, 2000) == {2, 3, 4, 5, 6, 7, 8}


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(1, 5))
def test_what_goes_is_neither_in_use_nor_among_the_newest(on_disk: set[int], in_use: set[int], keep: int) -> None:
    gone = removable(on_disk, in_use, keep)
    assert not set(gone) & in_use
    assert not set(gone) & set(sorted(on_disk)[-keep:])
    assert len(on_disk) - len(gone) <= keep + len(in_use)
