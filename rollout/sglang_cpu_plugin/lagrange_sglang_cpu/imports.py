"""Import hooks that a CPU needs before `sglang` is imported.

Invariant: `install` changes `sys.meta_path` only when SGLANG_USE_CPU_ENGINE=1, and once; a real `sgl_kernel` wins.

sgl_kernel (needed by sglang 0.5.23): with SGLANG_USE_CPU_ENGINE=1 sglang imports names from it at module level, for
    instance in srt/mem_cache/allocation.py, but the CPU build of the kernels is not on PyPI. Without AMX all CPU paths
    fall back to plain torch, so the names have to exist and are never called; one that is called says so.
torchvision (needed by sglang 0.5.23 with torchvision 0.28.0 beside torch 2.13.0+cpu): sglang imports it at start, but
    the compiled part of the PyPI wheel is built for CUDA and does not load, and then its Python part fails because the
    operators nms and qnms are unknown. Their schemas are declared first; only pure Python parts are used after that.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def install() -> bool:
    """Put the hooks in place; False if SGLANG_USE_CPU_ENGINE is not 1 or they are there already."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or any(isinstance(f, _CpuFinder) for f in sys.meta_path):
        return False
    sys.meta_path.insert(0, _CpuFinder())
    return True


class _CpuFinder(importlib.abc.MetaPathFinder):
    """Serves the stand-in, and declares torchvision's operators when somebody asks for that package."""

    def __init__(self) -> None:
        self._library: Any = None  # torch forgets the operators when the library object goes
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision" and self._library is None:
            self._declare()
        if name == "sgl_kernel" and not self._asking and not self._real_kernels():
            return importlib.machinery.ModuleSpec(name, _StandIn(), is_package=True)
        return None

    def _declare(self) -> None:
        import torch  # only the engine's environment has to pay for it

        self._library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            self._library.define(schema)

    def _real_kernels(self) -> bool:
        self._asking = True
        try:
            return importlib.util.find_spec("sgl_kernel") is not None
        finally:
            self._asking = False


class _StandIn(importlib.abc.Loader):
    """Makes a module in which every public name exists and refuses to be called."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _missing_kernel
        module.__dict__["__path__"] = []


def _missing_kernel(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_arguments: Any, **_named: Any) -> Any:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU version in this installation. Leave out the engine option that needs it, "
            "or install a build of sgl-kernel for this machine."
        )

    kernel.__name__ = name
    return kernel
