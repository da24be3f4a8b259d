"""The pool of rollout workers on Ray: what is due, and a pool that grows, shrinks and replaces on a local cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import load_config, save_config
from services.ray_workers import Seen, due, wanted_now
from tests.conftest import ConfigFactory

ROOT = Path(__file__).parents[2]
START = (
    "import sys; from pathlib import Path; from configs.load import load_config; from services.ray_workers import run;"
    " sys.exit(run(Path(sys.argv[1]), module='tests.trainer.pool_probe', read=load_config))"
)


def test_what_is_missing_is_started_and_what_is_surplus_is_stopped() -> None:
    assert due(3, {0: Seen(True), 2: Seen(True)}, 0.0) == ([1], [])
    assert due(1, {0: Seen(True), 1: Seen(True), 2: Seen(False)}, 0.0) == ([], [1])
    assert due(0, {0: Seen(True)}, 0.0) == ([], [0])


def test_a_worker_that_failed_waits_longer_each_time_and_one_that_ended_well_stays_ended() -> None:
    assert due(1, {0: Seen(False, failures=1, ended_s=10.0)}, 10.5) == ([], [])
    assert due(1, {0: Seen(False, failures=1, ended_s=10.0)}, 11.0) == ([0], [])
    assert due(1, {0: Seen(False, failures=3, ended_s=10.0)}, 13.0) == ([], [])
    assert due(1, {0: Seen(False, failures=30, ended_s=10.0)}, 25.0) == ([0], [])
    assert due(1, {0: Seen(False, done=True)}, 99.0) == ([], [])


def test_a_slip_in_the_file_that_is_read_again_ends_no_worker(make_config: ConfigFactory, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    save_config(make_config(**{"rollout.workers": 3}), file)
    assert wanted_now(load_config, file, 2) == 3
    file.write_text(file.read_text().replace("workers: 3", "wrokers: 4"))
    assert wanted_now(load_config, file, 3) == 3


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_pool_on_a_local_cluster_replaces_adds_and_removes_workers(
    make_config: ConfigFactory, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    lives, file = tmp_path / "lives", tmp_path / "config.yaml"
    lives.mkdir()
    save_config(make_config(**{"rollout.workers": 2}), file)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    for name in ("json.py", "random.py", "trainer.py", "configs.py"):  # no such file takes the place of a module
        (tmp_path / name).write_text("raise SystemExit('shadowed')\n")
    with (tmp_path / "log").open("wb") as log:
        pool = subprocess.Popen(
            [sys.executable, "-P", "-c", START, str(file)], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )

    def until(true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not true():
            assert pool.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            signal.sigtimedwait([], 0.1)

    try:
        until(lambda: {"0-0", "1-0", "1-1"} <= {p.name for p in lives.iterdir()})  # number 1 failed and is back
        os.kill(int((lives / "0-0").read_text()), signal.SIGKILL)
        until((lives / "0-1").exists)
        save_config(make_config(**{"rollout.workers": 3}), file)
        pool.send_signal(signal.SIGHUP)
        until((lives / "2-0").exists)
        save_config(make_config(**{"rollout.workers": 1}), file)
        pool.send_signal(signal.SIGHUP)
        until(lambda: (lives / "left-1").exists() and (lives / "left-2").exists())
        assert not (lives / "left-0").exists()
        pool.send_signal(signal.SIGTERM)
        assert pool.wait(90) == 0, (tmp_path / "log").read_text()[-3000:]
        assert (lives / "left-0").exists()
    finally:
        if pool.poll() is None:
            pool.kill()
        pool.wait(10)
