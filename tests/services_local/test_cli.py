"""The command line as its user meets it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from broker.queue import Broker
from broker.types import Outcome
from configs import ConfigError, load_config, save_config
from configs.fields import fields
from services.cli import main
from services.local.live import Beginning
from services.local.open_run import save_beginning
from services.options import pairs
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "configs" / "local.yaml"


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


Lagrange = Callable[..., Done]


@pytest.fixture
def lagrange(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lagrange:
    """Run the command line in this process, from the project's folder."""
    monkeypatch.chdir(ROOT)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["lagrange", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return Done(int(end.value.code or 0), out, err)

    return call


def test_check_says_what_a_valid_file_means(lagrange: Lagrange) -> None:
    done = lagrange("check", "configs/qwen3-30b-a3b.yaml")
    assert done.returncode == 0, done.stderr
    assert "is valid" in done.stdout
    assert "30.5 billion parameters" in done.stdout
    assert re.search(r"^restart .{80,}", done.stdout, re.M)  # a line that a program reads is not broken at 80 columns


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("trainer.loss.name=satgrpo", "Did you mean sat-grpo?"),
        ("trainer.loss.name=ppo", "'ppo' is not a loss. Known: cispo,"),
        ("trainer.loss.parameters.foo=1", "no such parameter"),
        ("task.name=nope", "there is no task 'nope'"),
        ("task.name=nope", "once that package is installed beside Lagrange"),
        ("task.name=maxdigit", "Did you mean max-digit?"),
        ("task.parameters.foo=1", "unknown: foo. There are digits, name."),
        ("evaluation.tasks=[{name: nope}]", "there is no task 'nope'"),
    ],
)
def test_check_refuses_what_only_the_trainer_or_a_worker_would_find(
    lagrange: Lagrange, setting: str, said: str
) -> None:
    done = lagrange("check", "configs/local.yaml", "--set", setting)
    assert done.returncode == 2
    assert said in done.stderr


