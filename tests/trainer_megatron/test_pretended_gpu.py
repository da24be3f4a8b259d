"""The whole model on a pretended GPU against the CPU: a tensor on the wrong one raises (tests/trainer/on_gpu.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.trainer_megatron.compare import distance, largest, part, relative, weights
from tests.trainer_megatron.conftest import Results, run
from tests.trainer_megatron.test_single import Single

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def on_gpu(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks, with what qwen3-30b-a3b.yaml asks for: tensor, sequence and expert parallel, recomputed, spread."""
    out = tmp_path_factory.mktemp("gpu")
    config = {
        "trainer.device": "cuda",
        "trainer.layout.tensor": 2,
        "trainer.layout.expert": 2,
        "trainer.layout.expert_tensor": 1,
        "trainer.recompute": True,
        "trainer.distributed_optimizer": True,
    }
    routed: dict[str, Any] = {"with_routes": True}
    do: list[list[Any]] = [
        ["model", "", {"folder": str(reference / "moe")}],
        ["scores", "scores", {}],
        ["gradients", "gradients", routed],
        ["step", "step-1", {}],
        ["beside", "beside", {"folder": str(out / "export"), "root": str(out / "checkpoints")}],
        ["load", "loaded", {"root": str(out / "checkpoints")}],
        ["gradients", "gradients-2", routed],
        ["step", "step-2", {}],
    ]
    run("-m", "tests.trainer_megatron.gpu_worker", str(out), json.dumps([{"config": config, "do": do}]))
    exported = {
        name: value for path in (out / "export").glob("*.safetensors") for name, value in load_file(path).items()
    }
    return {path.stem: load_file(path) for path in out.glob("*.safetensors")} | {"export": exported}


def test_log_probs_and_gradients_are_those_of_the_cpu(on_gpu: Results, single: Single) -> None:
    assert largest(on_gpu["scores"], single[0]["scores-moe"]) < 1e-5
    assert relative(part(on_gpu["gradients"], "grad"), part(single[0]["routed"], "grad")) < 1e-5


def test_an_optimizer_step_is_that_of_the_cpu(on_gpu: Results, single: Single) -> None:
    assert distance(weights(on_gpu["step-1"]), weights(single[0]["step-1"])) < 1e-5


def test_what_another_thread_wrote_is_what_was_staged(on_gpu: Results, single: Single) -> None:
    assert largest(weights(on_gpu["export"]), weights(on_gpu["step-1"])) == 0
    assert largest(weights(on_gpu["loaded"]), weights(on_gpu["step-1"])) == 0
    assert distance(weights(on_gpu["step-2"]), weights(single[0]["step-2"])) < 1e-5
