"""Checkpoints: what a restart begins from.

Invariant: a checkpoint that `latest` names was written completely: its files have the sizes and checksums of its
manifest, which is written last, before a rename makes the folder visible. A torn or corrupt one is passed over for the
one before. And it belongs to the history that goes on: after `take_over` no trainer of another epoch finishes one.

    root/epoch              the trainer that may write here: who took over last
    root/superseded-...     the newest checkpoint beyond the one from which a successor went on; older ones are deleted
    root/step-00000020/     tensors by megatron's dist_checkpointing (torch_dist: any layout can read the weights)
        state.json          TrainingState and the layout
        rank-00000.safetensors  what each rank alone reads: random generators, its part of a distributed optimizer
        manifest.json       sizes and checksums of all of the above

Folders of any other name are nobody's: never resumed from, never deleted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from torch import OutOfMemoryError
from torch.distributed import DistError
from torch.distributed.checkpoint.api import CheckpointException

from configs.load import ConfigError
from trainer.megatron.parallel import Parallel, gather_bytes
from trainer.megatron.policy import PolicyModel
from trainer.megatron.safetensors_file import MANIFEST, checksum, sync_folder, verify_manifest, write_durably
from trainer.versions import remove_unfinished

_STATE = "state.json"
_OWNER = "epoch"
_NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})")
_SUPERSEDED = re.compile("superseded-step-([0-9]+)-by-([0-9]+)")
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The part of a checkpoint that is not tensors.

    step: optimizer steps done. version: of the saved weights. consumed: group ids whose effect is in the weights and
    that are not yet committed. prompt_cursor: the trained frontier of the prompts. config_hash: of the configuration
    that trained. extra: anything else that JSON can hold. epoch: of the trainer that wrote it.
    """

    step: int
    version: int
    consumed: tuple[int, ...]
    prompt_cursor: int
    config_hash: str
    extra: dict[str, Any] = field(default_factory=dict)
    epoch: int = -1


def stage_checkpoint(policy: PolicyModel, root: Path, state: TrainingState, *, keep: int) -> Callable[[], Path]:
    """Copy weights, optimizer and RNG to memory now; what is returned writes root/step-<step>.

    Called on every rank alike. The function is collective over `policy.parallel.writers` and may run on any thread: the
    folder is durable (fsync) when it returns it; of the checkpoints up to this step all but `keep` are removed, of
    those set aside all but the newest, and one of the same step is replaced. It raises OSError on every rank, with
    the earlier checkpoints untouched, if one rank cannot write, or if another trainer took over.
    """
    from trainer.megatron import checkpoint_io  # after compat.install, which `parallel` calls

    staged = checkpoint_io.stage_tensors(policy)
    document = {"format": _FORMAT, "state": dataclasses.asdict(state), "layout": layout_of(policy)}
    ranks = policy.parallel
    folder = root / f"step-{state.step:08d}"
    aside = root / f".{folder.name}.{state.epoch}.partial"  # a successor's of the same step is another folder

    def write() -> Path:
        _agree(ranks, _on_main(ranks, _make_empty, aside))
        _agree(ranks, _tried(checkpoint_io.write_tensors, staged, aside, ranks.writers))
        names = sorted(path.name for path in aside.iterdir())[ranks.rank :: ranks.world]
        files: dict[str, Any] = {}
        _agree(ranks, _tried(_seal, aside, names, files))
        for part in gather_bytes(json.dumps(files).encode(), ranks.writers):
            files |= json.loads(part)
        _agree(ranks, _on_main(ranks, _finish, aside, folder, document, files, keep))
        return folder

    return write


def layout_of(policy: PolicyModel) -> dict[str, Any]:
    """What must be equal for a bit-for-bit resume."""
    trainer = policy.config.trainer
    return trainer.layout.model_dump() | {
        "dtype": trainer.dtype,
        "distributed_optimizer": trainer.distributed_optimizer,
    }


def _tried(step: Any, *arguments: Any) -> str:
    try:
        step(*arguments)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch reports a full disk as a RuntimeError
        return str(error) or repr(error)
    return ""


def _on_main(ranks: Parallel, step: Any, *arguments: Any) -> str:
    return _tried(step, *arguments) if ranks.is_main else ""


def _agree(ranks: Parallel, error: str) -> None:
    """Raise OSError on every rank if one of them had an error."""
    errors = [part.decode() for part in gather_bytes(error.encode(), ranks.writers) if part]
    if errors:
        raise OSError(f"the checkpoint could not be written: {errors[0]}")


