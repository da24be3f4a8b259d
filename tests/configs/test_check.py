"""What `lagrange check` says: figures, warnings, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from broker.types import Group, Trajectory, VersionRun
from broker.wire import encode
from configs import RunConfig, load_config
from configs.check import QWEN3_0_6B, QWEN3_30B_A3B, errors, meaning, sizes_of, warnings
from configs.memory import estimate, parameters, route_bytes_per_token
from configs.model_sizes import model_sizes
from configs.schema import TinyModel
from services.local.tiny_model import model_config

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 1024**3


def local(**overrides: object) -> RunConfig:
    return load_config(CONFIGS / "local.yaml", dict(overrides))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_file_that_we_ship_is_valid(file: Path) -> None:
    config = load_config(file)
    assert errors(config) == []
    assert meaning(config)
    assert not [said for said in warnings(config) if "max_total_tokens" in said]


def test_the_papers_setting_is_what_its_files_say() -> None:
    for name, lag in (("qwen3-30b-a3b", 1), ("qwen3-30b-a3b-lag8", 8)):
        config = load_config(CONFIGS / f"{name}.yaml")
        assert (config.trainer.groups_per_step, config.rollout.samples_per_prompt) == (256, 16)
        assert (config.rollout.temperature, config.run.steps) == (0.95, 544)
        # 32k, of which the published checkpoint's context leaves what the prompt does not take.
        assert sizes_of(config) == replace(QWEN3_30B_A3B, context=32768)
        assert config.rollout.max_new_tokens == 32768 - 1024
        assert (config.lag.max, config.weights.publish_interval) == (lag, lag)
        assert (config.trainer.loss.name, config.trainer.routing_replay) == ("sat-gspo", "required")
        devices = config.trainer.layout.ranks + config.engine.replicas * config.engine.tensor_parallel
        assert devices == 16


def test_the_models_that_are_known_by_name_have_the_published_numbers_of_parameters() -> None:
    assert parameters(QWEN3_30B_A3B) == 30_532_122_624
    assert parameters(QWEN3_0_6B) == 596_049_920


def test_a_run_on_one_gpu_leaves_room_for_activations_beside_trainer_and_engine() -> None:
    config = load_config(CONFIGS / "qwen3-0.6b-one-gpu.yaml")
    e = estimate(config, QWEN3_0_6B)
    cache = (config.engine.max_total_tokens or 0) * 28 * 2 * 8 * 128 * 2  # layers, key and value, heads, width, bytes
    assert sizes_of(config) == QWEN3_0_6B
    assert e.trainer_rank + e.engine_device + cache < 16 * GIB  # of the 22.5 that the smallest such GPU shows
    assert not [w for w in warnings(config) if "not on this machine" not in w]


def test_a_dense_model_with_required_routes_is_an_error_before_the_trainer_finds_it() -> None:
    config = load_config(CONFIGS / "qwen3-0.6b-one-gpu.yaml", {"trainer.routing_replay": "required"})
    assert "models/Qwen3-0.6B is a dense model" in errors(config)[0]


def test_memory_that_the_longest_responses_would_exceed_says_what_comes_of_it() -> None:
    files = {name: load_config(CONFIGS / f"{name}.yaml") for name in ("local", "qwen3-30b-a3b-lag8")}
    said = {name: dict(meaning(config))["queue memory"] for name, config in files.items()}
    assert said["local"].endswith("614.4 MiB are allowed.")
    for words in ("less than 72% of rollout.max_new_tokens", "workers wait", "Raise redis.max_memory_mb"):
        assert words in said["qwen3-30b-a3b-lag8"]


def test_the_tiny_models_parameters_are_counted_exactly_from_either_source() -> None:
    sizes = sizes_of(local())
    assert sizes is not None
    assert parameters(sizes) == 251_328
    assert model_sizes(model_config(TinyModel())) == sizes


def test_memory_of_the_papers_setting_fits_its_devices_and_scales_with_the_bound() -> None:
    one, eight = (load_config(CONFIGS / f"qwen3-30b-a3b{name}.yaml") for name in ("", "-lag8"))
    first, second = estimate(one, QWEN3_30B_A3B), estimate(eight, QWEN3_30B_A3B)
    assert first.weights == 2 * parameters(QWEN3_30B_A3B)
    assert 60 * GIB < first.trainer_rank < 75 * GIB
    assert first.route_bytes_step == 256 * 16 * 31744 * 48 * 8
    assert second.queue_bytes * 2 == first.queue_bytes * 9


def test_queue_memory_counts_prompts_routes_and_what_is_kept_until_the_checkpoint() -> None:
    config = local(**{"rollout.max_new_tokens": 500, "trainer.checkpoint.interval_steps": 3, "lag.max": 1})
    prompt = local(**{**{"rollout.max_new_tokens": 500, "lag.max": 1}, "trainer.retention": "prompt"})
    sizes = sizes_of(config)
    assert sizes is not None
    assert route_bytes_per_token(sizes) == 4
    found, freed = estimate(config, sizes), estimate(prompt, sizes)
    samples = 16 * 16
    stored = len(encode(group_of(samples, prompt=11, response=500, routes=(2, 2)))) * 5
    predicted = found.queue_bytes + found.kept_bytes + 11 * found.bytes_per_prompt_token
    assert predicted == pytest.approx(stored, rel=0.1)  # the header, and padding to 16 bytes
    assert (freed.queue_bytes, freed.kept_bytes) == (found.queue_bytes, 0)
    said = dict(meaning(config))
    assert "trained groups that are kept until their checkpoint" in said["queue memory"]
    assert "kept" not in dict(meaning(prompt))["queue memory"]


def group_of(samples: int, prompt: int, response: int, routes: tuple[int, int]) -> Group:
    one = Trajectory(
        prompt_ids=np.zeros(prompt, np.int32),
        response_ids=np.zeros(response, np.int32),
        log_probs=np.zeros(response, np.float32),
        loss_mask=np.ones(response, np.bool_),
        versions=(VersionRun(0, response, 0),),
        reward=0.0,
        finish="stop",
        routes=np.zeros((prompt + response - 1, *routes), np.uint8),
    )
    return Group("r", 0, 0, 0, "task", "engine", "worker", samples, 0.0, (one,) * samples)


def test_the_distributed_optimizer_lowers_a_ranks_memory_by_the_copies_that_it_spreads() -> None:
    config = local(**{"trainer.layout": {"data": 2}})
    spread = local(**{"trainer.layout": {"data": 2}, "trainer.distributed_optimizer": True})
    sizes = sizes_of(config)
    assert sizes is not None
    assert estimate(config, sizes).trainer_rank == parameters(sizes) * 16
    assert estimate(spread, sizes).trainer_rank == parameters(sizes) * 12


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"lag.max": 0}, "lag.max is 0"),
        ({"lag.max": 5, "weights.publish_interval": 4}, "only 2 versions"),
        ({"rollout.concurrent_groups": 40}, "80 groups could be generated at once"),
        ({"trainer.routing_replay": "off"}, "different experts"),
        ({"model.tiny": None, "model.path": "nowhere/m"}, "not on this machine"),
        (
            {"rollout.max_new_tokens": 300, "redis.max_memory_mb": 2, "trainer.groups_per_step": 64},
            "Raise redis.max_memory_mb",
        ),
    ],
)
def test_a_setting_that_wastes_work_or_does_nothing_is_warned_of(overrides: dict[str, object], words: str) -> None:
    assert any(words in warning for warning in warnings(local(**overrides)))


def test_a_cache_far_too_small_for_what_workers_ask_at_once_is_warned_of_with_figures_and_fields() -> None:
    asked = {"rollout.max_new_tokens": 4096, "rollout.concurrent_groups": 32, "rollout.samples_per_prompt": 8,
             "trainer.groups_per_step": 32, "engine.max_total_tokens": 20000}  # fmt: skip
    one_gpu = CONFIGS / "qwen3-0.6b-one-gpu.yaml"
    (said,) = [w for w in warnings(load_config(one_gpu, asked)) if w.startswith("engine.max_total_tokens = 20,000")]
    for words in ("4 responses", "4,096 at once", "workers ask it for 512 (2.1 GiB; all of them would take 224.0 GiB)",
                  "Set engine.max_total_tokens to 524,288 or more, or to null",
                  "engine.memory_fraction (0.8", "rollout.concurrent_groups"):  # fmt: skip
        assert words in said
    for enough in ({"engine.max_total_tokens": 524288}, {"engine.max_total_tokens": None}, {"engine.replicas": 27},
                   {"rollout.concurrent_groups": 1}, {"engine.urls": ["http://e:30000"]}):  # fmt: skip
        assert not any("max_total_tokens =" in w for w in warnings(load_config(one_gpu, {**asked, **enough}))), enough


def test_a_folder_that_is_here_and_holds_no_checkpoint_is_an_error_and_no_absence(tmp_path: Path) -> None:
    config = local(**{"model.tiny": None, "model.path": str(tmp_path)})
    assert "is here and holds no checkpoint" in errors(config)[0]
    assert not any("not on this machine" in said for said in warnings(config))


def test_a_bound_that_fits_is_not_warned_of() -> None:
    assert warnings(local()) == []
    assert warnings(local(**{"lag.max": 7, "weights.publish_interval": 4})) == []


def test_a_task_that_this_machine_does_not_know_is_valid_and_a_malformed_name_is_not() -> None:
    assert errors(local(**{"task.name": "math-jsonl"})) == []
    assert "Max Digit" in errors(local(**{"task.name": "Max Digit"}))[0]


def test_a_layout_that_does_not_divide_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(TinyModel())))
    layout = {"data": 3, "expert": 3}
    config = local(**{"model.tiny": None, "model.path": str(tmp_path), "trainer.layout": layout})
    assert errors(config) == [
        "trainer.layout.expert = 3 does not divide the model's experts = 8. Change trainer.layout.expert."
    ]


def test_a_response_limit_that_leaves_no_room_for_a_prompt_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(TinyModel())))
    path = {"model.tiny": None, "model.path": str(tmp_path)}
    assert errors(local(**path, **{"rollout.max_new_tokens": 511})) == []
    assert "context of 512 tokens" in errors(local(**path, **{"rollout.max_new_tokens": 512}))[0]


def test_the_papers_files_are_not_refused_with_the_checkpoint_as_it_is_published(tmp_path: Path) -> None:
    published = model_config(TinyModel()) | {"max_position_embeddings": 32768, "num_experts": 128}
    (tmp_path / "config.json").write_text(json.dumps(published))
    for name in ("qwen3-30b-a3b", "qwen3-30b-a3b-lag8"):
        config = load_config(CONFIGS / f"{name}.yaml", {"model.path": str(tmp_path), "trainer.layout.tensor": 1,
                                                        "trainer.layout.data": 8})  # fmt: skip
        assert errors(config) == []
        assert "context of 32768" in errors(load_config(CONFIGS / f"{name}.yaml", {"rollout.max_new_tokens": 32768}))[0]
    after = {"model.path": "models/Qwen3-30B-A3B", "rollout.max_new_tokens": 32768}  # the post-trained one has 40960
    assert errors(load_config(CONFIGS / "qwen3-30b-a3b.yaml", after)) == []


def test_one_of_a_thing_is_said_in_the_singular() -> None:
    said = dict(meaning(local(**{"run.steps": 1, "trainer.checkpoint.interval_steps": 1})))
    assert "at most 1 token; 1 step." in said["step"]
    assert "at most 1 step back" in said["restart"]


def test_the_bound_is_said_in_plain_words() -> None:
    said = dict(meaning(local(**{"lag.max": 4})))
    assert said["lag bound"].startswith("4: no token is trained more than 4 versions after")
    assert said["in flight"].startswith("at most 80 groups")
    assert "synchronous" in dict(meaning(local(**{"lag.max": 0})))["lag bound"]
