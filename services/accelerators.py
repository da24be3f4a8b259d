"""What `device: cuda` needs of this machine: a GPU, and a build of PyTorch that can use one.

Invariant: files are read, torch is never imported (seconds, and the engine's lies in another environment). What cannot
be told is no finding: an interpreter that is no virtual environment, or one whose PyTorch lies elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs import RunConfig

DEVICES = ("nvidia[0-9]*", "dxg", "kfd")  # NVIDIA's, those of Windows' Linux, AMD's (whose torch says cuda, too)
_ASSIGNED = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*(?:None|['\"](.*?)['\"])", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """version: such as 2.13.0+cpu. on_gpu: whether it was built for CUDA or ROCm."""

    version: str
    on_gpu: bool


def torch_build(environment: Path) -> TorchBuild | None:
    """Which PyTorch the virtual environment in this folder holds; None if there is none, or it cannot be told."""
    for file in environment.glob("lib/python3*/site-packages/torch/version.py"):
        try:
            said = dict(_ASSIGNED.findall(file.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError):
            return None
        if "__version__" in said and "cuda" in said:
            return TorchBuild(said["__version__"], bool(said["cuda"] or said.get("hip")))
    return None


def lacking(config: RunConfig, *, own: Path = Path(sys.prefix), devices: Path = Path("/dev")) -> list[str]:
    """Why engines or trainer could not compute on a GPU of this machine, one message each.

    own: the environment of this process, which is the trainer's. devices: where a GPU would show.
    """
    wanted = tuple(_on_this_machine(config, own))
    found = [
        f"{field} is cuda, but {environment} holds the CPU build of torch ({build.version}). Install a CUDA build, "
        f"see docs/run-it.md (On a GPU), or set {field}: cpu."
        for field, environment in wanted
        if (build := torch_build(environment)) is not None and not build.on_gpu
    ]
    if wanted and not any(True for pattern in DEVICES for _ in devices.glob(pattern)):
        fields = " and ".join(field for field, _ in wanted)
        found.append(
            f"{fields}: cuda, but this machine shows no GPU ({devices}/nvidia0 is missing). Install NVIDIA's driver, "
            "run where there is a GPU, or set cpu."
        )
    return found


def _on_this_machine(config: RunConfig, own: Path) -> Iterator[tuple[str, Path]]:
    """(field, environment) of what `lagrange up` starts here for a GPU."""
    if config.engine.device == "cuda" and not config.engine.urls:
        yield "engine.device", config.engine.python.parent.parent
    if config.trainer.device == "cuda" and config.trainer.launcher != "ray":  # whose ranks may be anywhere
        yield "trainer.device", own
