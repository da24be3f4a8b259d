"""What `lagrange up` does when it has nowhere to write; test_up.py has the readers that go away."""

from __future__ import annotations

import os
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