def test_check_says_all_that_it_finds_together_each_with_the_file(lagrange: Lagrange) -> None:
    settings = ("trainer.loss.name=satgrpo", "task.name=nope", "evaluation.tasks=[{name: Bad Name}]")
    done = lagrange("check", "configs/local.yaml", *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert all(line.startswith("configs/local.yaml: ") for line in lines)
    for said in ("satgrpo", "nope", "Bad Name"):
        assert any(said in line for line in lines), said


def test_what_only_another_machine_has_is_no_error_of_the_file(lagrange: Lagrange) -> None:
    done = lagrange("check", "configs/qwen3-30b-a3b.yaml")
    assert done.returncode == 0
    assert "not here task.parameters of 'math-jsonl'" in " ".join(done.stdout.split())
    assert "on another machine the file may run" in " ".join(done.stdout.split())


def test_the_version_is_that_of_the_package_with_those_of_what_it_stands_on(lagrange: Lagrange) -> None:
    done = lagrange("--version")
    assert done.returncode == 0
    assert re.match(r"lagrange \d+\.\d+", done.stdout)
    for package in ("pydantic", "redis"):
        assert f"{package} {version(package)}\n" in done.stdout


def test_an_unknown_key_is_one_message_without_a_traceback_and_exit_code_2(lagrange: Lagrange, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text((ROOT / "configs" / "local.yaml").read_text().replace("  max: 1", "  max: 1\n  maximum: 2"))
    done = lagrange("check", str(file))
    assert done.returncode == 2
    assert "lag.maximum: unknown key" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(ConfigError):
        lagrange("--debug", "check", str(file))


def test_a_process_that_is_started_by_its_interpreter_has_the_same_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services", "check", "configs/none.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("configs/none.yaml: cannot be read")


@pytest.mark.parametrize("module", ["services.commands", "typer", "configs.check"])
def test_ctrl_c_while_a_command_still_imports_ends_it_without_a_traceback(module: str) -> None:
    code = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["lagrange", "check", "configs/local.yaml"]
from services.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_impossible_combination_names_the_fields_to_change(lagrange: Lagrange) -> None:
    done = lagrange("check", "configs/local.yaml", "--set", "lag.max=0", "--set", "weights.publish_interval=4")
    assert done.returncode == 2
    assert "Set weights.publish_interval: 1, or lag.max to at least 3" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up",), "--resume"),
        (("up", "configs/none.yaml"), "cannot be read"),
        (("up", "configs/local.yaml", "--resume", "runs/r"), "Leave the file out"),
        (("up", "--resume", "runs/none"), "no config.yaml"),
        (("up", "configs/local.yaml", "--set", "engine.python=/none/python"), "make setup"),
        (("status", "runs/none"), "http://HOST:PORT"),
        (("watch", "127.0.0.1:8020"), "http://HOST:PORT"),
        (("status", "http://127.0.0.1:1"), "does not answer (ConnectError). Name the address"),
        (("status", "configs"), "config.yaml is missing"),
        (("replay", "none"), "`lagrange groups dump` writes one"),
        (("up", "configs/local.yaml", "--set", "monitor.host=192.0.2.1"), "monitor.host: cannot listen on 192.0.2.1"),
        (
            ("up", "configs/local.yaml", "--set", "engine.host=192.0.2.1", "--set", "engine.port=9"),
            "engine.host: cannot",
        ),
        (("up", "configs/local.yaml", "--set", "task.name=nope"), "configs/local.yaml: task.name: there is no task"),
        (("up", "configs/local.yaml", "--set", "trainer.loss.name=ppo"), "trainer.loss.name: 'ppo' is not a loss"),
        (("up", "configs/local.yaml", "--set", "task={name: gsm8k, parameters: {path: none}}"), "none"),
        (("queue", "configs"), "config.yaml is missing"),
        (("report", "configs"), "or the configuration file that the run's processes were given"),
        (("report", "runs/none"), "no such folder or file"),
        (("queue", "runs/none"), "no such folder or file"),
        (("report", "http://127.0.0.1:1"), "an address of a monitor, which `status` and `watch` take"),
        (("groups", "list", "http://127.0.0.1:1"), "an address of a monitor, which `status` and `watch` take"),
        (("status", "LICENSE"), "LICENSE: not valid YAML"),
        (("report", "LICENSE"), "LICENSE: not valid YAML"),
        (("watch", "configs/local.yaml"), "run.id is not set"),
        (("report", "configs/local.yaml"), "run.id is not set"),
        (("report", "deploy/configs/tiny/config.yaml"), "is not on this machine"),
        (("up", "configs/local.yaml", "--set", "lag.max"), "expected NAME=VALUE"),
        (("up", "configs/local.yaml", "--set", "run.directory=LICENSE"), "LICENSE/local-"),
        (("eval", "runs/none", "--task", "max-digit", "--output", "/proc/none/x.jsonl"), "--output"),
    ],
)
def test_a_call_that_cannot_work_says_why_on_standard_error(
    lagrange: Lagrange, arguments: tuple[str, ...], words: str
) -> None:
    done = lagrange(*arguments)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        (
            {"status": "finished", "step": 5, "steps_total": 5},
            "has finished (step 5 of 5), and its Redis with it. What it did:",
        ),
        (
            {"status": "stopped", "step": 2, "steps_total": 5},
            "it stopped (step 2 of 5), and its Redis ended with it. Go on with: lagrange up --res",
        ),
        (None, "it ended without a last snapshot, and its Redis ended with it. Go on with: lagrange up --resume"),
    ],
)
@pytest.mark.parametrize("command", [("status",), ("watch",), ("queue",), ("groups", "list")])
def test_a_run_that_has_ended_says_so_at_once_instead_of_waiting_for_its_redis(
    lagrange: Lagrange, tmp_path: Path, command: tuple[str, ...], ledger: dict[str, object] | None, said: str
) -> None:
    with socket.socket() as deaf:  # whoever asks it would wait
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        port = deaf.getsockname()[1]
        config = load_config(LOCAL, {"run.id": "r", "redis.port": port, "redis.url": f"redis://127.0.0.1:{port}/0"})
        save_config(config, tmp_path / "config.yaml")
        (tmp_path / "up.lock").write_text("1")
        if ledger is not None:
            (tmp_path / "ledger.json").write_text(json.dumps(ledger))
        done = lagrange(*command, str(tmp_path))
    assert done.returncode == 1
    assert said in done.stderr


def test_status_of_a_run_that_resumes_shows_nothing_of_the_session_before(
    lagrange: Lagrange, broker: Broker, make_config: ConfigFactory, redis_url: str, tmp_path: Path
) -> None:
    save_config(make_config(**{"redis.url": redis_url}), tmp_path / "config.yaml")
    run = Run(broker).start()

    def train(reward: float) -> None:
        run.ready(2)
        outcomes = [Outcome(delivery.group_id) for delivery in run.pull()]
        broker.step(run.epoch, run.version, outcomes, {}, {"reward_mean": reward})
        run.version += 1

    train(0.25)
    assert "0.250" in lagrange("status", str(tmp_path)).stdout  # nothing says when a session began
    left = broker.snapshot()
    save_beginning(tmp_path, Beginning(left.time_ms, left.metrics))
    said = lagrange("status", str(tmp_path)).stdout
    for part in ("no step yet", "starting (half a minute"):
        assert part in said
    for part in ("0.250", "serving"):
        assert part not in said
    save_beginning(tmp_path, Beginning(left.time_ms - 130_000, left.metrics))
    assert re.search(r", [23]:\d\d, ", lagrange("status", str(tmp_path)).stdout)  # for so long this session goes on
    train(0.75)
    assert "0.750" in lagrange("status", str(tmp_path)).stdout


