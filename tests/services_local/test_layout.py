"""From a configuration to folder, ports and processes."""

from __future__ import annotations

import io
import json
import socket
import time
from pathlib import Path

import pytest
from rich.console import Console

from configs import ConfigError, RunConfig, load_config, save_config
from configs.ports import KERNELS_RANGE
from services.local.layout import CannotStart, embeds_redis, new_run_id, resolve, roles
from services.local.plan import nothing_left, only_one, plan_new, plan_resumed, prepare
from services.local.preflight import NEEDED_BYTES, problems
from services.local.up import run

LOCAL = Path(__file__).parents[2] / "configs" / "local.yaml"


def local(**overrides: object) -> RunConfig:
    return load_config(LOCAL, dict(overrides))


def test_a_resolved_configuration_has_real_ports_absolute_paths_and_a_model_folder(tmp_path: Path) -> None:
    config = resolve(local(), "r", tmp_path)
    ports = [config.redis.port, config.monitor.port, config.weight_sync.port, config.trainer.port]
    assert all(ports)
    assert len(set(ports)) == len(ports)
    low, high = map(int, KERNELS_RANGE.read_text().split())
    assert not [port for port in ports if low <= port <= high]  # whoever asks for any port could have it before us
    assert config.engine.port == 0  # each engine chooses when it starts
    assert config.model.path == tmp_path / "r" / "model"
    assert config.engine.python.is_absolute()
    assert config.redis.url == f"redis://127.0.0.1:{config.redis.port}/0"


def test_certificates_are_found_also_by_a_run_that_goes_on_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    served = {"monitor": {"cert_file": "tls/chain.pem", "key_file": "tls/key.pem"}}
    config = resolve(local(**served, **{"redis": {"url": "rediss://r:6379/0", "ca_file": "tls/ca.pem"}}), "r", tmp_path)
    assert config.redis.ca_file == tmp_path / "tls" / "ca.pem"
    assert (config.monitor.cert_file, config.monitor.key_file) == (
        tmp_path / "tls" / "chain.pem",
        tmp_path / "tls" / "key.pem",
    )


def test_an_interpreter_that_is_a_symbolic_link_is_kept_since_its_place_names_the_environment(tmp_path: Path) -> None:
    link = tmp_path / "venv" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to("/usr/bin/env")
    assert resolve(local(**{"engine.python": str(link)}), "r", tmp_path).engine.python == link


