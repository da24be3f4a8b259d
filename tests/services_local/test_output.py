"""What `lagrange up` does when it has nowhere to write; test_up.py has the readers that go away."""

from __future__ import annotations

import os
import pty
import signal
import sys

import pytest

from services.local.output import Output, console_of


def test_standard_output_that_is_closed_from_the_start_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    console_of(lambda: pytest.fail("nobody went away")).print("unseen")


def test_a_full_disk_costs_lines_and_does_not_stop_the_run() -> None:
    with open(os.open("/dev/full", os.O_WRONLY), "w", buffering=1) as full:  # noqa: PTH123 - a descriptor
        output = Output(full, lambda: pytest.fail("a disk that is full may have room again"))
        output.write("refused\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what the stream still holds must go when it closes


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("ignores", [True, False])
def test_a_terminal_that_is_closed_without_a_signal_stops_the_run_unless_hang_ups_are_ignored(
    asks: bool, ignores: bool
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)
    master, terminal = pty.openpty()
    told: list[bool] = []
    try:
        with open(terminal, "w", buffering=1) as stream:  # noqa: PTH123 - a descriptor
            output = Output(stream, lambda: told.append(True))
            assert output.isatty()
            os.close(master)
            for _ in range(2):
                if asks:  # as rich does, which then writes nothing
                    assert not output.isatty()
                else:
                    output.write("unseen\n")
        assert told == ([] if ignores else [True])
    finally:
        signal.signal(signal.SIGHUP, before)
