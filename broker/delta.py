"""A version's files as their difference to those of another version.

Invariant: what `apply` leaves has, byte for byte, the checksums of the new version's manifest, or it raises: wrong
base, torn file and flipped bit alike. The full files lie beside the difference, which is therefore never needed.

Two bytes are one word, which is one element in bfloat16. A block of a file is one zstd frame: a bitmap of the words
that changed, then their old bits XOR their new ones, all low bytes before all high bytes (after a small update the high
ones are nearly all zero). A file that the base does not have in the same size is not in the delta: it is copied.

delta.bin: length of the header (8 bytes, little-endian), header (JSON, see `Header`), the frames in its order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

DELTA = "delta.bin"
MANIFEST = "manifest.json"
BLOCK_BYTES = 8 << 20
LEVEL = 1
_MAX_HEADER_BYTES = 64 << 20
Words = npt.NDArray[np.uint16]


class CannotApply(Exception):
    """The files of a version cannot be made, or are not what its manifest says; the text says why."""


class Header(msgspec.Struct, frozen=True):
    """base, result: SHA-256 of the two manifests, which vouch for every file. files: sizes of a file's frames."""

    base: str
    result: str
    block_bytes: int
    files: dict[str, list[int]]
    format: int = 1


@dataclass(frozen=True, slots=True)
class Written:
    """What a delta holds. words, changed: of the files in it, 16 bits each. bytes: of delta.bin; full_bytes: of all
    files of the version."""

    words: int
    changed: int
    bytes: int
    full_bytes: int