def test_a_resolved_configuration_survives_its_file_and_still_embeds_redis(tmp_path: Path) -> None:
    config = resolve(local(), "r", tmp_path)
    save_config(config, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert again == config
    assert embeds_redis(again)
    assert not embeds_redis(local(**{"redis.url": "redis://elsewhere:6379/0"}))


def test_ports_that_are_asked_for_are_in_a_row_and_all_of_them_free(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1] - 1
        config = local(**{"engine.replicas": 3, "engine.port": first})
        names = [role.name for role in roles(config, tmp_path / "config.yaml")]
        assert names == [
            "engine-0", "engine-1", "engine-2", "weight-sync", "monitor", "trainer", "worker-0", "worker-1",
        ]  # fmt: skip
        row = f"{first}|{first + 1}|{first + 2}"  # a neighbour may be somebody else's
        with pytest.raises(CannotStart, match=rf"engine\.port: port ({row}) on 127\.0\.0\.1 is in use"):
            resolve(config, "r", tmp_path)
        assert resolve(config, "r", tmp_path, move_taken_ports=True).engine.port == 0


def test_engines_that_run_elsewhere_are_not_started(tmp_path: Path) -> None:
    config = resolve(local(**{"engine.urls": ["http://gpu:30000"]}), "r", tmp_path)
    assert not [role for role in roles(config, tmp_path / "c") if role.name.startswith("engine")]


def test_a_run_id_that_is_taken_gets_a_number() -> None:
    at = time.struct_time((2026, 11, 29, 20, 35, 15, 0, 0, 0))
    assert new_run_id("local", at, {"local-20261129-203515"}) == "local-20261129-203515-2"


def test_no_space_a_missing_checkpoint_and_a_missing_engine_are_each_named(tmp_path: Path) -> None:
    found = problems(
        local(**{"model.tiny": None, "model.path": str(tmp_path / "m"), "engine.python": str(tmp_path / "python")}),
        free=NEEDED_BYTES - 1,
    )
    assert [message.split(":")[0] for message in found] == ["no space", "model.path", "engine.python"]
    assert "make setup" in found[2]


def test_a_run_whose_folder_was_moved_resumes_where_it_now_is(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    settings = {"run.directory": str(tmp_path / "runs"), "run.id": "r", "engine.python": str(python)}
    prepare(plan_new(LOCAL, settings))
    (tmp_path / "runs").rename(tmp_path / "moved")
    plan = plan_resumed(tmp_path / "moved" / "r", {"lag.max": 4})
    assert plan.folder == tmp_path / "moved" / "r"
    assert plan.config.model.path == plan.folder / "model"
    assert plan.config.lag.max == 4
    assert plan.new_bound
    assert not plan_resumed(tmp_path / "moved" / "r", {}).new_bound  # what an operator set in between stays
    assert plan.tiny is None


def test_a_run_that_is_resumed_keeps_the_model_that_it_made(tmp_path: Path) -> None:
    prepare(plan_new(LOCAL, {"run.directory": str(tmp_path), "run.id": "r"}))
    for name, value in (("model.tiny.layers", 3), ("model.tiny", {"layers": 3})):
        with pytest.raises(ConfigError, match=rf"^{name}: the run has its model since it began .* start a new run"):
            plan_resumed(tmp_path / "r", {name: value})


@pytest.mark.parametrize(("name", "value"), [("run.id", "other"), ("run.directory", "/elsewhere")])
def test_a_run_that_is_resumed_keeps_its_name_and_place(tmp_path: Path, name: str, value: str) -> None:
    prepare(plan_new(LOCAL, {"run.directory": str(tmp_path), "run.id": "r"}))
    with pytest.raises(ConfigError, match=rf"^{name}: a run that goes on has the name of its folder, .*/r\. Leave it"):
        plan_resumed(tmp_path / "r", {name: value})


@pytest.mark.parametrize(
    ("ledger", "steps", "changed", "said"),
    [
        ({}, 5, False, ""),
        ({"status": "stopped", "step": 5, "durable_step": 4}, 5, False, ""),
        ({"status": "finished", "step": 5, "durable_step": 5}, 5, True, "all 5 steps are trained"),
        ({"status": "finished", "step": 5, "durable_step": 5}, 6, True, ""),
        ({"status": "finished", "step": 3, "durable_step": 3}, 5, False, "data set ended after step 3 of 5"),
        ({"status": "finished", "step": 3, "durable_step": 3}, 5, True, ""),
    ],
)
def test_a_run_that_has_ended_is_told_from_one_that_has_something_left(
    ledger: dict[str, object], steps: int, changed: bool, said: str
) -> None:
    found = nothing_left(Path("runs/r"), ledger, steps, changed=changed)
    assert said in found
    assert bool(said) is bool(found)


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_fewer_steps_than_are_done_is_one_sentence(status: str) -> None:
    ledger = {"status": status, "step": 5, "durable_step": 5}
    with pytest.raises(ConfigError, match=r"^run.steps: runs/r has done 5 steps, 3 are less. Set more"):
        nothing_left(Path("runs/r"), ledger, 3, changed=True)


def test_a_finished_run_starts_nothing_and_says_how_to_train_longer(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    plan = plan_new(LOCAL, {"run.directory": str(tmp_path), "run.id": "r", "engine.python": str(python)})
    prepare(plan)
    steps, before = plan.config.run.steps, plan.file.stat().st_mtime_ns
    (plan.folder / "ledger.json").write_text(json.dumps({"status": "finished", "step": steps}))
    python.unlink()  # whatever starts would miss it
    console = Console(file=io.StringIO(), width=80)
    assert run(None, resume=plan.folder, console=console) == 0
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert f"{plan.folder} has finished: all {steps} steps are trained." in said
    assert f"lagrange up --resume {plan.folder} --set run.steps=N" in said
    assert plan.file.stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match=f"has done {steps} steps"):
        run(None, resume=plan.folder, console=console, overrides={"run.steps": 1})
    with pytest.raises(CannotStart, match="make setup"):
        run(None, resume=plan.folder, console=console, overrides={"run.steps": steps + 1})


def test_a_folder_to_resume_that_is_no_run_is_an_error_of_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml there.*runs/<id>"):
        plan_resumed(tmp_path / "nothing", {})


def test_a_new_run_does_not_take_over_an_old_runs_folder(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    settings = {"run.directory": str(tmp_path), "run.id": "r", "engine.python": str(python)}
    prepare(plan_new(LOCAL, settings))
    with pytest.raises(CannotStart, match="--resume"):
        plan_new(LOCAL, settings)


def test_a_run_folder_is_held_once_and_let_go_afterwards(tmp_path: Path) -> None:
    with only_one(tmp_path / "r"), pytest.raises(CannotStart, match="another"), only_one(tmp_path / "r"):
        pass
    with only_one(tmp_path / "r"):
        pass
