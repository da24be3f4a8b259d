"""Gloo ranks in every layout against the single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_megatron.compare import different, distance, largest, part, relative, weights
from trainer.megatron.hf_files import weight_files

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]
Single = tuple[dict[str, dict[str, torch.Tensor]], Path]

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"trainer.layout.data": 2},
    "TP2": {"trainer.layout.tensor": 2},
    "PP2": {"trainer.layout.pipeline": 2, "trainer.recompute": True},
    "EP2": {"trainer.layout.data": 2, "trainer.layout.expert": 2},
    "TP2xEP2": {
        "trainer.layout.data": 2,
        "trainer.layout.tensor": 2,
        "trainer.layout.expert": 2,
        "trainer.layout.expert_tensor": 1,
    },
    "PP2xEP2": {
        "trainer.layout.data": 2,
        "trainer.layout.pipeline": 2,
        "trainer.layout.expert": 2,
        "trainer.recompute": True,
    },
}
FOUR_RANKS = ("TP2xEP2", "PP2xEP2")


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] * (n in FOUR_RANKS)) for n in LAYOUTS])
def test_a_layout_computes_what_one_process_does(
    single: Single, reference: Path, ranks: Any, tmp_path: Path, layout: str
) -> None:
    results = single[0]
    moe = str(reference / "moe")
    root = str(tmp_path / "checkpoints")
    spread = {"trainer.distributed_optimizer": True}
    got = ranks(
        LAYOUTS[layout],
        [
            ["model", "", {"folder": moe}],
            ["export", "export", {"folder": str(tmp_path / "export")}],
            ["scores", "scores", {}],
            ["gradients", "routed", {"with_routes": True}],
            ["step", "step-1", {}],
            ["model", "", {"folder": moe, "overrides": spread}],
            ["gradients", "-", {"with_routes": True}],
            ["step", "spread-1", {}],
            ["save", "saved", {"root": root, "step": 1}],
            ["gradients", "-", {"with_routes": True}],
            ["step", "spread-2", {}],
            ["load", "loaded", {"root": root}],
            ["gradients", "-", {"with_routes": True}],
            ["step", "resumed-2", {}],
        ],
    )
    assert largest(got["scores"], results["scores-moe"]) < 1e-5
    assert relative(part(got["routed"], "grad"), part(results["routed"], "grad")) < 1e-5
    assert torch.allclose(got["routed"]["totals"], results["routed"]["totals"], rtol=1e-5)
    assert got["routed"]["replay"][:2].tolist() == results["routed"]["replay"][:2].tolist()
    for norm in (got["step-1"]["norm"], got["spread-1"]["norm"]):
        assert torch.allclose(norm, results["step-1"]["norm"], rtol=1e-5)
    for name in ("step-1", "spread-1"):
        # In norm: Adam's first step is lr * g / (|g| + eps), so a single g near eps shows its rounding.
        assert distance(weights(got[name]), weights(results["step-1"])) < 1e-5
    assert different(part(got["loaded"], "model."), part(got["spread-1"], "model.")) == []
    assert different(got["resumed-2"], got["spread-2"]) == []
    exported: dict[str, torch.Tensor] = {}
    for file in set(weight_files(tmp_path / "export").values()):
        exported |= load_file(tmp_path / "export" / file)
    assert different(exported, load_file(reference / "moe" / "model.safetensors")) == []
