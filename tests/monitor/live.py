"""The services as processes of their own, and a browser that looks at one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.monitor.conftest import Run
from tests.weight_sync.live import config, free_port, wait_for

TOKEN = "s3cret"


class Service:
    """`lagrange monitor` or `lagrange weight-sync`, on a port that stays the same over restarts."""

    def __init__(self, name: str, url: str, folder: Path, environment: dict[str, str], run: str = "test") -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        tree = config(url, folder).model_dump(mode="json")
        tree["run"]["id"] = run
        tree[name.replace("-", "_")] = {"host": "127.0.0.1", "port": self.port}
        self._file = folder / f"{name}.yaml"
        self._file.write_text(yaml.safe_dump(tree))
        self.environment = {**os.environ, "LAGRANGE_API_TOKEN": TOKEN, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers."""
        command = [sys.executable, "-m", "services", self.name, "--config", str(self._file)]
        self._process = subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL)
        wait_for(self._answers, 200)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended"
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(30)


@contextlib.contextmanager
def service(name: str, url: str, folder: Path, run: str = "test", **environment: str) -> Iterator[Service]:
    """A running service of a run in the Redis at `url`."""
    made = Service(name, url, folder, environment, run)
    try:
        made.start()
        yield made
    finally:
        if made._process is not None and made._process.poll() is None:
            made._process.kill()
            made._process.wait(30)


def monitor_of(run: Run, folder: Path, **environment: str) -> contextlib.AbstractContextManager[Service]:
    """A running monitor."""
    return service("monitor", run.url, folder, run.name, **environment)


def chromium() -> str:
    """The system's Chromium, or a skip that says how to get it."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium")
    return found