def test_a_run_is_watched_through_a_pipe_line_by_line_until_its_reader_has_seen_enough(
    broker: Broker, make_config: ConfigFactory, redis_url: str, tmp_path: Path
) -> None:
    save_config(make_config(**{"redis.url": redis_url}), tmp_path / "config.yaml")
    Run(broker).start()
    command = [sys.executable, "-m", "services", "watch", str(tmp_path), "--every", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert watch.stderr is not None
        try:
            lines = [watch.stdout.readline() for _ in range(2)]  # the time limit of the test is that of a silent one
            watch.stdout.close()
            watch.wait(timeout=30)
        finally:
            watch.kill()
        assert watch.stderr.read() == ""
    assert all(line.startswith("running  |  engines ") and line.endswith("\n") for line in lines), lines


def test_a_run_that_was_started_process_by_process_is_seen_by_its_configuration_file(
    lagrange: Lagrange, broker: Broker, make_config: ConfigFactory, redis_url: str, tmp_path: Path
) -> None:
    """Its folder, which only the configuration names, has no config.yaml."""
    config = make_config(**{"redis.url": redis_url, "run.directory": tmp_path / "volume"})
    save_config(config, tmp_path / "CONFIG.yaml")
    config.run.folder.mkdir(parents=True)
    record = {"step": 1, "version": 1, "reward_mean": 0.625, "step_s": 1.0, "time_s": 75.0}
    (config.run.folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    Run(broker).start()
    said = lagrange("status", str(tmp_path / "CONFIG.yaml"))
    assert (said.returncode, said.stderr) == (0, "")
    assert "1:15" in said.stdout  # the time of its last step
    assert lagrange("queue", str(tmp_path / "CONFIG.yaml")).returncode == 0
    broker.steer("pause", why="by test")
    assert "paused" in lagrange("status", str(tmp_path / "CONFIG.yaml")).stdout
    drawn = lagrange("report", str(tmp_path / "CONFIG.yaml"))
    assert drawn.stdout == f"{config.run.folder / 'report.html'}\n"
    shown = (config.run.folder / "report.html").read_text()
    assert "0.625" in shown
    assert drawn.stderr == ""
    assert "<span>ledger</span><strong>closes" in shown


def test_a_report_without_a_ledger_says_so_and_why_and_is_drawn(
    lagrange: Lagrange, make_config: ConfigFactory, redis_url: str, tmp_path: Path
) -> None:
    """Of a run whose Redis has it no more."""
    config = make_config(**{"redis.url": redis_url, "run.id": "gone", "run.directory": tmp_path})
    save_config(config, tmp_path / "CONFIG.yaml")
    config.run.folder.mkdir(parents=True)
    drawn = lagrange("report", str(tmp_path / "CONFIG.yaml"))
    assert (drawn.returncode, drawn.stdout) == (0, f"{config.run.folder / 'report.html'}\n")
    assert "without its ledger: there is no ledger.json" in drawn.stderr
    assert "run 'gone' is not in Redis" in drawn.stderr
    assert "There is none" in (config.run.folder / "report.html").read_text()


def test_a_damaged_last_snapshot_is_one_message(lagrange: Lagrange, tmp_path: Path) -> None:
    save_config(load_config(LOCAL), tmp_path / "config.yaml")
    (tmp_path / "ledger.json").write_text('{"step": ')
    done = lagrange("report", str(tmp_path))
    assert done.returncode == 2
    assert "ledger.json cannot be read" in done.stderr


def test_the_schema_is_json_with_a_sentence_for_every_field(lagrange: Lagrange) -> None:
    schema = json.loads(lagrange("schema", "--json").stdout)
    for name, section in schema["$defs"].items():
        for field, value in section["properties"].items():
            assert value.get("description"), f"{name}.{field}"


def test_the_schema_for_people_names_every_field_with_its_default_and_its_meaning(lagrange: Lagrange) -> None:
    told = {field.name: field for field in fields()}
    config = load_config(LOCAL)
    for name in dotted(config.model_dump(), "model.tiny", "task.parameters", "trainer.loss.parameters"):
        assert told[name].meaning, name
        assert told[name].kind, name
    assert told["lag.max"].default == ""
    assert told["model.tiny.head_dim"].kind == "whole number, at least 1, a multiple of 2"
    assert told["evaluation.tasks[].samples"].default == "8"
    said = lagrange("schema", "lag").stdout
    assert "lag.adaptive.budget" in said
    assert "to be set" in said
    assert "trainer" not in said.split("lag.max")[0]
    assert "no field begins with 'lags'" in lagrange("schema", "lags").stderr


def dotted(tree: dict[str, Any], *leaves: str, prefix: str = "") -> list[str]:
    names = []
    for key, value in tree.items():
        name = prefix + key
        inner = isinstance(value, dict) and name not in leaves
        names += dotted(value, *leaves, prefix=f"{name}.") if inner else [name]
    return names


def test_no_command_but_the_ranks_of_the_trainer_imports_torch() -> None:
    code = (
        "import sys, services.commands, configs.check;"
        "import services.local.up, services.local.session, services.local.tiny_model, trainer.main;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_overrides_are_read_as_yaml_values() -> None:
    assert pairs(["lag.max=4", "redis.url=null", "run.name=x", "engine.urls=[a, b]"], "--set") == {
        "lag.max": 4,
        "redis.url": None,
        "run.name": "x",
        "engine.urls": ["a", "b"],
    }
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        pairs(["=4"], "--set")
