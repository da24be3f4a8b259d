"""The wire format of a group.

Invariant: `decode(encode(group), run)` equals the group bit for bit, without copying an array, and any flipped or
missing byte, other schema or other run is an error that says which. Never pickle.

Layout, little-endian: magic "LGRG" | schema u16 | codec u8 | 0 u8 | header bytes u32 | body bytes u64 (as stored) |
xxh3-64 u64 of all other bytes | header | padding to 16 | body. The header is a `Header` in msgpack; in the body, at a
multiple of 16, lie the arrays of one field of all samples, one after the other: what a sample costs is a slice. A field
that is added to a header has a default: releases that do not know it pass it over, and one that does reads what they
wrote. Codecs: 0 raw; 1 zstd of the body, if the package `zstandard` is installed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from broker.commands import Payload
from broker.errors import CorruptPayload, SchemaMismatch, WrongRun
from broker.types import Group, InvalidTrajectory, Trajectory, VersionRun

SCHEMA_VERSION = 3
MAGIC = b"LGRG"
Codec = Literal["raw", "zstd"]
_CODECS: dict[Codec, int] = {"raw": 0, "zstd": 1}
_HEAD = struct.Struct("<4sHBBIQ")
_DIGEST = struct.Struct("<Q")
_ALIGN = 16
SMALL = 256 * 1024  # bytes below which one copy is cheaper than many pieces
LARGEST_BODY = 1 << 30  # bytes after decompression: a few KB could claim any amount of memory
_FIXED = _HEAD.size + _DIGEST.size  # 28 bytes; the header follows
_DTYPES = {
    "i4": np.dtype("<i4"),
    "f4": np.dtype("<f4"),
    "b1": np.dtype("?"),
    "u1": np.dtype("u1"),
    "u2": np.dtype("<u2"),
}
_FIELDS = ("prompt_ids", "response_ids", "log_probs", "loss_mask", "routes")
_NAMES = {native.newbyteorder("="): name for name, native in _DTYPES.items()}


class Column(msgspec.Struct, array_like=True, frozen=True):
    """A field of all samples in the body. rows: its length in each, 0 where there is none; row: the shape of one."""

    dtype: str
    row: tuple[int, ...]
    rows: tuple[int, ...]
    offset: int


class Header(msgspec.Struct, frozen=True):
    """A group without its samples, then what each sample has, in their order."""

    group: Group
    rewards: tuple[float, ...]
    finishes: tuple[str, ...]
    versions: tuple[tuple[VersionRun, ...], ...]
    prompt_ids: Column
    response_ids: Column
    log_probs: Column
    loss_mask: Column
    routes: Column


def _plain(value: object) -> object:
    """A number of numpy, which a task or worker may have computed, as one of Python."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError  # msgspec says what it is


_ENCODER, _DECODER = msgspec.msgpack.Encoder(enc_hook=_plain), msgspec.msgpack.Decoder(Header)


def encode(group: Group, codec: Codec = "raw") -> bytes:
    """Bytes of a group (one copy of its arrays)."""
    return pieces(group, codec).joined()


def pieces(group: Group, codec: Codec = "raw") -> Payload:
    """The same bytes, as views of the group's arrays: keep the group unchanged until they are sent.

    Raises InvalidTrajectory if a field has several dtypes, or rows of several shapes.
    """
    samples = group.trajectories
    parts: list[Any] = []
    at = 0

    def place(field: str) -> Column:
        nonlocal at
        of_samples = [getattr(sample, field) for sample in samples]
        arrays = [array for array in of_samples if array is not None]
        if not arrays:
            return Column("u1", (), (0,) * len(samples), at)
        dtype, row, offset = arrays[0].dtype, arrays[0].shape[1:], at
        little = _DTYPES[_NAMES[dtype]]
        for array in arrays:
            if array.dtype != dtype or array.shape[1:] != row:
                raise InvalidTrajectory(f"group {group.group_id}: its samples have {field} of several dtypes or shapes")
            if array.nbytes:
                parts.append(np.ascontiguousarray(array, little))
                at += array.nbytes
        if padding := -at % _ALIGN:
            parts.append(bytes(padding))
            at += padding
        rows = tuple(0 if array is None else len(array) for array in of_samples)
        return Column(_NAMES[dtype], row, rows, offset)

    header = _ENCODER.encode(
        Header(
            replace(group, trajectories=()),
            tuple(float(sample.reward) for sample in samples),
            tuple(sample.finish for sample in samples),
            tuple(sample.versions for sample in samples),
            *map(place, _FIELDS),
        )
    )
    if codec == "zstd":
        parts = [_zstd().ZstdCompressor(level=1).compress(b"".join(parts))]
        at = len(parts[0])
    head = _HEAD.pack(MAGIC, SCHEMA_VERSION, _CODECS[codec], 0, len(header), at)
    padding = -(_FIXED + len(header)) % _ALIGN
    parts = [header, bytes(padding), *parts]
    size = _FIXED + len(header) + padding + at
    if size < SMALL:
        parts = [b"".join(parts)]
    else:
        parts = [part.data.cast("B") if isinstance(part, np.ndarray) else part for part in parts]
    digest = xxhash.xxh3_64(head)
    for part in parts:
        digest.update(part)
    total = digest.intdigest()
    return Payload((head + _DIGEST.pack(total), *parts), size, f"{total:016x}")


