"""What can be seen to be missing before anything starts.

Invariant: `problems` starts nothing and changes nothing; each message names what is missing and the command or field
that mends it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from configs import RunConfig

ROOT = Path(__file__).resolve().parents[2]  # of the source, where Lagrange runs from that
NEEDED_BYTES = 512 * 1024**2  # metrics, logs, three published versions and two checkpoints of a tiny model


def free_bytes(folder: Path) -> int:
    """Free space, in bytes, where `folder` is or would be made."""
    at = folder.absolute()
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free


def problems(config: RunConfig, *, free: int) -> list[str]:
    """Why the run cannot start, one message each. free: bytes left on the disk of the run's folder."""
    found = []
    if free < NEEDED_BYTES:
        found.append(
            f"no space: {free / 1024**2:.0f} MiB are free under {config.run.directory}, a run needs "
            f"{NEEDED_BYTES / 1024**2:.0f} MiB. Free some, or set run.directory to another disk."
        )
    path = config.model.path
    if path is not None and config.model.tiny is None and not (path / "config.json").is_file():
        found.append(
            f"model.path: {path} holds no checkpoint (config.json is missing). Put a Hugging Face checkpoint there, "
            "or use model.tiny."
        )
    if not config.engine.urls and not config.engine.python.exists():
        found.append(_no_engine(config.engine.python))
    return found


def _no_engine(python: Path) -> str:
    """What is said of an interpreter for SGLang that is not there; `make setup` puts one below ROOT."""
    if not python.is_absolute() and (ROOT / python).exists():
        return (
            f"engine.python: {python} is in {ROOT} and not in the folder from which lagrange is called, {Path.cwd()}. "
            f"Set engine.python: {ROOT / python}, or call lagrange from {ROOT}."
        )
    return (
        f"engine.python: {python} is missing, so SGLang cannot be started. Run `make setup`, or name an interpreter "
        "that has SGLang."
    )
