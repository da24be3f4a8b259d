"""The command line and environment of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import EngineSection
from rollout.checkpoint import read_checkpoint
from rollout.command import Launch, engine_launch, key_file_text
from tests.rollout.helpers import CHECKPOINT, tiny_folder

ENVIRONMENT = {"PATH": "/bin", "LAGRANGE_REDIS_PASSWORD": "p", "LAGRANGE_ENGINE_API_KEY": "k", "HOME": "/root"}


def launch(**fields: Any) -> Launch:
    return engine_launch(EngineSection(**fields), CHECKPOINT, 30000, environment=ENVIRONMENT, key_file=Path("/k.yaml"))


def option(command: Launch, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def test_a_cpu_engine_gets_the_plugin_and_one_thread() -> None:
    command = launch()
    assert command.argv[1:3] == ("-m", "lagrange_sglang_cpu.serve")
    assert option(command, "--attention-backend") == "torch_native"
    assert option(command, "--max-total-tokens") == "20000"
    assert option(command, "--mem-fraction-static") == "0.3"
    assert {"--enable-return-routed-experts", "--enable-metrics", "--sleep-on-idle"} <= set(command.argv)
    assert "--enable-metrics" not in launch(metrics=False).argv
    assert command.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert command.environment["OMP_NUM_THREADS"] == "1"


def test_a_gpu_engine_gets_neither_plugin_nor_cpu_options() -> None:
    command = launch(device="cuda", dtype="bfloat16", tensor_parallel=4, max_total_tokens=None)
    assert command.argv[1:3] == ("-m", "sglang.launch_server")
    assert option(command, "--tp-size") == "4"
    assert option(command, "--dtype") == "bfloat16"
    assert not {"--device", "--attention-backend", "--max-total-tokens"} & set(command.argv)
    assert "SGLANG_USE_CPU_ENGINE" not in command.environment


@pytest.mark.parametrize(
    ("visible", "index", "each", "own"),
    [("0,1,2,3", 1, 2, "2,3"), ("4,5", 0, 1, "4"), ("0", 3, 1, "0"), ("0,1", 1, 2, "0,1")],
)
def test_engines_of_one_machine_share_its_gpus(visible: str, index: int, each: int, own: str) -> None:
    section = EngineSection(device="cuda", tensor_parallel=each)
    command = engine_launch(
        section, CHECKPOINT, 1, environment={"CUDA_VISIBLE_DEVICES": visible}, key_file=None, index=index
    )
    assert command.environment["CUDA_VISIBLE_DEVICES"] == own


def test_engines_of_one_machine_take_the_gpus_one_after_another_if_nobody_named_any() -> None:
    section = EngineSection(device="cuda", tensor_parallel=2)
    first, third = (
        engine_launch(section, CHECKPOINT, 1, environment={}, key_file=None, index=index).argv for index in (0, 2)
    )
    assert "--base-gpu-id" not in first
    assert third[third.index("--base-gpu-id") + 1] == "4"


def test_a_gpu_engine_chooses_experts_where_they_are_recorded() -> None:
    assert option(launch(device="cuda"), "--moe-runner-backend") == "triton"
    dense = replace(CHECKPOINT, experts=0, top_k=0)
    command = engine_launch(EngineSection(device="cuda"), dense, 1, environment={}, key_file=None)
    assert "--moe-runner-backend" not in (*command.argv, *launch().argv)


def test_the_server_finds_the_programs_of_its_environment() -> None:
    section = EngineSection(python=Path("/env/bin/python"))
    for ours, path in (({"PATH": "/bin"}, "/env/bin:/bin"), ({}, "/env/bin")):
        command = engine_launch(section, CHECKPOINT, 1, environment=ours, key_file=None)
        assert command.environment["PATH"] == path


@pytest.mark.parametrize(
    ("cores", "ranks", "bound"),
    [([0, 1], 2, "0|1"), ([0, 1, 4, 5, 6], 2, "0,1|4,5"), ([3], 2, "3|3"), ([0, 1], 1, None), ([], 2, None)],
)
def test_ranks_of_a_cpu_engine_share_the_cores(cores: list[int], ranks: int, bound: str | None) -> None:
    section = EngineSection(tensor_parallel=ranks)
    command = engine_launch(section, CHECKPOINT, 1, environment={}, key_file=None, cores=cores)
    assert command.environment.get("SGLANG_CPU_OMP_THREADS_BIND") == bound


def test_a_dense_model_is_not_asked_for_routes() -> None:
    dense = replace(CHECKPOINT, experts=0, top_k=0)
    command = engine_launch(EngineSection(), dense, 1, environment={}, key_file=None)
    assert "--enable-return-routed-experts" not in command.argv
    assert "--config" not in command.argv


def test_no_secret_is_on_the_command_line_or_in_the_environment_of_the_server() -> None:
    command = launch()
    assert option(command, "--config") == "/k.yaml"
    assert not any(name.startswith("LAGRANGE_") for name in command.environment)


def test_no_file_of_the_current_folder_takes_the_place_of_a_module_in_the_server(tmp_path: Path) -> None:
    command = launch(python=sys.executable)
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')\n")
    module = [*command.argv[:2], "json.tool", "--help"]  # in the place of SGLang, which is not in this environment
    done = subprocess.run(
        module, cwd=tmp_path, env=command.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_server_starts_under_a_version_that_is_no_integer() -> None:
    assert not option(launch(), "--weight-version").isdecimal()


def test_extra_arguments_come_last_so_that_they_win() -> None:
    assert launch(extra_arguments=("--log-level", "debug")).argv[-2:] == ("--log-level", "debug")


def test_the_key_file_is_yaml_whatever_the_key() -> None:
    key = 'a: "b" #c'
    assert json.loads(key_file_text(key).removeprefix("api-key: ")) == key


def test_a_checkpoint_is_read_from_its_json(tmp_path: Path) -> None:
    found = read_checkpoint(tiny_folder(tmp_path))
    assert (found.layers, found.experts, found.top_k, found.vocabulary, found.context) == (2, 8, 2, 32, 512)
    assert found.stop_ids == (2,)
    assert found.routed
