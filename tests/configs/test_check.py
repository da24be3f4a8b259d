"""What `lagrange check` says: figures, warnings, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs import RunConfig, load_config
from configs.check import QWEN3_30B_A3B, errors, estimate, meaning, shape_from, shape_of, warnings
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


def test_the_papers_setting_is_what_its_files_say() -> None:
    for name, lag in (("qwen3-30b-a3b", 1), ("qwen3-30b-a3b-lag8", 8)):
        config = load_config(CONFIGS / f"{name}.yaml")
        assert (config.trainer.groups_per_step, config.rollout.samples_per_prompt) == (256, 16)
        assert (config.rollout.temperature, config.rollout.max_new_tokens, config.run.steps) == (0.95, 32768, 544)
        assert (config.lag.max, config.weights.publish_interval) == (lag, lag)
        assert (config.trainer.loss.name, config.trainer.routing_replay) == ("sat-gspo", "required")
        devices = config.trainer.layout.ranks + config.engine.replicas * config.engine.tensor_parallel
        assert devices == 16


def test_qwen3_30b_a3b_has_the_published_number_of_parameters() -> None:
    assert QWEN3_30B_A3B.parameters == 30_532_122_624


def test_the_tiny_models_parameters_are_counted_exactly_from_either_source() -> None:
    shape = shape_of(local())
    assert shape is not None
    assert shape.parameters == 251_328
    assert shape_from(model_config(TinyModel())) == shape


def test_memory_of_the_papers_setting_fits_its_devices_and_scales_with_the_bound() -> None:
    one, eight = (load_config(CONFIGS / f"qwen3-30b-a3b{name}.yaml") for name in ("", "-lag8"))
    first, second = estimate(one, QWEN3_30B_A3B), estimate(eight, QWEN3_30B_A3B)
    assert first.weights == 2 * QWEN3_30B_A3B.parameters
    assert 60 * GIB < first.trainer_rank < 75 * GIB
    assert first.route_bytes_step == 256 * 16 * 32768 * 48 * 8
    assert second.queue_bytes * 2 == first.queue_bytes * 9


def test_the_distributed_optimizer_lowers_a_ranks_memory_by_the_copies_that_it_spreads() -> None:
    config = local(**{"trainer.layout": {"data": 2}})
    spread = local(**{"trainer.layout": {"data": 2}, "trainer.distributed_optimizer": True})
    shape = shape_of(config)
    assert shape is not None
    assert estimate(config, shape).trainer_rank == shape.parameters * 16
    assert estimate(spread, shape).trainer_rank == shape.parameters * 12


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"lag.max": 0}, "lag.max is 0"),
        ({"lag.max": 5, "weights.publish_interval": 4}, "only 2 versions"),
        ({"rollout.concurrent_groups": 40}, "80 groups could be generated at once"),
        ({"trainer.loss.sat": {"floor": 0.1}}, "switches most of SAT off"),
        ({"trainer.loss": {"name": "sat-gspo", "clip_low": 3e-4, "clip_high": 4e-4}}, "never changes a gradient"),
        ({"trainer.routing_replay": "off"}, "different experts"),
        ({"model.tiny": None, "model.path": "nowhere/m"}, "not on this machine"),
        ({"task.parameters": {"path": "nowhere/x.jsonl"}}, "task.parameters.path"),
    ],
)
def test_a_setting_that_wastes_work_or_does_nothing_is_warned_of(overrides: dict[str, object], words: str) -> None:
    assert any(words in warning for warning in warnings(local(**overrides)))


def test_a_bound_that_fits_is_not_warned_of() -> None:
    assert warnings(local()) == []
    assert warnings(local(**{"lag.max": 7, "weights.publish_interval": 4})) == []


def test_a_task_that_this_machine_does_not_know_is_valid_and_a_malformed_name_is_not() -> None:
    assert errors(local(**{"task.name": "math-jsonl"})) == []
    assert "Max Digit" in errors(local(**{"task.name": "Max Digit"}))[0]


def test_a_layout_that_does_not_divide_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(TinyModel())))
    layout = {"data": 3, "expert": 3}
    config = local(**{"model.tiny": None, "model.path": str(tmp_path), "trainer.layout": layout,
                      "trainer.groups_per_step": 18})  # fmt: skip
    assert errors(config) == [
        "trainer.layout.expert = 3 does not divide the model's experts = 8. Change trainer.layout.expert."
    ]


def test_the_bound_is_said_in_plain_words() -> None:
    said = dict(meaning(local(**{"lag.max": 4})))
    assert said["lag bound"].startswith("4: no token is trained more than 4 versions after")
    assert said["in flight"].startswith("at most 80 groups")
    assert "synchronous" in dict(meaning(local(**{"lag.max": 0})))["lag bound"]