def _make_empty(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _seal(aside: Path, names: list[str], files: dict[str, Any]) -> None:
    for name in names:
        path = aside / name
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        files[name] = checksum(path)


def _finish(aside: Path, folder: Path, document: dict[str, Any], files: dict[str, Any], keep: int) -> None:
    write_durably(aside / _STATE, json.dumps(document).encode())
    files[_STATE] = checksum(aside / _STATE)
    manifest = {"format": 1, "algorithm": "sha256", "files": files}
    write_durably(aside / MANIFEST, json.dumps(manifest).encode())
    sync_folder(aside)
    epoch, owner = document["state"]["epoch"], owner_of(folder.parent)
    if owner not in (None, epoch):
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"the trainer of epoch {owner} has taken over from that of epoch {epoch}")
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
    sync_folder(folder.parent)
    step = document["state"]["step"]
    # Folders of later steps are broken, or `latest` would have resumed from them: they must not push this one out.
    old = [path for at, path in _checkpoints(folder.parent) if at <= step][keep:]
    for path in [*old, *_superseded(folder.parent)[1:]]:
        shutil.rmtree(path, ignore_errors=True)


def take_over(root: Path, epoch: int, step: int) -> list[Path]:
    """From here on only the trainer of `epoch`, which resumes from `step`, finishes checkpoints in root.

    Called on one rank, after the broker has fenced the trainer before. That one may be inside a write, or sleep before
    one: first it is no owner any more, then what it was writing goes, then what it finished beyond `step` in the
    meantime is set aside: its groups were handed out again. Returns what was set aside. Raises OSError.
    """
    remove_unfinished(root)  # it may have filled the disk, which must have room for the file
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_durably(root / _OWNER, str(epoch).encode())
        sync_folder(root)
    except OSError as error:
        raise OSError(f"checkpoints cannot be written to {root}: {error}") from error
    remove_unfinished(root)
    aside = []
    for at, folder in _checkpoints(root):
        if at > step:
            aside.append(folder.rename(root / f"superseded-{folder.name}-by-{epoch}"))
            structlog.get_logger(__name__).warning("checkpoint.superseded", folder=str(aside[-1]), resumed_from=step)
    return aside


def owner_of(root: Path) -> int | None:
    """The epoch that took over last; None if nobody did. Raises OSError if the file does not say."""
    file = root / _OWNER
    try:
        return int(file.read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OSError(f"{file} does not name the trainer that may write here; the next start writes it anew") from error


def _checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints of root, whole or not, newest first."""
    named = [(match, path) for path in _listed(root) if (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in named), reverse=True)


def _superseded(root: Path) -> list[Path]:
    """What `take_over` set aside, newest first."""
    named = [(match, path) for path in _listed(root) if (match := _SUPERSEDED.fullmatch(path.name))]
    return [path for _, _, path in sorted(((int(m[2]), int(m[1]), path) for m, path in named), reverse=True)]


def _listed(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.is_dir() else []


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint of root, or None. Broken ones are logged and passed over. Not collective."""
    for _, folder in _checkpoints(root):
        problems = verify_manifest(folder)
        if not problems:
            return folder
        structlog.get_logger(__name__).warning("checkpoint.broken", folder=str(folder), problems=problems[:3])
    return None


def latest_on_all(parallel: Parallel, root: Path) -> Path | None:
    """`latest`, as rank 0 sees it, on every rank."""
    found = latest(root) if parallel.is_main else None
    name = parallel.broadcast_bytes(str(found or "").encode() if parallel.is_main else None).decode()
    return Path(name) if name else None


def load_checkpoint(policy: PolicyModel, folder: Path) -> TrainingState:
    """Restore weights, optimizer and RNG; collective. In the same layout training continues bit for bit.

    In another layout the weights are restored and the optimizer starts afresh, which is logged. Raises ConfigError if
    the folder does not hold a checkpoint of this model.
    """
    from trainer.megatron import checkpoint_io  # after compat.install, which `parallel` calls

    state, layout = read_state(folder), _document(folder)["layout"]
    same = layout == layout_of(policy)
    if not same and policy.parallel.is_main:
        structlog.get_logger(__name__).warning(
            "checkpoint.other_layout", folder=str(folder), saved=layout, now=layout_of(policy), effect="fresh optimizer"
        )
    try:
        checkpoint_io.load_tensors(policy, folder, with_optimizer=same)
    except (OutOfMemoryError, DistError):  # RuntimeErrors, too, and not the checkpoint's fault
        raise
    except (KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}: not a checkpoint of this model: {error}") from error
    return state


def _document(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: not a usable checkpoint: {error}") from error
    if found.get("format") != _FORMAT:
        raise ConfigError(
            f"{folder}: its format is {found.get('format')}, this release reads {_FORMAT}. Start a new run from the "
            "weights that it exported last (model.path)."
        )
    return found


def read_state(folder: Path) -> TrainingState:
    """The JSON part alone, without tensors and without megatron. Raises ConfigError if it cannot be read."""
    state = _document(folder)["state"]
    return TrainingState(**(state | {"consumed": tuple(state["consumed"])}))
