"""What an engine's weights must hash to, computed from the files that it was told to load.

Invariant: `expected_checksums` reproduces, bit for bit, what SGLang's `/weights_checker` reports for an unquantised
model that one process holds on a CPU; if the layout is not known to this module, `compare` says so instead of guessing.

SGLang hashes each parameter's bytes (sha256, first 16 hex digits). Its parameters are the files' tensors under other
names, fused: qkv_proj = q;k;v, gate_up_proj = gate;up, experts.w13_weight = gate;up of expert 0, 1, ..., and
embeddings padded with zero rows to a multiple of 64 (read in sglang 0.5.23: srt/utils/weight_checker.py,
srt/models/qwen3_moe.py, srt/layers/vocab_parallel_embedding.py; tests/weight_sync has a real one too). On a GPU
the hash is another one, and with tensor parallelism the parameters are slices: there only equality is checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

VOCABULARY_PADDING = 64
MAX_HEADER_BYTES = 100 << 20
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1}
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class UnreadableWeights(ValueError):
    """A safetensors file that cannot be what its name says."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor inside a mapped file. dtype: safetensors' word (F32, BF16, ...); data: its bytes, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Verdict(StrEnum):
    """Outcome of comparing an engine's checksums with the expected ones."""

    EXACT = "exact"  # every parameter has the bytes of the files
    UNKNOWN = "unknown"  # the engine names none of the parameters that we can derive: another layout
    DIFFERENT = "different"  # at least one parameter is missing, additional, or has other bytes


def target_of(name: str) -> tuple[str, tuple[int, int]]:
    """(the engine's parameter, place in it) of a file's tensor; places sort in the order in which they are laid out."""
    expert = _EXPERT.match(name)
    if expert:
        prefix, index, part = expert.groups()
        fused = "w2_weight" if part == "down_proj" else "w13_weight"
        return f"{prefix}.{fused}", (int(index), int(part == "up_proj"))
    module, dot, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if dot and last in _FUSED:
        fused, place = _FUSED[last]
        return f"{parent}.{fused}.{leaf}", (place, 0)
    return name, (0, 0)


def expected_checksums(folder: Path, dtype: str | None = None) -> dict[str, str]:
    """Engine parameter -> 16 hex digits, for the *.safetensors of `folder`.

    dtype: the engine's number format ("float32", "bfloat16"); None: the files'. Raises UnreadableWeights, OSError.
    Reads every byte once (which also brings the files into the page cache); holds no tensor in memory.
    """
    parts: dict[str, list[tuple[tuple[int, int], Tensor]]] = {}
    with ExitStack() as stack:
        for path in sorted(folder.glob("*.safetensors")):
            for tensor in stack.enter_context(open_safetensors(path)):
                parameter, place = target_of(tensor.name)
                parts.setdefault(parameter, []).append((place, tensor))
        sums = {
            name: _hash([tensor for _, tensor in sorted(places, key=lambda item: item[0])], name, dtype)
            for name, places in parts.items()
        }
        parts.clear()
    return sums


def compare(engine: Mapping[str, str], expected: Mapping[str, str]) -> tuple[Verdict, str]:
    """Hold an engine's checksums against the expected ones; the second value names the first difference."""
    if not set(engine) & set(expected):
        return Verdict.UNKNOWN, "the engine's parameter names are not known"
    tied = {"lm_head.weight"} if "lm_head.weight" not in engine or "lm_head.weight" not in expected else set()
    for name in sorted((set(engine) | set(expected)) - tied):
        if engine.get(name) != expected.get(name):
            return Verdict.DIFFERENT, f"{name} is {engine.get(name, 'absent')}, expected {expected.get(name, 'absent')}"
    return Verdict.EXACT, ""


def overall(checksums: Mapping[str, str]) -> str:
    """One sha256 over names and checksums, in name order (what SGLang calls per_gpu_checksum)."""
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update(name.encode())
        digest.update(checksums[name].encode())
    return digest.hexdigest()


@contextmanager
def open_safetensors(path: Path) -> Iterator[list[Tensor]]:
    """The tensors of one file, mapped and not copied; valid inside the `with`. Raises UnreadableWeights, OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 8:
            raise UnreadableWeights(f"{path.name} has {size} bytes: it is not a safetensors file")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        with memoryview(mapped) as view:
            tensors = list(_tensors(path.name, view))
            try:
                yield tensors
            finally:
                for tensor in tensors:
                    tensor.data.release()
    finally:
        mapped.close()


def _tensors(file: str, view: memoryview) -> Iterator[Tensor]:
    (length,) = struct.unpack_from("<Q", view)
    if length > min(MAX_HEADER_BYTES, len(view) - 8):
        raise UnreadableWeights(f"{file}: the header is longer than the file")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
        header.pop("__metadata__", None)
        items = [(k, v["dtype"], tuple(v["shape"]), *v["data_offsets"]) for k, v in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableWeights(f"{file}: the header cannot be read") from error
    base = 8 + length
    for name, dtype, shape, start, end in items:
        if dtype not in ITEM_BYTES or end - start != math.prod(shape) * ITEM_BYTES[dtype] or base + end > len(view):
            raise UnreadableWeights(f"{file}: {name} does not have the bytes of a {dtype} of shape {list(shape)}")
        yield Tensor(name, dtype, shape, view[base + start : base + end])


def _hash(tensors: list[Tensor], parameter: str, dtype: str | None) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        data = _as(tensor, dtype)
        digest.update(data)
        data.release()
        if parameter.endswith(("embed_tokens.weight", "lm_head.weight")):
            rows = -tensor.shape[0] % VOCABULARY_PADDING
            item = {"float32": 4, "bfloat16": 2}.get(dtype or "", ITEM_BYTES[tensor.dtype])
            digest.update(bytes(rows * math.prod(tensor.shape[1:]) * item))
    return digest.hexdigest()[:16]


def _as(tensor: Tensor, dtype: str | None) -> memoryview:
    """The tensor's bytes in the engine's number format, rounded to nearest even as torch does."""
    if dtype == "bfloat16" and tensor.dtype == "F32":
        bits = np.frombuffer(tensor.data, np.uint32)
        with np.errstate(over="ignore"):
            rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return memoryview(np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16).tobytes())
    if dtype == "float32" and tensor.dtype == "BF16":
        return memoryview((np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16).tobytes())
    return tensor.data[:]
