"""The configurations of deploy/configs say what those of configs/ say, and where things are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from configs import ConfigError, load_config
from configs.check import errors
from services.deployment import deployment_problems, process_config
from tests.deploy.tools import CONFIGS, DEPLOY, ROOT

PLACES = {
    "run.id",
    "run.name",
    "run.directory",
    "redis.url",
    "model.path",
    "task.parameters.path",
    "engine.host",
    "engine.port",
    "engine.python",
    "trainer.port",
    "weight_sync.host",
    "weight_sync.port",
    "monitor.host",
    "monitor.port",
}
SAME = {
    "tiny": ("local.yaml", {"engine.metrics"}),
    "tiny-ray": ("local.yaml", {"engine.metrics", "trainer.launcher"}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b.yaml", set()),
    "qwen3-30b-a3b-4-nodes": ("qwen3-30b-a3b-lag8.yaml", {"trainer.layout.data", "engine.replicas"}),
}


def flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    """{"lag": {"max": 1}} as {"lag.max": 1}."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{before}{key}"
        out |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return out


def test_each_has_a_counterpart_in_configs() -> None:
    assert set(CONFIGS) == set(SAME)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_valid_and_leaves_nothing_open_that_nobody_would_choose(name: str) -> None:
    config = load_config(DEPLOY / "configs" / name / "config.yaml")
    assert errors(config) == []
    assert deployment_problems(config) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_it_differs_from_its_counterpart_in_addresses_alone(name: str) -> None:
    counterpart, more = SAME[name]
    ours = flat(load_config(DEPLOY / "configs" / name / "config.yaml").model_dump(mode="json"))
    theirs = flat(load_config(ROOT / "configs" / counterpart).model_dump(mode="json"))
    different = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert different - PLACES == more


def test_the_tiny_model_is_where_init_makes_it() -> None:
    config = process_config(DEPLOY / "configs/tiny/config.yaml")
    assert config.model.path == Path("/var/lib/lagrange/runs/tiny/model")
    assert config.model.tiny is None


def test_a_tiny_model_without_a_run_id_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    text = (ROOT / "configs/local.yaml").read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.id"):
        process_config(file)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_what_make_py_makes_of_its_counterpart(name: str) -> None:
    made = runpy.run_path(str(DEPLOY / "configs/make.py"))["made"]
    text = (DEPLOY / "configs" / name / "config.yaml").read_text(encoding="utf-8")
    assert text == made(name), "run: python deploy/configs/make.py"
