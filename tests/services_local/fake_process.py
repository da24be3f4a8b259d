"""Stands in for every process of a run: `fake_process.py ROLE FOLDER BEHAVIOUR`.

Behaviours: serve (until SIGTERM), stubborn (ignores SIGTERM), finish (sets the run's status and exits 0 once
FOLDER/go exists), fatal (one error record, exit code 3), crash (exit code 1 at once), child (starts a grandchild in its
group and serves). Each start appends its process id to FOLDER/pids.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(role: str, folder: Path, behaviour: str) -> int:
    with (folder / "pids").open("a") as file:
        file.write(f"{role} {_own_pid()}\n")
    if behaviour == "crash":
        return 1
    if behaviour == "fatal":
        sys.stderr.write(json.dumps({"level": "error", "event": "the loss is not finite", "step": 3}) + "\n")
        return 3
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "child":
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        with (folder / "pids").open("a") as file:
            file.write(f"grandchild {grandchild.pid}\n")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if behaviour == "finish" and (folder / "go").exists():
            _finish(folder)
            return 0
        time.sleep(0.02)
    return 1


def _own_pid() -> int:
    return int(Path("/proc/self").resolve().name)


def _finish(folder: Path) -> None:
    # Imported here: a test starts dozens of these processes, and one of them finishes.
    from broker.queue import Broker
    from configs import load_config

    config = load_config(folder / "config.yaml")
    assert config.redis.url is not None
    broker = Broker.connect(config.redis.url, config.run.id, timeout_s=5.0)
    broker.set_status("finished")
    broker.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
