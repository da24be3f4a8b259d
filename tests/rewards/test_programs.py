"""Programs of models run under limits; nothing of them is left, and nothing of ours is shown to them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.rewards.programs import Limits, isolation, run_program

LIMITS = Limits(timeout_s=20.0, memory_mb=256)


def test_a_program_reads_and_writes() -> None:
    result = run_program("print(sum(map(int, input().split())))", "3 4\n", LIMITS)
    assert (result.output, result.exit_code, result.timed_out) == ("7\n", 0, False)


def test_a_program_that_does_not_end_is_killed_with_its_children() -> None:
    source = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'while True: pass'])\nwhile True: pass"
    result = run_program(source, "", Limits(timeout_s=1.0))
    assert result.timed_out
    assert result.exit_code != 0


def test_memory_files_and_environment_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGRANGE_API_TOKEN", "secret")
    source = (
        "import os\nprint('LAGRANGE_API_TOKEN' in os.environ)\n"
        "try:\n    x = bytearray(1 << 30)\n    print('memory')\nexcept MemoryError:\n    print('no memory')\n"
        "try:\n    open('big', 'wb').write(bytes(64 << 20))\n    print('file')\nexcept OSError:\n    print('no file')\n"
    )
    result = run_program(f"import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{source}", "", LIMITS)
    assert result.output.split("\n")[:3] == ["False", "no memory", "no file"]


@pytest.mark.skipif(not isolation(), reason="the kernel gives no network namespaces here")
def test_a_program_has_no_network() -> None:
    source = (
        "import socket\ntry:\n    socket.create_connection(('1.1.1.1', 80), 2)\nexcept OSError as e:\n    print('none')"
    )
    assert run_program(source, "", LIMITS).output.strip() == "none"
    interfaces = "import socket\nprint([name for _, name in socket.if_nameindex()])"
    assert run_program(interfaces, "", LIMITS).output.strip() in ("['lo']", "[]")


def test_a_program_does_not_outlive_the_process_that_runs_it(tmp_path: Path) -> None:
    lock = tmp_path / "held"
    lock.touch()
    holding = f"import fcntl, time\nf = open({str(lock)!r})\nfcntl.flock(f, fcntl.LOCK_EX)\ntime.sleep(600)"
    code = (
        f"from rollout.rewards.programs import Limits, run_program; run_program({holding!r}, '', Limits(timeout_s=600))"
    )
    folder = os.environ | {"TMPDIR": str(tmp_path)}  # who is killed removes no folder of its program
    judge = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], env=folder)
    try:
        until(lambda: held(lock))
    finally:
        judge.kill()
        judge.wait(10)
    until(lambda: not held(lock))


def held(lock: Path) -> bool:
    """Whether a program holds the file."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
