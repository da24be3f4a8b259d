"""The launchers ray and torchrun with two ranks on this machine; the ranks need neither torch nor Megatron-core."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.load import save_config
from tests.conftest import ConfigFactory

pytestmark = [pytest.mark.soak, pytest.mark.megatron, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
START = (
    "import sys; from pathlib import Path; from configs.load import load_config; from trainer.launch import run_ranks;"
    " sys.exit(run_ranks(load_config(Path(sys.argv[1])), 'tests.trainer.ray_probe', sys.argv[2:]))"
)
Starter = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(make_config: ConfigFactory, tmp_path: Path) -> Iterator[Starter]:
    started: list[subprocess.Popen[bytes]] = []

    def launch(launcher: str, what: str, folder: Path = ROOT) -> subprocess.Popen[bytes]:
        config = make_config(**{"trainer.launcher": launcher, "trainer.layout": {"data": 2}})
        file = tmp_path / "config.yaml"
        save_config(config, file)
        (tmp_path / "lives").mkdir()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        with (tmp_path / "log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", START, str(file), str(tmp_path / "lives"), what],
                    cwd=folder,
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
        return started[-1]

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def lives(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "lives").iterdir())}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(folder: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while len(list((folder / "lives").iterdir())) < count:
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
        signal.sigtimedwait([], 0.1)


def test_torchrun_gives_each_rank_its_place(start: Starter, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert start("torchrun", "end").wait(200) == 0, (tmp_path / "log").read_text()[-3000:]
    found = lives(tmp_path)
    assert sorted(found) == ["rank-0-0", "rank-1-0"]
    assert {note["WORLD_SIZE"] for note in found.values()} == {"2"}
    assert len({note["MASTER_PORT"] for note in found.values()}) == 1


def test_torchrun_ends_with_the_exit_code_of_the_rank_that_failed(start: Starter, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert start("torchrun", "fatal").wait(200) == 3, (tmp_path / "log").read_text()[-3000:]


def test_no_rank_outlives_a_launcher_of_torchrun_that_is_killed(start: Starter, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    launcher = start("torchrun", "wait")
    wait_for(tmp_path, 2, launcher)
    launcher.kill()
    launcher.wait(10)
    ranks = [note["pid"] for note in lives(tmp_path).values()]
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in ranks):
        assert time.monotonic() < deadline
        signal.sigtimedwait([], 0.1)


def test_ray_starts_the_whole_group_again_when_a_rank_is_killed(start: Starter, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert start("ray", "die").wait(250) == 0, (tmp_path / "log").read_text()[-3000:]
    found = lives(tmp_path)
    assert sorted(found) == ["rank-0-0", "rank-0-1", "rank-1-0", "rank-1-1"]
    for note in found.values():
        assert note["WORLD_SIZE"] == "2"
        assert not alive(note["pid"])
    assert len({found[f"rank-{rank}-1"]["MASTER_PORT"] for rank in (0, 1)}) == 1
    assert "started again" in (tmp_path / "log").read_text()


def test_no_file_of_the_current_folder_takes_the_place_of_a_module_under_ray(start: Starter, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("json.py", "random.py", "trainer.py", "configs.py"):
        (folder / name).write_text("raise SystemExit('shadowed')\n")
    assert start("ray", "end", folder).wait(250) == 0, (tmp_path / "log").read_text()[-3000:]
    assert sorted(lives(tmp_path)) == ["rank-0-0", "rank-1-0"]


def test_a_termination_signal_reaches_the_ranks_under_ray(start: Starter, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    driver = start("ray", "wait")
    wait_for(tmp_path, 2, driver)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) in (0, 128 + signal.SIGTERM), (tmp_path / "log").read_text()[-3000:]
    assert not any(alive(note["pid"]) for note in lives(tmp_path).values())
