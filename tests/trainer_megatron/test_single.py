"""The model in one process: against transformers, packed against unpacked, replay, weights, checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_megatron import data
from tests.trainer_megatron.compare import different, largest, part, relative
from trainer.megatron.checkpoint import latest, read_state
from trainer.megatron.safetensors_file import verify_manifest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]
Single = tuple[dict[str, dict[str, torch.Tensor]], Path]


@pytest.mark.parametrize("family", ["moe", "moe-tied", "qwen2", "qwen3", "llama"])
def test_log_probs_and_entropies_equal_those_of_transformers(single: Single, reference: Path, family: str) -> None:
    got, want = single[0][f"scores-{family}"], load_file(reference / f"{family}.safetensors")
    assert largest(part(got, "log_probs"), part(want, "log_probs")) < 1e-5
    assert largest(part(got, "entropy"), part(want, "entropy")) < 1e-5


@pytest.mark.parametrize("family", ["moe", "moe-tied", "qwen2", "qwen3", "llama"])
def test_gradients_are_the_sum_of_the_micro_batches_losses(single: Single, reference: Path, family: str) -> None:
    got, want = single[0][f"gradients-{family}"], load_file(reference / f"{family}.safetensors")
    assert relative(part(got, "grad"), part(want, "grad")) < 1e-5


@pytest.mark.parametrize("family", ["moe", "moe-tied", "qwen2", "qwen3", "llama"])
def test_an_exported_folder_holds_the_bytes_that_were_loaded(single: Single, reference: Path, family: str) -> None:
    folder = single[1] / family
    assert not different(load_file(folder / "model.safetensors"), load_file(reference / family / "model.safetensors"))
    assert verify_manifest(folder) == []
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "config.json" in manifest["files"]


def test_a_flipped_bit_in_an_exported_folder_is_seen(single: Single, tmp_path: Path) -> None:
    folder = shutil.copytree(single[1] / "moe", tmp_path / "broken")
    _flip(folder / "model.safetensors")
    assert any("model.safetensors" in problem for problem in verify_manifest(folder))


def test_packed_sequences_give_what_each_gives_alone(single: Single) -> None:
    results = single[0]
    assert largest(results["scores-moe"], results["scores-unpacked"]) < 1e-5
    packed, alone = results["gradients-moe"], results["gradients-unpacked"]
    assert relative(part(packed, "grad"), part(alone, "grad")) < 1e-5


def test_replay_changes_the_gradient_and_recomputation_does_not(single: Single) -> None:
    results = single[0]
    routed, recomputed, plain = (part(results[k], "grad") for k in ("routed", "routed-recompute", "gradients-moe"))
    assert different(recomputed, routed) == []
    assert relative(plain, routed) > 0.1
    assert all(float(value.abs().max()) > 0 for name, value in routed.items() if name.endswith("mlp.gate.weight"))


def test_replaying_the_live_routers_own_choice_changes_nothing(single: Single) -> None:
    results = single[0]
    assert float(results["replay-own"]["overlap"]) == 1.0
    assert relative(part(results["replay-own"], "grad"), part(results["gradients-moe"], "grad")) < 1e-5


def test_replay_counts_its_rows_and_its_overlap(single: Single) -> None:
    replayed, own, _, overlap = single[0]["routed"]["replay"].tolist()
    assert (replayed, own) == (data.LAYERS * sum(n - 1 for n in data.LENGTHS), 0)
    assert 0.0 < overlap < 0.6  # chance: top_k of experts


def test_a_trace_with_a_wrong_or_repeated_expert_is_refused(single: Single) -> None:
    assert set(single[0]["refused"]) == {"range", "twice"}


def test_the_output_layer_never_makes_the_logits_of_all_rows(single: Single) -> None:
    assert int(single[0]["whole-logits"]["calls"]) == 0  # test_pure: what takes its place works chunk by chunk


def test_one_micro_batch_of_a_step_is_on_the_device_at_a_time(single: Single) -> None:
    assert int(single[0]["frugal"]["most"]) == 1


def test_the_optimizer_takes_no_temporary_for_all_parameters_at_once(single: Single) -> None:
    assert int(single[0]["frugal"]["at_once"]) == 0


def test_a_checkpoint_adds_no_step_to_an_optimizer_that_counts_them_by_group(single: Single) -> None:
    assert int(single[0]["fused-state"]["entries"]) == 0


def test_a_nan_gradient_is_not_applied_and_leaves_no_mark(single: Single) -> None:
    results = single[0]
    assert not bool(results["poisoned"]["applied"])
    assert different(part(results["routed-again"], "grad"), part(results["routed"], "grad")) == []
    assert bool(results["step-1"]["applied"])


@pytest.mark.parametrize("step", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit(
    single: Single, ranks: Any, reference: Path, tmp_path: Path, step: int
) -> None:
    results, folder = single
    root = shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    if step == 1:
        _flip(next((root / "step-00000002").glob("*.distcp")))
    newest = latest(root)
    assert newest is not None
    assert read_state(newest).consumed == (1, 2, step)
    if step == 2:
        return  # the torn one is the interesting case to start a process for
    resumed = ranks(
        (
            {},
            [
                ["model", "", {"folder": str(reference / "moe")}],
                ["load", "loaded", {"root": str(root)}],
                ["noise", "noise", {}],
                ["gradients", "gradients-2", {"with_routes": True}],
                ["step", "step-2", {}],
            ],
        )
    )
    assert int(resumed["loaded"]["step"]) == 1
    assert different(part(resumed["loaded"], "model."), part(results["step-1"], "model.")) == []
    assert different(resumed["noise"], results["noise"]) == []
    assert different(resumed["step-2"], results["step-2"]) == []


def test_a_checkpoint_that_is_written_after_the_next_step_holds_what_was_true_when_it_was_staged(
    single: Single,
) -> None:
    results = single[0]
    assert different(part(results["loaded-late"], "model."), part(results["step-2"], "model.")) == []
    assert different(results["step-4-again"], results["step-4"]) == []


def test_a_torn_checkpoint_is_passed_over(single: Single, tmp_path: Path) -> None:
    root = shutil.copytree(single[1] / "checkpoints", tmp_path / "checkpoints")
    tensors = next((root / "step-00000002").glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-100])
    (root / ".step-00000003.partial").mkdir()
    found = latest(root)
    assert found is not None
    assert found.name == "step-00000001"
    (root / "step-00000001" / "manifest.json").unlink()
    assert latest(root) is None


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
