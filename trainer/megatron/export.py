"""Writes the policy as a Hugging Face folder.

Invariant: the folder appears whole or not at all: it is written aside, every file is on disk (fsync), manifest.json
vouches for each file and tensor, and a rename makes it visible. What is written is what was staged, whatever the step
does to the weights meanwhile. Each rank of the first data-parallel replica copies its own shard and writes the tensors
that it gathers, one whole tensor at a time. Import after compat.install.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.megatron import weights
from trainer.megatron.hf_files import INDEX, copy_companions
from trainer.megatron.model_config import ModelShape
from trainer.megatron.parallel import gather_bytes
from trainer.megatron.safetensors_file import (
    MANIFEST,
    SafetensorsWriter,
    TensorEntry,
    checksum,
    sync_folder,
    write_durably,
)

_WORDS = {torch.float32: "F32", torch.bfloat16: "BF16"}
SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A copy of this rank's part of the weights in memory, in the order in which it will be gathered.

    Empty on ranks beyond the first data-parallel replica. dtype: of the weights, in torch's word.
    """

    parts: tuple[tuple[Tensor, weights.Rule, weights.Shard], ...]
    shape: ModelShape
    dtype: str


def stage(model: Any, shape: ModelShape) -> Staged:
    """Copy the parameters of an unwrapped GPTModel to CPU memory, without a word with other ranks."""
    parts = tuple(
        (parameter.detach().to("cpu", copy=True), rule, weights.shard_of(rule))
        for parameter, rule in weights.parameters(model, shape)
        if weights.holds_export(rule) and not (shape.tied and rule.names == ("lm_head.weight",))
    )
    return Staged(parts, shape, str(next(model.parameters()).dtype).removeprefix("torch."))


def write_hf(
    staged: Staged, source: Path, folder: Path, ranks: dist.ProcessGroup, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write what was staged to `folder`; collective over `ranks`, a gloo group of all ranks; on any thread.

    source: the folder that config.json and the tokenizer are copied from. shard_bytes: a file is closed when it reaches
    this size. Raises OSError on every rank if one rank cannot write; FileExistsError if the folder is there already.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    _together(_prepare, ranks, folder, aside)
    own = _plan(staged, shard_bytes)
    counts = [int(part) for part in gather_bytes(str(len(own)).encode(), ranks)]
    first, total = sum(counts[: dist.get_rank(ranks)]), sum(counts)
    names = [_file_name(first + i, total) for i in range(len(own))]
    report: dict[str, Any] = {"files": {}, "tensors": {}}
    error = ""
    try:
        _write(staged, aside, own, names, report, ranks)
    except _CannotWrite as failure:
        error = str(failure)
    parts = [json.loads(part) for part in gather_bytes(json.dumps({"error": error, **report}).encode(), ranks)]
    failures = [part["error"] for part in parts if part["error"]]
    if failures:
        raise OSError(f"{folder}: {failures[0]}")
    _together(_finish, ranks, folder, aside, source, parts, staged.dtype)


class _CannotWrite(Exception):
    """A file could not be written; the collectives of the export went on to their end."""


def _together(step: Any, ranks: dist.ProcessGroup, *arguments: Any) -> None:
    """Run a step on rank 0; all ranks raise OSError if it fails there."""
    error = ""
    if dist.get_rank(ranks) == 0:
        try:
            step(*arguments)
        except OSError as failure:
            error = str(failure) or repr(failure)
    error = gather_bytes(error.encode(), ranks)[0].decode()
    if error:
        raise OSError(error)


def _prepare(folder: Path, aside: Path) -> None:
    if folder.exists():
        raise FileExistsError(f"{folder} is there already")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _file_name(number: int, total: int) -> str:
    return "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def _plan(staged: Staged, shard_bytes: int) -> list[list[TensorEntry]]:
    """The tensors of each file that this rank writes, in the order in which they will be gathered."""
    files: list[list[TensorEntry]] = []
    size = 0
    for value, rule, at in staged.parts:
        if at.index:
            continue
        for name, dims in zip(
            rule.names, weights.whole_shapes(rule, tuple(value.shape), staged.shape, at.count), strict=True
        ):
            length = value.element_size() * int(torch.Size(dims).numel())
            if not files or size + length > shard_bytes:
                files.append([])
                size = 0
            files[-1].append(TensorEntry(name, _WORDS[value.dtype], dims, length))
            size += length
    return files


def _write(
    staged: Staged,
    aside: Path,
    own: list[list[TensorEntry]],
    names: list[str],
    report: dict[str, Any],
    ranks: dist.ProcessGroup,
) -> None:
    where = {entry.name: number for number, entries in enumerate(own) for entry in entries}
    error: OSError | None = None
    writer: SafetensorsWriter | None = None
    current = -1

    def close() -> None:
        if writer is not None:
            report["files"][writer.path.name] = writer.close()
            report["tensors"] |= writer.tensors

    for value, rule, at in staged.parts:
        shards = weights.gather(value, at, rule.kind, ranks)
        if at.index or error:
            continue  # the others still need this rank in their gathers
        try:
            for name, whole in zip(rule.names, weights.split(rule, shards, staged.shape), strict=True):
                if writer is None or where[name] != current:
                    close()
                    current = where[name]
                    writer = SafetensorsWriter(aside / names[current], own[current])
                writer.write(name, _raw(whole))
        except OSError as failure:
            error = failure
    try:
        if error is None:
            close()
    except OSError as failure:
        error = failure
    if error:
        if writer is not None:
            writer.abandon()
        raise _CannotWrite(str(error))


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous on the CPU."""
    data: Any = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return memoryview(data)


def _finish(folder: Path, aside: Path, source: Path, parts: list[dict[str, Any]], dtype: str) -> None:
    files = {name: entry for part in parts for name, entry in part["files"].items()}
    tensors = {name: entry for part in parts for name, entry in part["tensors"].items()}
    copy_companions(source, aside, dtype)
    if len(files) > 1:
        total = sum(entry["bytes"] for entry in files.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: t["file"] for name, t in sorted(tensors.items())},
        }
        (aside / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for path in aside.iterdir():
        if path.name not in files:
            write_durably(path, path.read_bytes())
            files[path.name] = checksum(path)
    manifest = {"format": 1, "algorithm": "sha256", "files": files, "tensors": tensors}
    write_durably(aside / MANIFEST, json.dumps(manifest).encode())
    sync_folder(aside)
    aside.rename(folder)
    sync_folder(folder.parent)
