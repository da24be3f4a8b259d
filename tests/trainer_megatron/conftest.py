"""Runs ranks and the Hugging Face reference in processes of their own, once for all tests.

megatron is never imported into the test process: on a CPU it needs a changed torch (trainer/megatron/compat.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[2]
Results = dict[str, dict[str, Tensor]]
Runner = Callable[..., Results]


def run(*command: str, timeout: float = 580) -> None:
    """Run python with these arguments from the project's root; fail with its output if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of make_reference.py: models, log-probs, entropies and gradients by transformers."""
    folder = tmp_path_factory.mktemp("reference")
    run("-m", "tests.trainer_megatron.make_reference", str(folder), "moe", "moe-tied", "qwen2", "qwen3", "llama")
    return folder


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs worker.py under (configuration, what to do) pairs and returns its results by key."""

    def start(*parts: tuple[dict[str, Any], list[list[Any]]]) -> Results:
        out = tmp_path_factory.mktemp("ranks")
        spec = [{"config": config, "do": do} for config, do in parts]
        run("-m", "tests.trainer_megatron.worker", str(out), json.dumps(spec))
        return {path.stem: load_file(path) for path in out.glob("*.safetensors")}

    return start


@pytest.fixture(scope="session")
def single(reference: Path, ranks: Runner, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """One process that does everything once: (results by key, folder with its exports and checkpoints)."""
    folder = tmp_path_factory.mktemp("single")
    routed = {"with_routes": True}
    moe = str(reference / "moe")
    do: list[list[Any]] = []
    for family in ("moe-tied", "qwen2", "qwen3", "llama"):
        do += [
            ["model", "", {"folder": str(reference / family)}],
            ["scores", f"scores-{family}", {}],
            ["gradients", f"gradients-{family}", {}],
            ["export", f"export-{family}", {"folder": str(folder / family)}],
        ]
    do += [
        ["model", "", {"folder": moe, "overrides": {"trainer.recompute": True}}],
        ["gradients", "routed-recompute", routed],
        ["model", "", {"folder": moe}],
        ["export", "export-moe", {"folder": str(folder / "moe")}],
        ["scores", "scores-moe", {}],
        ["whole_logits", "whole-logits", {}],
        ["frugal", "frugal", {}],
        ["fused_state", "fused-state", {}],
        ["scores", "scores-unpacked", {"unpacked": True}],
        ["gradients", "gradients-moe", {}],
        ["drop_gradients", "dropped", {}],
        ["gradients", "gradients-unpacked", {"unpacked": True}],
        ["drop_gradients", "dropped", {}],
        ["replay_own", "replay-own", {}],
        ["drop_gradients", "dropped", {}],
        ["refuse_routes", "refused", {}],
        ["gradients", "routed", routed],
        ["step", "poisoned", {"poison": True}],
        ["gradients", "routed-again", routed],
        ["step", "step-1", {}],
        ["save", "saved-1", {"root": str(folder / "checkpoints"), "step": 1}],
        ["noise", "noise", {}],
        ["gradients", "gradients-2", routed],
        ["step", "step-2", {}],
        ["save", "saved-2", {"root": str(folder / "checkpoints"), "step": 2}],
        ["save_late", "saved-late", {"root": str(folder / "late"), "step": 2}],
        ["gradients", "gradients-4", routed],
        ["step", "step-4", {}],
        ["load", "loaded-late", {"root": str(folder / "late")}],
        ["gradients", "gradients-again", routed],
        ["step", "step-3-again", {}],
        ["gradients", "gradients-again", routed],
        ["step", "step-4-again", {}],
    ]
    return ranks(({}, do)), folder
