"""Sinks beside metrics.jsonl, with stand-ins for the packages that they write with."""

from __future__ import annotations

import os
import sys
import types
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError
from tests.conftest import ConfigFactory
from trainer.metrics import JsonLines
from trainer.sinks import flat_numbers, sinks_of

RECORD = {"step": 3, "loss": 0.5, "kl": None, "why": "slow", "sat": {"q": 0.1, "bad": float("nan")}, "ok": 1}


def test_numbers_are_named_by_their_path_and_nothing_else_is_taken() -> None:
    assert flat_numbers(RECORD) == {"loss": 0.5, "sat/q": 0.1, "ok": 1.0}


def test_every_sink_gets_the_same_numbers_at_the_same_step(
    make_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            seen.append(("tensorboard", folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, value, step))

        def flush(self) -> None: ...
        def close(self) -> None:
            seen.append("closed")

    class Run:
        def log(self, numbers: dict[str, float], step: int) -> None:
            seen.append((numbers, step))

        def finish(self) -> None:
            seen.append("finished")

    def init(**options: Any) -> Run:
        assert options["mode"] == "offline"
        return Run()

    board, wandb = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("wandb")
    board.SummaryWriter, wandb.init = Writer, init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = make_config(**{"trainer.sinks": ["tensorboard", "wandb"]})
    sink = sinks_of(config, 2)
    sink.write(RECORD)
    sink.close()
    assert seen[0] == ("tensorboard", str(config.run.folder / "tensorboard"), 3)
    assert seen[1:4] == [("loss", 0.5, 3), ("sat/q", 0.1, 3), ("ok", 1.0, 3)]
    assert seen[4:] == [({"loss": 0.5, "sat/q": 0.1, "ok": 1.0}, 3), "closed", "finished"]
    assert (config.run.folder / "metrics.jsonl").read_text().count("\n") == 1


def test_a_sink_that_is_not_installed_is_named_at_the_start(
    make_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        sinks_of(make_config(**{"trainer.sinks": ["wandb"]}), 0)


def test_a_disk_that_is_full_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path, says = tmp_path / "metrics.jsonl", r"No space left on device: '.*metrics\.jsonl'"
    path.write_text('{"step": 1}\n')
    with closing(JsonLines(path, 1)) as sink, Path("/dev/full").open("ab", buffering=0) as device:
        os.dup2(device.fileno(), sink._file.fileno())
        with pytest.raises(OSError, match=says):
            sink.write(RECORD)
    path.with_suffix(".tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=says):
        JsonLines(path, 1)
    assert path.read_text() == '{"step": 1}\n'


def test_a_damaged_file_costs_its_damaged_lines_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\xff\x00\n{"step": 3}\n')
    JsonLines(path, 3).close()
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
