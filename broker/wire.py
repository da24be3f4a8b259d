"""The wire format of a group.

Invariant: `decode(encode(group), run)` equals the group bit for bit, without copying an array, and any flipped or
missing byte, other schema or other run is an error that says which. Never pickle.

Layout, little-endian: magic "LGRG" | schema u16 | codec u8 | 0 u8 | header bytes u32 | body bytes u64 (as stored) |
xxh3-64 u64 of all other bytes | header | padding to 16 | body. The header is the `Group` itself in msgpack, with an
`ArrayInfo` for each array, which lies in the body at a multiple of 16. A field that is added to a group or trajectory
has a default: releases that do not know it pass it over, and one that does reads what they wrote. Codecs: 0 raw; 1 zstd
of the body, if the package `zstandard` is installed.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from broker.commands import Payload
from broker.errors import CorruptPayload, SchemaMismatch, WrongRun
from broker.types import Group

SCHEMA_VERSION = 2
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
_NAMES = {native.newbyteorder("="): name for name, native in _DTYPES.items()}


class ArrayInfo(msgspec.Struct, array_like=True, frozen=True):
    """One array in the body."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def encode(group: Group, codec: Codec = "raw") -> bytes:
    """Bytes of a group (one copy of its arrays)."""
    return pieces(group, codec).joined()


def pieces(group: Group, codec: Codec = "raw") -> Payload:
    """The same bytes, as views of the group's arrays: keep the group unchanged until they are sent."""
    parts: list[Any] = []
    at = 0

    def place(array: npt.NDArray[Any] | np.generic) -> object:
        nonlocal at
        if isinstance(array, np.generic):
            return array.item()  # a reward, say
        name = _NAMES[array.dtype]
        little = np.ascontiguousarray(array, _DTYPES[name])
        info = ArrayInfo(name, little.shape, at)
        if little.nbytes:
            parts.append(little.data.cast("B"))
        padding = -little.nbytes % _ALIGN
        if padding:
            parts.append(bytes(padding))
        at += little.nbytes + padding
        return info

    header = msgspec.msgpack.encode(group, enc_hook=place)
    if codec == "zstd":
        parts = [_zstd().ZstdCompressor(level=1).compress(b"".join(parts))]
        at = len(parts[0])
    head = _HEAD.pack(MAGIC, SCHEMA_VERSION, _CODECS[codec], 0, len(header), at)
    padding = -(_FIXED + len(header)) % _ALIGN
    parts = [header, bytes(padding), *parts]
    size = _FIXED + len(header) + padding + at
    if size < SMALL:
        parts = [b"".join(parts)]
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

    def array(_: type, found: Any) -> npt.NDArray[Any]:
        info = msgspec.convert(found, ArrayInfo)
        if min((info.offset, *info.shape)) < 0:  # numpy takes -1 for "as many as there are"
            raise ValueError(f"an array of shape {info.shape} at {info.offset}")
        dtype = _DTYPES[info.dtype]
        return np.empty(info.shape, dtype) if 0 in info.shape else np.ndarray(info.shape, dtype, body, info.offset)

    try:
        group = msgspec.msgpack.decode(view[_FIXED : _FIXED + header_size], type=Group, dec_hook=array)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise CorruptPayload(group_id, f"malformed: {error}") from error
    if group.run != run:
        raise WrongRun(f"payload of group {group.group_id} belongs to run {group.run!r}, this is {run!r}")
    if group_id >= 0 and group.group_id != group_id:
        raise CorruptPayload(group_id, f"it holds group {group.group_id}")
    return group


def _zstd() -> Any:
    try:
        import zstandard  # optional
    except ImportError as error:
        raise SchemaMismatch("the zstd codec needs the package zstandard: pip install zstandard") from error
    return zstandard
