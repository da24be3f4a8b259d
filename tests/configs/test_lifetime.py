"""configs/lifetime.py, with real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from configs.lifetime import signals_noted

CHILD = "import os, sys, time; from configs.lifetime import die_with; die_with(int(sys.argv[1]));"
SLEEPER = CHILD + "print('lives', flush=True); time.sleep(60)"
PARENT = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {SLEEPER!r}, str(os.getpid())])
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_a_process_ends_with_its_parent_however_that_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"lives\n"
    parent.stdin.close()
    assert parent.wait(30) == -signal.SIGKILL
    assert select.select([parent.stdout], [], [], 30)[0]  # the child held the other end for a minute otherwise
    assert parent.stdout.read() == b""
    parent.stdout.close()


def test_a_process_whose_parent_has_ended_before_goes_no_further() -> None:
    nobody = str(os.getppid())  # not the parent of what is started here
    done = subprocess.run(
        [sys.executable, "-c", CHILD + "print('went on')", nobody], capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_signals_are_noted_while_they_are_asked_for_and_not_after() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with signals_noted(signal.SIGUSR1, signal.SIGUSR2) as noted:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (noted, heard) == ([signal.SIGUSR1, signal.SIGUSR2], [signal.SIGUSR1])
