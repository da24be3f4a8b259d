"""`lagrange init` on a real Redis."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from broker.queue import Broker
from broker.types import EngineRecord, EngineState
from configs import ConfigError
from services.deployment import initialise
from tests.deploy.tools import deploy_config


@pytest.fixture
def file(tmp_path: Path, redis_url: str) -> Path:
    tree = deploy_config("tiny")
    tree["run"]["directory"] = str(tmp_path / "runs")
    tree["redis"]["url"] = redis_url
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def test_it_makes_the_model_and_the_runs_records(file: Path, redis_url: str) -> None:
    config = initialise(file)
    assert config.model.path is not None
    assert (config.model.path / "model.safetensors").is_file()
    broker = Broker.connect(redis_url, "tiny", timeout_s=5)
    snapshot = broker.snapshot()
    broker.close()
    assert (snapshot.max_lag, snapshot.groups_per_step, snapshot.steps_total) == (1, 16, 150)


def test_a_second_time_changes_nothing_also_while_the_run_trains(file: Path, redis_url: str) -> None:
    config = initialise(file)
    assert config.model.path is not None
    weights = (config.model.path / "model.safetensors").stat().st_mtime_ns
    broker = Broker.connect(redis_url, "tiny", timeout_s=5)
    broker.attach_trainer(checkpoint_step=0, checkpoint_version=0, consumed=(), cursor=None)
    broker.register_engine(EngineRecord("engine-0", "http://e:1", EngineState.JOINING))
    before = broker.snapshot()
    initialise(file)
    after = broker.snapshot()
    broker.close()
    assert (config.model.path / "model.safetensors").stat().st_mtime_ns == weights
    assert (after.status, after.epoch, after.step, after.version) == (
        before.status,
        before.epoch,
        before.step,
        before.version,
    )
    assert len(after.engines) == 1


def test_a_field_that_up_would_choose_is_named(file: Path) -> None:
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    tree["monitor"]["port"] = 0
    tree["run"]["directory"] = "runs"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        initialise(file)
    assert "monitor.port is 0" in str(error.value)
    assert "run.directory" in str(error.value)


def test_a_folder_that_cannot_be_written_is_one_clear_message(file: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.directory"):
        initialise(file)
