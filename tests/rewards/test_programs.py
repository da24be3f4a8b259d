"""Programs of models run under limits; nothing of them is left, and nothing of ours is shown to them."""

from __future__ import annotations

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
