"""A run that asks for a GPU is refused before its start where torch or the machine cannot serve it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from configs import ConfigError, load_config
from services.accelerators import TorchBuild, lacking, torch_build
from services.local.plan import plan_new

LOCAL = Path(__file__).parents[2] / "configs" / "local.yaml"
CPU, CUDA, ROCM = (
    ("2.13.0+cpu", "Optional[str] = None", "Optional[str] = None"),
    ("2.14.1+cu130", "Optional[str] = '13.0'", "Optional[str] = None"),
    ("2.13.0+rocm7.1", "Optional[str] = None", "Optional[str] = '7.1.2'"),
)


def environment(folder: Path, build: tuple[str, str, str]) -> Path:
    """A virtual environment as far as it is looked at."""
    version, cuda, hip = build
    torch = folder / "lib/python3.11/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text(
        f"from typing import Optional\n\n__all__ = ['__version__', 'cuda']\n__version__ = '{version}'\n"
        f"debug = False\ncuda: {cuda}\ngit_version = 'cuda'\nhip: {hip}\nrocm: {hip}\n"
    )
    return folder


def devices(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in ("null", "nvidiactl", *names):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(("build", "on_gpu"), [(CPU, False), (CUDA, True), (ROCM, True)])
def test_a_build_of_torch_is_told_from_its_files(tmp_path: Path, build: tuple[str, str, str], on_gpu: bool) -> None:
    assert torch_build(environment(tmp_path, build)) == TorchBuild(build[0], on_gpu)


def test_of_the_torch_that_runs_here_the_same_is_told_as_it_says_itself() -> None:
    torch = pytest.importorskip("torch")
    found = torch_build(Path(sys.prefix))
    assert found == TorchBuild(torch.__version__, torch.version.cuda is not None or torch.version.hip is not None)


def test_an_interpreter_outside_an_environment_is_not_judged(tmp_path: Path) -> None:
    assert torch_build(tmp_path) is None
    file = environment(tmp_path / "odd", CPU) / "lib/python3.11/site-packages/torch/version.py"
    file.write_bytes(b"\xff")
    assert torch_build(tmp_path / "odd") is None


@pytest.mark.parametrize(
    ("engine", "trainer", "gpus", "said"),
    [
        (CUDA, CUDA, ("nvidia0",), []),
        (CUDA, CUDA, ("nvidia3",), []),  # a container that was given the fourth
        (CPU, CUDA, ("nvidia0",), ["engine.device is cuda, but {engine} holds the CPU build of torch (2.13.0+cpu)"]),
        (CUDA, CPU, ("nvidia0",), ["trainer.device is cuda, but {own} holds the CPU build of torch (2.13.0+cpu)"]),
        (CUDA, CUDA, (), ["engine.device and trainer.device: cuda, but this machine shows no GPU"]),
        (CPU, CPU, (), ["engine.device is", "trainer.device is", "no GPU"]),
    ],
)
def test_each_thing_that_a_gpu_run_lacks_is_said(
    tmp_path: Path, engine: Any, trainer: Any, gpus: tuple[str, ...], said: list[str]
) -> None:
    theirs, own = environment(tmp_path / "sglang", engine), environment(tmp_path / "own", trainer)
    asked = {"engine.device": "cuda", "trainer.device": "cuda", "engine.python": str(theirs / "bin/python")}
    found = lacking(load_config(LOCAL, asked), own=own, devices=devices(tmp_path / "dev", *gpus))
    assert len(found) == len(said)
    for message, words in zip(found, said, strict=True):
        assert words.format(engine=theirs, own=own) in message


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"engine.device": "cuda", "engine.urls": ["http://elsewhere:30000"]},
        {"trainer.device": "cuda", "trainer.launcher": "ray"},
    ],
)
def test_what_computes_on_the_cpu_or_elsewhere_needs_no_gpu_here(tmp_path: Path, asked: dict[str, Any]) -> None:
    own = environment(tmp_path / "own", CPU)
    assert lacking(load_config(LOCAL, asked), own=own, devices=devices(tmp_path / "dev")) == []


def test_up_refuses_a_gpu_run_with_the_cpu_build_of_torch_before_it_writes_anything(tmp_path: Path) -> None:
    asked = {"engine.device": "cuda", "engine.python": str(environment(tmp_path / "sglang", CPU) / "bin/python")}
    with pytest.raises(ConfigError, match=r"CPU build of torch \(2\.13\.0\+cpu\).*docs/run-it\.md"):
        plan_new(LOCAL, {**asked, "run.directory": str(tmp_path / "runs")})
    assert not (tmp_path / "runs").exists()
