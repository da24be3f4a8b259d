"""`lagrange queue`, `groups` and `replay` on a real Redis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from msgspec import structs
from typer.testing import CliRunner

from broker import wire
from broker.queue import Broker
from configs import ConfigError, RunConfig
from services.commands import app
from services.queue_cli.dump import read_dump, write_dump
from tests.broker.helpers import WORKER, Run
from tests.conftest import ConfigFactory


@pytest.fixture
def config(redis_url: str, make_config: ConfigFactory) -> RunConfig:
    return make_config(**{"redis.url": redis_url, "lag.max": 3})


@pytest.fixture
def file(tmp_path: Path, config: RunConfig) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def said(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, ConfigError):
        return str(result.exception)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_groups_are_listed_shown_dumped_and_requeued(
    broker: Broker, config: RunConfig, file: Path, tmp_path: Path
) -> None:
    broker.initialise(config)
    broker.set_max_lag(3)
    run = Run(broker).start()
    trained = run.train()[0].group_id
    waiting = run.ready(1)[0].group_id
    poison = run.admit()
    broker.fail(poison.group_id, WORKER, "poison [red] \x1b[2J", final=True)
    assert "ledger closes; dead letters 1" in said("queue", file)
    assert said("groups", "list", file, "--state", "leased") == "no group is leased\n"
    (listed,) = (line for line in said("groups", "list", file).splitlines() if str(waiting) in line)
    assert {"ready", WORKER} <= set(listed.split())  # nothing is cut where it is read by a program
    dead = said("groups", "list", file, "--state", "dead")
    assert "poison [red]" in dead
    assert "\x1b" not in dead  # it would clear the terminal
    assert "expected one of" in said("groups", "list", file, "--state", "nonsense")
    assert "uint8" in said("groups", "show", file, waiting)
    assert "is a dead letter after attempt 0: poison" in said("groups", "show", file, poison.group_id)
    assert "`next` in place of its id" in said("groups", "show", file, 17)
    assert "'seventeen' is no group" in said("groups", "show", file, "seventeen")
    assert f"{len(broker.fetch_bytes([waiting])[0])} bytes" in said("groups", "dump", file, waiting, tmp_path / "dump")
    dump, group, back = read_dump(tmp_path / "dump")
    assert (dump.version, group.group_id, back) == (1, waiting, config)
    said("groups", "dump", file, trained, tmp_path / "dump")
    assert read_dump(tmp_path / "dump")[0].version == 0  # of its step, not of now: the lag is what it was
    assert "is issued again" in said("groups", "requeue", file, poison.prompt_index)
    assert "is no dead letter" in said("groups", "requeue", file, poison.prompt_index)
    assert broker.snapshot().dead_letters == 0


def test_next_is_a_group_that_can_be_read_in_whatever_state_it_is(
    broker: Broker, config: RunConfig, file: Path, tmp_path: Path
) -> None:
    broker.initialise(config)
    broker.set_max_lag(3)
    run = Run(broker).start()
    assert "no group can be read now" in said("groups", "dump", file, "next", tmp_path / "dump")
    run.admit()  # being generated: nothing to read yet
    trained = {delivery.group_id for delivery in run.train()}
    said("groups", "dump", file, "next", tmp_path / "dump")
    assert read_dump(tmp_path / "dump")[1].group_id in trained
    waiting = run.ready(1)[0].group_id
    assert f"group {waiting}," in said("groups", "dump", file, "next", tmp_path / "dump")
    assert read_dump(tmp_path / "dump")[1].group_id == waiting
    assert "uint8" in said("groups", "show", file, "next")


def test_a_file_that_is_no_dump_says_so(tmp_path: Path) -> None:
    (tmp_path / "nonsense").write_bytes(b"\x80\x04pickle")
    assert "is no dump of a group" in said("replay", tmp_path / "nonsense")
    assert "cannot be read" in said("replay", tmp_path / "missing")


def test_a_model_to_replay_with_that_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    assert "no config.json there" in said("replay", tmp_path / "dump", "--model", tmp_path / "none")


def test_replay_shows_the_first_difference(config: RunConfig, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from broker.types import Ticket
    from rollout.tasks import Response
    from rollout.tasks.registry import make_task
    from tests.broker.helpers import finished

    task = make_task("max-digit", config.run.seed, {})
    group = finished(Ticket(5, 0, 0, 1, 0), config.run.id)
    ids = tuple(int(i) for i in group.trajectories[0].response_ids)
    reward = float(task.reward(task.prompt(0), Response("", ids, "stop")))
    right = tuple(structs.replace(t, reward=reward) for t in group.trajectories)
    true = replace(group, task="max-digit", trajectories=right)
    write_dump(tmp_path / "true", config, 2, 5, wire.encode(true))
    same = said("replay", tmp_path / "true")
    assert "no difference" in same
    assert "loss 0 (" in same  # and never -0
    wrong = replace(true, trajectories=(true.trajectories[0], structs.replace(true.trajectories[1], reward=reward + 1)))
    write_dump(tmp_path / "wrong", config, 2, 5, wire.encode(wrong))
    output = " ".join(said("replay", tmp_path / "wrong", code=1).split())
    assert f"sample 1: the reward was recorded as {reward + 1:g} and is now {reward:g}" in output
    assert "loss" in output