def checksum(data: bytes) -> str:
    """The checksum that `data`, a result of encode, carries: 16 hex digits."""
    return f"{_DIGEST.unpack_from(data, _HEAD.size)[0]:016x}"


def decode(data: bytes | memoryview, run: str, group_id: int = -1) -> Group:
    """The group in `data`; its arrays are read-only views of it.

    run: the run that must have written it. group_id: for error messages, and checked unless negative.
    Raises CorruptPayload, SchemaMismatch or WrongRun.
    """
    view = memoryview(data)
    if len(view) < _FIXED or bytes(view[:4]) != MAGIC:
        raise CorruptPayload(group_id, f"{len(view)} bytes that are not a trajectory group")
    _, schema, codec, _, header_size, body_size = _HEAD.unpack_from(view)
    if schema != SCHEMA_VERSION:
        raise SchemaMismatch(
            f"payload of group {group_id} has schema {schema}, this program reads {SCHEMA_VERSION}. "
            "Run workers and trainer from the same release."
        )
    start = _FIXED + header_size
    start += -start % _ALIGN
    if len(view) != start + body_size:
        raise CorruptPayload(group_id, f"{len(view)} bytes, {start + body_size} expected")
    digest = xxhash.xxh3_64(view[: _HEAD.size])
    digest.update(view[_FIXED:])
    if _DIGEST.unpack_from(view, _HEAD.size) != (digest.intdigest(),):
        raise CorruptPayload(group_id, "checksum does not match")
    body: memoryview | bytes = view[start:]
    if codec == _CODECS["zstd"]:
        zstd = _zstd()
        try:
            if not 0 <= zstd.frame_content_size(body) <= LARGEST_BODY:
                raise CorruptPayload(group_id, f"does not say that it decompresses to at most {LARGEST_BODY} bytes")
            body = cast(bytes, zstd.ZstdDecompressor().decompress(body))
        except zstd.ZstdError as error:
            raise CorruptPayload(group_id, f"cannot be decompressed: {error}") from error
    elif codec != _CODECS["raw"]:
        raise SchemaMismatch(f"payload of group {group_id} has codec {codec}, which this program does not know")

    try:
        group = _group(_DECODER.decode(view[_FIXED : _FIXED + header_size]), body)
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        raise CorruptPayload(group_id, f"malformed: {error}") from error
    if group.run != run:
        raise WrongRun(f"payload of group {group.group_id} belongs to run {group.run!r}, this is {run!r}")
    if group_id >= 0 and group.group_id != group_id:
        raise CorruptPayload(group_id, f"it holds group {group.group_id}")
    return group


def _group(header: Header, body: memoryview | bytes) -> Group:
    """Raises ValueError or KeyError if the header does not fit itself or the body."""
    cuts: dict[tuple[int, ...], list[slice]] = {}  # fields of the same tokens are cut at the same places

    def arrays(column: Column) -> list[npt.NDArray[Any]]:
        rows = column.rows
        if rows not in cuts:
            cuts[rows] = [slice(last - length, last) for length, last in zip(rows, accumulate(rows), strict=True)]
        shape, dtype = (sum(rows), *column.row), _DTYPES[column.dtype]
        end = column.offset + math.prod(shape) * dtype.itemsize
        # numpy takes -1 for "as many as there are", and its own comparison of the end overflows.
        if min((column.offset, *column.row, *rows)) < 0 or end > len(body):
            raise ValueError(f"an array of shape {shape} at {column.offset} of {len(body)} bytes")
        whole = np.ndarray(shape, dtype, body, column.offset)
        return [whole[cut] for cut in cuts[rows]]

    routes: list[Any] = [None] * len(header.routes.rows)
    if any(header.routes.rows):
        routes = [one if len(one) else None for one in arrays(header.routes)]
    samples = zip(
        arrays(header.prompt_ids),
        arrays(header.response_ids),
        arrays(header.log_probs),
        arrays(header.loss_mask),
        header.versions,
        header.rewards,
        header.finishes,
        routes,
        strict=True,
    )
    return replace(header.group, trajectories=tuple(Trajectory(*sample) for sample in samples))


def _zstd() -> Any:
    try:
        import zstandard  # optional
    except ImportError as error:
        raise SchemaMismatch("the zstd codec needs the package zstandard: pip install zstandard") from error
    return zstandard
