"""The launcher of ranks on this machine; the ranks need no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from configs.load import ConfigError, save_config
from tests.broker.helpers import wait_for
from tests.conftest import ConfigFactory
from trainer import main, torchrun
from trainer.launch import STOPPED, outcome, stop_seconds

ROOT = Path(__file__).parents[2]
START = (
    "import sys; from pathlib import Path; import trainer.launch as launch; from configs.load import load_config;"
    " launch.STOP_GRACE_S = 0.0;"
    " sys.exit(launch.run_ranks(load_config(Path(sys.argv[1])), 'tests.trainer.ray_probe', sys.argv[2:]))"
)


@pytest.mark.timeout(300)
def test_ranks_that_are_told_to_stop_have_the_time_for_a_step_and_a_checkpoint(
    make_config: ConfigFactory, tmp_path: Path
) -> None:
    file, lives = tmp_path / "config.yaml", tmp_path / "lives"
    save_config(make_config(**{"trainer.layout": {"data": 2}}), file)
    lives.mkdir()
    command = [sys.executable, "-c", START, str(file), str(lives), "checkpoint"]
    environment = os.environ | {"LAGRANGE_DRAIN_S": "100", "PYTHONPATH": str(ROOT)}  # where the ranks find our probe
    with subprocess.Popen(command, env=environment) as launcher:
        try:
            wait_for(lambda: len(list(lives.glob("rank-*"))) == 2, 100)
            launcher.send_signal(signal.SIGTERM)
            wait_for(lambda: len(list(lives.glob("asked-*"))) == 2, 100)
            (lives / "go").touch()
            assert launcher.wait(100) == STOPPED
        finally:
            launcher.kill()
    assert sorted(path.name for path in lives.glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_no_file_of_the_current_folder_takes_the_place_of_a_module_in_the_ranks(
    make_config: ConfigFactory, tmp_path: Path, launcher: str
) -> None:
    file, modules = tmp_path / "config.yaml", tmp_path / "modules"
    save_config(make_config(**{"trainer.layout": {"data": 2}, "trainer.launcher": launcher}), file)
    modules.mkdir()
    (modules / "rank_of_the_test.py").write_text("def main(arguments):\n    return 0\n")
    for name in ("trainer.py", "configs.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')\n")
    script = tmp_path / "bin" / "start.py"  # as the command `lagrange`: a script, which says nothing of -P
    script.parent.mkdir()
    script.write_text(START.replace("tests.trainer.ray_probe", "rank_of_the_test"))
    start = [sys.executable, str(script), str(file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(modules)))}
    done = subprocess.run(start, cwd=tmp_path, env=environment, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["soon", "-1", "inf"])
def test_a_time_to_stop_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGRANGE_DRAIN_S", text)
    with pytest.raises(ConfigError, match="LAGRANGE_DRAIN_S"):
        stop_seconds()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, None], None),
        ([STOPPED, None], None),
        ([None, 3], 3),
        ([STOPPED, -9], 128 + 9),
        ([0, 0], 0),
        ([STOPPED, 0], STOPPED),
    ],
)
def test_ranks_that_stopped_on_request_are_neither_failed_nor_done(
    codes: list[int | None], expected: int | None
) -> None:
    assert outcome(codes) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_that_is_told_to_stop_ends_as_ranks_do(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def told(arguments: list[str]) -> None:
        raise SignalException("told to stop", number)

    monkeypatch.setattr("torch.distributed.run.main", told)
    assert torchrun.main([]) == STOPPED


def test_a_loss_setting_without_effect_is_said_once(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = {"name": "tis", "clip_high": 0.5}
    model = {"path": str(tmp_path)}
    config = make_config(**{"redis.url": "redis://x", "model": model, "trainer.loss": loss})
    monkeypatch.setattr(main, "configure_logs", lambda *_: None)
    monkeypatch.setattr(main, "_train", lambda *_: "finished")
    with capture_logs() as said:
        assert main.run(config) == 0
    (warning,) = [line["problem"] for line in said if line["log_level"] == "warning"]
    assert "clip_high have no effect" in warning
