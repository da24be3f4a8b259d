"""The difference of two versions: exact, or refused and replaced by a full copy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import delta
from broker.types import VersionRecord
from rollout.local_copy import bring
from tests.weight_sync.live import World

SEED = st.integers(0, 2**32 - 1)


def version(root: Path, number: int, words: np.ndarray, tail: bytes = b"") -> VersionRecord:
    """A version whose weights file holds these words (uint16) and a tail."""
    folder = root / f"v{number:06d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(words.tobytes() + tail)
    (folder / "config.json").write_text(json.dumps({"version": number}))
    files = {
        f.name: {"bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in folder.iterdir()
    }
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    return VersionRecord(number, number, str(folder), delta.checksum_of(folder))


def content(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != delta.DELTA}


@settings(max_examples=25)
@given(SEED, st.integers(0, 5000), st.floats(0, 1), st.binary(max_size=1))
def test_base_and_delta_give_the_new_version_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int, share: float, tail: bytes
) -> None:
    root, rng = tmp_path_factory.mktemp("delta"), np.random.default_rng(seed)
    old = rng.integers(0, 2**16, size, dtype=np.uint16)
    new = np.where(rng.random(size) < share, rng.integers(0, 2**16, size, dtype=np.uint16), old)
    first, second = version(root, 1, old, tail), version(root, 2, new, tail)
    made = delta.write(Path(first.path), Path(second.path))
    assert made.changed == (old != new).sum()
    (root / "out").mkdir()
    delta.apply(Path(second.path), Path(first.path), root / "out")
    assert content(root / "out") == content(Path(second.path))


def test_blocks_are_joined_where_one_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK_BYTES", 64)
    old = np.arange(100, dtype=np.uint16)
    first, second = version(tmp_path, 1, old), version(tmp_path, 2, old * 3)
    delta.write(Path(first.path), Path(second.path))
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    delta.apply(Path(second.path), Path(first.path), tmp_path / "out")
    assert content(tmp_path / "out") == content(Path(second.path))


def test_a_host_follows_the_versions_by_their_deltas_and_keeps_one_base(tmp_path: Path) -> None:
    rng, records = np.random.default_rng(0), []
    words = rng.integers(0, 2**16, 50_000, dtype=np.uint16)
    for number in range(4):
        words = words.copy()
        words[rng.integers(0, words.size, 500)] ^= 1
        records.append(version(tmp_path / "shared", number, words))
        if number:
            delta.write(Path(records[-2].path), Path(records[-1].path))
    local = tmp_path / "local"
    copies = [bring(record, local) for record in records]
    assert [bool(copy.problem) for copy in copies] == [True, False, False, False]
    assert all(copy.bytes_read < words.nbytes / 10 for copy in copies[1:])
    assert content(copies[-1].folder) == content(Path(records[-1].path))
    assert sorted(path.name for path in local.iterdir()) == ["v000002", "v000003"]
    assert bring(records[-1], local).bytes_read == 0


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "torn": lambda published, _base: (published / delta.DELTA).write_bytes((published / delta.DELTA).read_bytes()[:-9]),
    "absent": lambda published, _base: (published / delta.DELTA).unlink(),
    "no header": lambda published, _base: (published / delta.DELTA).write_bytes(b"\xff" * 40),
    "a flipped bit": lambda published, _base: flip(published / delta.DELTA, -3),
    "other base": lambda _published, base: flip(base / "manifest.json", -2),
    "base with a flipped bit": lambda _published, base: flip(base / "model.safetensors", 7),
    "base without its file": lambda _published, base: (base / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_does_not_fit_a_full_copy_is_made_and_says_why(tmp_path: Path, damage: str) -> None:
    old = np.arange(5000, dtype=np.uint16)
    first, second = version(tmp_path / "shared", 1, old), version(tmp_path / "shared", 2, old ^ (old % 7 == 0))
    delta.write(Path(first.path), Path(second.path))
    base = bring(first, tmp_path / "local").folder
    DAMAGE[damage](Path(second.path), base)
    copy = bring(second, tmp_path / "local")
    assert copy.problem
    assert copy.bytes_read >= old.nbytes
    assert content(copy.folder) == content(Path(second.path))


def test_shared_files_that_are_not_the_published_ones_are_never_taken(tmp_path: Path) -> None:
    record = version(tmp_path / "shared", 1, np.arange(500, dtype=np.uint16))
    flip(Path(record.path) / "model.safetensors", 3)
    with pytest.raises(delta.CannotApply):
        bring(record, tmp_path / "local")
    assert not (tmp_path / "local" / "v000001").exists()


def test_what_a_supervisor_says_of_its_copy_survives_what_weight_sync_writes(w: World) -> None:
    w.add_engine("e0")
    assert w.broker.heartbeat_engine("e0", 3, "/dev/shm/x/v000003")
    record = w.record("e0")
    assert w.broker.update_engine(record.__class__("e0", record.url, record.state, 2, "sum"), None)
    assert (w.record("e0").staged, w.record("e0").staged_path) == (3, "/dev/shm/x/v000003")
    assert w.broker.heartbeat_engine("e0")
    assert w.record("e0").staged == 3