def checksum_of(folder: Path) -> str:
    """SHA-256 of a version's manifest: its checksum in the registry."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def write(base: Path, folder: Path) -> Written:
    """Write `folder`/delta.bin, the difference of two complete versions. Raises OSError, CannotApply (no manifest)."""
    old, new = manifest_files(base), manifest_files(folder)
    aside = folder / f".{DELTA}.partial"
    frames: dict[str, list[int]] = {}
    words = changed = 0
    try:
        with aside.open("w+b") as body:
            for name, entry in new.items():
                if not name.endswith(".safetensors") or old.get(name, {}).get("bytes") != entry["bytes"]:
                    continue
                frames[name] = []
                for before, after in zip(_blocks(base / name), _blocks(folder / name), strict=True):
                    difference = before ^ after
                    frame, count = _encode(difference)
                    frames[name].append(body.write(frame))
                    words, changed = words + difference.size, changed + count
            head = msgspec.json.encode(Header(checksum_of(base), checksum_of(folder), BLOCK_BYTES, frames))
            body.seek(0)
            with (folder / DELTA).open("wb") as out:
                out.write(len(head).to_bytes(8, "little") + head)
                while block := body.read(BLOCK_BYTES):
                    out.write(block)
                size = out.tell()
    finally:
        aside.unlink(missing_ok=True)
    return Written(words, changed, size, sum(entry["bytes"] for entry in new.values()))


def apply(published: Path, base: Path, target: Path) -> int:
    """Make in `target`, an empty folder, the files of `published` from its delta and `base`; the bytes read of
    `published`. Raises CannotApply, OSError."""
    files = manifest_files(published)
    with (published / DELTA).open("rb") as delta:
        head = _header(delta)
        if head.result != checksum_of(published) or head.base != checksum_of(base):
            raise CannotApply(f"the delta of {published.name} is not one from {base.name}")
        for name, sizes in head.files.items():
            with (base / name).open("rb") as before:
                _put(target, name, files.get(name), _patched(before, delta, head, sizes))
        read = delta.tell()
    rest = [name for name in files if name not in head.files]
    return (
        read + sum(copy_file(published, target, name, files[name]) for name in rest) + _take_manifest(published, target)
    )


def copy(published: Path, target: Path) -> int:
    """Copy all files of a version into `target`, an empty folder, checked; the bytes. Raises CannotApply, OSError."""
    files = manifest_files(published)
    return sum(copy_file(published, target, name, entry) for name, entry in files.items()) + _take_manifest(
        published, target
    )


def copy_file(published: Path, target: Path, name: str, entry: dict[str, Any]) -> int:
    """Copy one file and hold it against its entry of the manifest; its size."""
    with (published / name).open("rb") as source:
        return _put(target, name, entry, iter(lambda: source.read(BLOCK_BYTES), b""))


def manifest_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The files that a version's manifest names, each with bytes and sha256. Raises CannotApply, OSError."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        valid = all("/" not in name and set(entry) >= {"bytes", "sha256"} for name, entry in files.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotApply(f"{folder.name}: the manifest cannot be read") from error
    if not valid:
        raise CannotApply(f"{folder.name}: the manifest is not of the known form")
    return dict(files)


def _encode(difference: Words) -> tuple[bytes, int]:
    """The frame of one block, and how many words changed. No byte at all if none did."""
    mask = difference != 0
    values = difference[mask]
    if not values.size:
        return b"", 0
    planes = values.view(np.uint8).reshape(-1, 2).T
    return zstandard.compress(np.packbits(mask).tobytes() + planes.tobytes(), LEVEL), values.size


def _decode(frame: bytes, words: int) -> Words:
    """The difference that `_encode` was given: uint16 [words]."""
    difference = np.zeros(words, np.uint16)
    if not frame:
        return difference
    bitmap = (words + 7) // 8
    try:
        content = zstandard.decompress(frame, max_output_size=bitmap + 2 * words)
    except zstandard.ZstdError as error:
        raise CannotApply("the delta cannot be decompressed") from error
    mask = np.unpackbits(np.frombuffer(content, np.uint8, min(bitmap, len(content))), count=words).astype(bool)
    planes = np.frombuffer(content, np.uint8)[bitmap:]
    if planes.size != 2 * int(mask.sum()):
        raise CannotApply("the delta contradicts itself")
    difference[mask] = np.ascontiguousarray(planes.reshape(2, -1).T).view(np.uint16).ravel()
    return difference


def _header(delta: BinaryIO) -> Header:
    length = int.from_bytes(delta.read(8), "little")
    try:
        head = msgspec.json.decode(delta.read(min(length, _MAX_HEADER_BYTES)), type=Header)
    except (msgspec.DecodeError, MemoryError) as error:
        raise CannotApply("the delta has no header") from error
    if head.format != 1 or not 0 < head.block_bytes <= 1 << 30 or any("/" in name for name in head.files):
        raise CannotApply("the delta is not of the known form")
    return head


def _patched(before: BinaryIO, delta: BinaryIO, head: Header, sizes: list[int]) -> Iterator[bytes]:
    for size in sizes:
        old = _words(before.read(head.block_bytes))
        yield (old ^ _decode(delta.read(size), old.size)).tobytes()


def _blocks(path: Path) -> Iterator[Words]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield _words(block)


def _words(block: bytes) -> Words:
    """A safetensors file of 16-bit elements or wider has an even size; another one's last byte gets a zero beside it,
    which `_put` does not write."""
    return np.frombuffer(block + b"\0" * (len(block) % 2), np.uint16)


def _put(target: Path, name: str, entry: dict[str, Any] | None, content: Iterator[bytes]) -> int:
    """Write a file whose content must be as its entry says; its size. Raises CannotApply."""
    if entry is None:
        raise CannotApply(f"{name} is in the delta, but not in the manifest")
    digest, left = hashlib.sha256(), int(entry["bytes"])
    with (target / name).open("xb") as out:
        for block in content:
            part = block[:left]
            out.write(part)
            digest.update(part)
            left -= len(part)
    if left or digest.hexdigest() != entry["sha256"]:
        raise CannotApply(f"{name} does not have the checksum that its manifest gives")
    return int(entry["bytes"])


def _take_manifest(published: Path, target: Path) -> int:
    return (target / MANIFEST).write_bytes((published / MANIFEST).read_bytes())
