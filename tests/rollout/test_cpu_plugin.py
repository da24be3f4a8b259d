"""The CPU plugin acts only when it is asked to, and gives way to real kernels. Each case has its own interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "rollout" / "sglang_cpu_plugin"


def python(code: str, *, cpu: bool, path: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in (PLUGIN, path) if p)}
    environment.pop("SGLANG_USE_CPU_ENGINE", None)
    if cpu:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


INSTALL = "from lagrange_sglang_cpu.imports import install; first = install(); "


def test_nothing_happens_without_the_variable() -> None:
    code = "import sys; before = list(sys.meta_path); " + INSTALL + "print(first, before == sys.meta_path)"
    assert python(code, cpu=False) == "False True"
    assert "No module named 'sgl_kernel'" in python(INSTALL + "import sgl_kernel", cpu=False)
    assert python("from lagrange_sglang_cpu.plugin import register; print(register())", cpu=False) == "None"


def test_the_hooks_are_installed_once() -> None:
    assert python(INSTALL + "print(first, install())", cpu=True) == "True False"


def test_every_kernel_can_be_imported_and_none_can_be_called() -> None:
    code = (
        INSTALL
        + "from sgl_kernel import anything; import sgl_kernel; print(hasattr(sgl_kernel, '__all__')); anything()"
    )
    assert "sgl_kernel.anything has no CPU version" in python(code.replace("print", "str"), cpu=True)
    assert python(code.removesuffix("; anything()"), cpu=True) == "False"


def test_real_kernels_win(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel.py").write_text("real = True\n")
    assert python(INSTALL + "import sgl_kernel; print(sgl_kernel.real)", cpu=True, path=tmp_path) == "True"


def test_the_operators_of_torchvision_are_known_before_it_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "torchvision.py").write_text("import torch\nschema = str(torch.ops.torchvision.nms.default._schema)\n")
    code = INSTALL + "import torchvision; print(torchvision.schema)"
    assert "Tensor dets, Tensor scores" in python(code, cpu=True, path=tmp_path)
