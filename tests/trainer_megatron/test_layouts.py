"""Gloo ranks in every layout against the single process; all layouts of two ranks in one start of two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_megatron.compare import different, distance, largest, part, relative, weights
from tests.trainer_megatron.conftest import Results
from trainer.megatron.hf_files import weight_files
from trainer.megatron.safetensors_file import verify_manifest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]
Single = tuple[Results, Path]

Layout = dict[str, Any]
SPREAD = {"trainer.distributed_optimizer": True}
TWO: dict[str, Layout] = {
    "DP2": {"trainer.layout.data": 2},
    "TP2": {"trainer.layout.tensor": 2},
    "PP2": {"trainer.layout.pipeline": 2, "trainer.recompute": True},
    "EP2": {"trainer.layout.data": 2, "trainer.layout.expert": 2},
}
FOUR: dict[str, Layout] = {
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
    "TP2xEP2xETP2": {
        "trainer.layout.data": 2,
        "trainer.layout.tensor": 2,
        "trainer.layout.expert": 2,
        "trainer.layout.expert_tensor": 2,
        "trainer.recompute": True,
    },
    "TP2xPP2": {
        "trainer.layout.tensor": 2,
        "trainer.layout.pipeline": 2,
        "trainer.recompute": True,
    },
}
LAYOUTS = [*TWO, *(pytest.param(name, marks=pytest.mark.soak) for name in FOUR)]


def work(name: str, layout: Layout, moe: str, folder: Path) -> tuple[Layout, list[list[Any]]]:
    """What one layout is asked to do; its results are named <layout>/<key> with a dash."""
    routed = {"with_routes": True}
    root = str(folder / f"{name}-checkpoints")
    return layout, [
        ["model", "", {"folder": moe}],
        ["scores", f"{name}-scores", {}],
        ["gradients", f"{name}-routed", routed],
        ["step", f"{name}-step-1", {}],
        ["model", "", {"folder": moe, "overrides": SPREAD}],
        ["gradients", f"{name}--", routed],
        ["step", f"{name}-spread-1", {}],
        ["stage_alone", f"{name}--", {"root": root}],
        ["beside", f"{name}-beside", {"folder": str(folder / f"{name}-beside"), "root": root}],
        ["gradients", f"{name}--", routed],
        ["step", f"{name}-spread-3", {}],
        ["load", f"{name}-loaded", {"root": root}],
        ["gradients", f"{name}--", routed],
        ["step", f"{name}--", {}],
        ["gradients", f"{name}--", routed],
        ["step", f"{name}-resumed-3", {}],
    ]


@pytest.fixture(scope="module")
def two(reference: Path, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """Every layout of two ranks: (results by key, folder with exports and checkpoints)."""
    folder, moe = tmp_path_factory.mktemp("two"), str(reference / "moe")
    parts = [work(name, layout, moe, folder) for name, layout in TWO.items()]
    tied = str(reference / "moe-tied")
    parts.append(
        (
            {"trainer.layout.pipeline": 2},
            [
                ["model", "", {"folder": tied}],
                ["scores", "tied-scores", {}],
                ["gradients", "tied-gradients", {}],
                ["step", "tied-step", {}],
                ["export", "tied-export", {"folder": str(folder / "tied")}],
            ],
        )
    )
    parts.append(
        (
            TWO["TP2"],
            [
                ["model", "", {"folder": str(reference / "qwen2")}],
                ["scores", "biased-scores", {}],
                ["gradients", "biased-gradients", {}],
                ["export", "biased-export", {"folder": str(folder / "biased")}],
            ],
        )
    )
    parts.append(  # the checkpoint of another layout
        (
            TWO["TP2"] | SPREAD,
            [
                ["model", "", {"folder": moe}],
                ["load", "other-loaded", {"root": str(folder / "EP2-checkpoints")}],
                ["gradients", "other-gradients", {"with_routes": True}],
                ["step", "other-step", {}],
            ],
        )
    )
    return ranks(*parts), folder


@pytest.fixture(scope="module")
def half(reference: Path, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """bfloat16 in every layout of two ranks, with the distributed optimizer."""
    folder = tmp_path_factory.mktemp("half")

    def do(name: str) -> list[list[Any]]:
        root = str(folder / name)
        return [
            ["model", "", {"folder": str(reference / "moe")}],
            ["gradients", f"{name}-routed", {"with_routes": True}],
            ["step", f"{name}-step-1", {}],
            ["save", f"{name}-saved", {"root": root, "step": 1}],
            ["gradients", f"{name}--", {"with_routes": True}],
            ["step", f"{name}-step-2", {}],
            ["load", f"{name}-loaded", {"root": root}],
            ["gradients", f"{name}--", {"with_routes": True}],
            ["step", f"{name}-resumed-2", {}],
        ]

    bfloat16 = {"trainer.dtype": "bfloat16"} | SPREAD
    found: Results = ranks(*((layout | bfloat16, do(name)) for name, layout in TWO.items()))
    return found


@pytest.fixture(scope="module")
def four(reference: Path, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """Every layout of four ranks."""
    folder, moe = tmp_path_factory.mktemp("four"), str(reference / "moe")
    return ranks(*(work(name, layout, moe, folder) for name, layout in FOUR.items())), folder


@pytest.fixture
def got(request: pytest.FixtureRequest, layout: str) -> tuple[Results, Path]:
    """One layout's results, by the key without its name."""
    results, folder = request.getfixturevalue("two" if layout in TWO else "four")
    return {k.removeprefix(f"{layout}-"): v for k, v in results.items() if k.startswith(f"{layout}-")}, folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_one_process_does(single: Single, got: Single, layout: str) -> None:
    found, want = got[0], single[0]
    assert largest(found["scores"], want["scores-moe"]) < 1e-5
    assert relative(part(found["routed"], "grad"), part(want["routed"], "grad")) < 1e-5
    assert torch.allclose(found["routed"]["totals"], want["routed"]["totals"], rtol=1e-5)
    assert found["routed"]["replay"][:2].tolist() == want["routed"]["replay"][:2].tolist()
    for name in ("step-1", "spread-1"):
        assert torch.allclose(found[name]["norm"], want["step-1"]["norm"], rtol=1e-5)
        # In norm: Adam's first step is lr * g / (|g| + eps), so a single g near eps shows its rounding.
        assert distance(weights(found[name]), weights(want["step-1"])) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_beside_the_next_step_is_what_was_staged_before_it(got: Single, layout: str) -> None:
    found, folder = got
    before = weights(found["spread-1"])
    exported: Any = {}
    written = folder / f"{layout}-beside"
    assert verify_manifest(written) == []
    for file in set(weight_files(written).values()):
        exported |= load_file(written / file)
    assert different(exported, before) == []
    assert different(weights(found["loaded"]), before) == []
    assert different(found["resumed-3"], found["spread-3"]) == []


