"""The log of a process whose disk fills up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGGING = """
import errno, os, sys, structlog
from broker.logs import configure_logs
configure_logs("r", "worker-0")
log = structlog.get_logger()
log.info("before")
kept, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 2)
for number in range(300):
    log.warning("refused " + "x" * 100, number=number)
try:
    raise ValueError("a fault")
except ValueError:
    log.exception("refused, too")
os.dup2(kept, 2)
log.info("after")
"""


def test_a_full_disk_costs_log_lines_which_are_counted_and_not_the_process() -> None:
    command = [sys.executable, "-c", LOGGING]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert (lines[0]["event"], lines[-1]["event"]) == ("before", "after")
    assert [line["lines"] for line in lines if line["event"] == "log lines could not be written"] == [301]
