"""A `lagrange up` of the real system under test: start it, look at it, kill parts of it.

Invariant: leaving `running_loop` ends every process of the run, whatever the test did.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.queue import Broker
from broker.types import Snapshot
from configs import load_config

ROOT = Path(__file__).resolve().parents[2]
# The roles by the words of their command lines.
ROLES = {
    "worker": ("services", "rollout"),
    "weight-sync": ("services", "weight-sync"),
    "monitor": ("services", "monitor"),
    "trainer": ("services", "trainer"),
    "engine": ("services", "engine"),
    "sglang": ("lagrange_sglang_cpu.serve",),
    "redis": ("redis-server",),
}


@dataclass(slots=True)
class RunningLoop:
    """One run: its folder and the `up` process."""

    folder: Path
    process: subprocess.Popen[bytes]
    output: Path

    def snapshot(self) -> Snapshot:
        """The broker's view now."""
        config = load_config(self.folder / "config.yaml")
        assert config.redis.url is not None
        broker = Broker.connect(config.redis.url, config.run.id, timeout_s=5.0)
        try:
            return broker.snapshot()
        finally:
            broker.close()

    def wait_for_step(self, step: int, timeout_s: float) -> Snapshot:
        """Until `step` optimizer steps were recorded."""
        return self.wait_for(lambda s: s.step >= step, f"step {step}", timeout_s)

    def wait_for(self, condition: Callable[[Snapshot], bool], what: str, timeout_s: float) -> Snapshot:
        """Until a snapshot meets `condition`. Raises AssertionError after `timeout_s` or if `up` ended badly."""
        deadline, last = time.monotonic() + timeout_s, None
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # Redis may not be up yet, or be the part that was killed
                last = self.snapshot()
                if condition(last):
                    return last
            code = self.process.poll()
            assert code in (None, 0), f"`up` ended with {code} while waiting for {what}:\n{self.said()}"
            time.sleep(0.1)
        raise AssertionError(f"no {what} after {timeout_s} s, last snapshot {last}\n{self.said()}")

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one process of a role; returns its id."""
        found = pids_of(role, self.folder)
        assert found, f"no process of {role} runs"
        os.kill(found[0], number)
        return found[0]

    def ends(self, timeout_s: float) -> int:
        """The exit code of `up`."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"`up` did not end within {timeout_s} s:\n{self.said()}") from error

    def said(self) -> str:
        """The end of what `up` printed."""
        return self.output.read_text(errors="replace")[-3000:]

    def metrics(self) -> list[dict[str, Any]]:
        """The records of the steps in metrics.jsonl."""
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [record for record in records if "step" in record]


def pids_of(role: str, folder: Path) -> list[int]:
    """Processes of a role in the run of `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and str(folder) in "\0".join(words) and all(word in words for word in ROLES[role]):
                found.append(int(entry.name))
    return sorted(found)


def processes_of(folder: Path) -> list[int]:
    """All processes that name the run's folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z" and str(folder) in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def running_loop(directory: Path, *arguments: str) -> Iterator[RunningLoop]:
    """`lagrange up ARGUMENTS` with the run's folder below `directory`; --resume is passed through."""
    directory.mkdir(parents=True, exist_ok=True)
    output = directory / f"up-{time.monotonic_ns()}.log"
    before = {path.name for path in directory.iterdir()}
    resumed = Path(arguments[1]) if arguments[0] == "--resume" else None
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "services", "up", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
        )
    folder = resumed
    try:
        deadline = time.monotonic() + 60
        while folder is None:
            new = [p for p in directory.iterdir() if p.name not in before and (p / "config.yaml").is_file()]
            folder = new[0] if new else None
            assert process.poll() is None, f"`up` ended with {process.returncode}: {output.read_text()}"
            assert time.monotonic() < deadline, f"no run folder: {output.read_text()}"
            time.sleep(0.05)
        yield RunningLoop(folder, process, output)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        if folder is not None:
            for pid in processes_of(folder):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