def test_tied_embeddings_on_two_pipeline_stages_stay_one_tensor(single: Single, two: Single) -> None:
    found, folder = two
    assert largest(found["tied-scores"], single[0]["scores-moe-tied"]) < 1e-5
    gradients, stepped = part(found["tied-gradients"], "grad"), weights(found["tied-step"])
    copy = gradients.pop("grad/lm_head.weight")  # the last stage's
    assert torch.equal(copy, gradients["grad/model.embed_tokens.weight"])
    assert torch.equal(stepped.pop("lm_head.weight"), stepped["model.embed_tokens.weight"])
    assert relative(gradients, part(single[0]["gradients-moe-tied"], "grad")) < 1e-5
    exported = load_file(folder / "tied" / "model-00001-of-00002.safetensors")
    exported |= load_file(folder / "tied" / "model-00002-of-00002.safetensors")
    assert different(exported, stepped) == []


def test_biases_of_query_key_and_value_are_cut_with_their_heads(single: Single, two: Single, reference: Path) -> None:
    found, folder = two
    assert largest(found["biased-scores"], single[0]["scores-qwen2"]) < 1e-5
    assert relative(part(found["biased-gradients"], "grad"), part(single[0]["gradients-qwen2"], "grad")) < 1e-5
    written = load_file(folder / "biased" / "model.safetensors")
    assert different(written, load_file(reference / "qwen2" / "model.safetensors")) == []


def test_a_checkpoint_is_resumed_by_its_weights_in_another_layout(two: Single) -> None:
    found = two[0]
    assert int(found["other-loaded"]["step"]) == 9
    assert different(weights(found["other-loaded"]), weights(found["EP2-spread-1"])) == []
    assert bool(found["other-step"]["applied"])  # with a fresh optimizer
    assert different(weights(found["other-step"]), weights(found["EP2-spread-1"])) != []


@pytest.mark.soak
@pytest.mark.parametrize("layout", TWO)
def test_bfloat16_with_the_distributed_optimizer_follows_float32_and_resumes_bit_for_bit(
    single: Single, half: Results, layout: str
) -> None:
    want, found = single[0], {k.removeprefix(f"{layout}-"): v for k, v in half.items()}
    assert torch.allclose(found["step-1"]["norm"], want["step-1"]["norm"], rtol=0.05)  # each rank holds a part alone
    # One step of Adam moves a weight by about 0.01; bfloat16 rounds a weight of 0.15 by up to 0.0005.
    assert distance(weights(found["step-1"]), weights(want["step-1"])) < 0.06
    assert all(value.dtype == torch.bfloat16 for value in weights(found["step-1"]).values())
    assert different(weights(found["loaded"]), weights(found["step-1"])) == []
    assert different(found["resumed-2"], found["step-2"]) == []
