"""Starts the trainer's ranks.

Invariant: the ranks of one trainer live and die together, and none outlives the process that started them.

`python -m trainer.launch MODULE ARGUMENTS...` is one rank, or the torchrun above all of them: it asks the kernel to be
killed with its parent, then runs MODULE.main(ARGUMENTS).
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from configs.drain import drain_seconds
from configs.lifetime import die_with, signals_noted
from configs.own_packages import module_path
from configs.ports import free_port
from configs.schema import RunConfig

STOP_GRACE_S = 8.0
"""After one rank has ended badly, the others have this long to end by themselves, in seconds; after a signal all have,
unless LAGRANGE_DRAIN_S says how long a step and a checkpoint may take."""

AGAIN = 1
"""Exit code of a rank that ended badly and can be started again."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a rank that ended well, but before the run did, because it was asked to."""

_POLL_S = 0.05
PARENT = "LAGRANGE_LAUNCHER_PID"
"""Names the process with which a rank ends."""


def run_ranks(config: RunConfig, module: str, arguments: Sequence[str]) -> int:
    """Run module.main(arguments) on every rank of trainer.layout; returns the exit code, as `outcome` says.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment. With one rank, or when
    torchrun has already started this process as one, the module runs in this process. SIGTERM and SIGINT are passed on
    to the ranks; when one fails, the others are ended within STOP_GRACE_S and a little. Ranks on several machines:
    torchrun on each, or Ray. Raises ConfigError if Ray is asked for and not to be had, or LAGRANGE_DRAIN_S is none.
    """
    if config.trainer.launcher == "ray" and "RANK" not in os.environ:
        from trainer.ray_launch import run_on_ray  # optional

        return run_on_ray(config, module, arguments)
    ranks = config.trainer.layout.ranks
    if ranks == 1 or "RANK" in os.environ:
        return run_module(module, arguments)
    if config.trainer.launcher == "torchrun":
        patience = str(math.ceil(stop_seconds()))  # it would kill after 30 s
        torchrun = ["trainer.torchrun", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        command = [sys.executable, "-m", "trainer.launch", *torchrun, "trainer.launch", module, *arguments]
        return _together([(command, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": patience, PARENT: str(os.getpid())})])
    port = str(config.trainer.port or free_port())
    here = [sys.executable, "-m", "trainer.launch", module, *arguments]
    return _together(
        [
            (
                here,
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    PARENT: str(os.getpid()),
                },
            )
            for rank in range(ranks)
        ]
    )


def stop_seconds() -> float:
    """How long the ranks may take to end by themselves after a signal. Raises ConfigError."""
    return drain_seconds(STOP_GRACE_S)


def run_module(module: str, arguments: Sequence[str]) -> int:
    """module.main(arguments) in this process; its exit code."""
    return int(importlib.import_module(module).main(list(arguments)) or 0)


def _together(commands: Sequence[tuple[list[str], dict[str, str]]]) -> int:
    """Run processes until all have ended, or one has failed; returns the exit code, as `outcome` says."""
    patience = stop_seconds()
    # In ranks no file of the current folder takes the place of a module; torchrun hands no -P on.
    ours = os.environ | {"PYTHONSAFEPATH": "1"} | module_path()
    with signals_noted(signal.SIGTERM, signal.SIGINT) as noted:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes += (subprocess.Popen(command, env=ours | extra) for command, extra in commands)
            passed_on: float | None = None
            while True:
                codes = [process.poll() for process in processes]
                if (code := outcome(codes)) is not None:
                    return code
                if noted and passed_on is None:
                    passed_on = time.monotonic()
                    for process in processes:
                        _send(process, noted[0])
                if passed_on is not None and time.monotonic() - passed_on > patience:
                    return 128 + noted[0]
                time.sleep(_POLL_S)
        finally:
            _end(processes)


def outcome(codes: Sequence[int | None]) -> int | None:
    """What ranks that ended with these codes (None: still runs) did together: None while they run and none has failed,
    else the code of the first that failed, STOPPED if one stopped on request, or 0."""
    failed = next((code for code in codes if code not in (None, 0, STOPPED)), None)
    if failed is not None:
        return 128 - failed if failed < 0 else failed
    if None in codes:
        return None
    return STOPPED if STOPPED in codes else 0


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, STOP_GRACE_S of patience, SIGKILL."""
    for process in processes:
        _send(process, signal.SIGTERM)
    deadline = time.monotonic() + STOP_GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_GRACE_S)


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)


def main() -> int:
    """One rank."""
    die_with(int(os.environ.pop(PARENT, 0)) or os.getppid())  # torchrun does not name itself to its ranks
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it still imports, Ctrl-C ends it without a traceback
    return run_module(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
