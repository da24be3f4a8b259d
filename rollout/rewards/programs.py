"""Runs a program that a model wrote (docs/rewards.md has the threat note).

Invariant: the program runs in a process group of its own, without our environment, in an empty temporary folder that is
removed, with limits on CPU time, address space, file size, processes and open files, without a network where the kernel
lets us; the whole group is killed when its time is over, and the program when we die before. What it writes is read up
to a limit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from configs.lifetime import die_with

# Runs in a bare interpreter: limits itself, then becomes the program.
LAUNCHER = """
import json, os, resource, sys
limits = json.loads(sys.argv[1])
def limit(what, value):
    try:
        resource.setrlimit(what, (value, value))
    except (ValueError, OSError):
        pass
limit(resource.RLIMIT_CPU, max(1, int(limits["timeout_s"]) + 1))
limit(resource.RLIMIT_AS, limits["memory_mb"] << 20)
limit(resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
limit(resource.RLIMIT_NOFILE, 64)
limit(resource.RLIMIT_CORE, 0)
limit(resource.RLIMIT_NPROC, limits["processes"])
os.execv(sys.executable, [sys.executable, "-I", "-S", "program.py"])
"""
OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """timeout_s: wall clock. memory_mb: address space. processes: of this user, where the kernel counts them."""

    timeout_s: float = 2.0
    memory_mb: int = 512
    file_mb: int = 8
    processes: int = 256


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """exit_code: negative for a signal; timed_out: it was killed by our clock."""

    output: str
    exit_code: int
    timed_out: bool = False


def run_program(source: str, text_in: str, limits: Limits) -> ProgramResult:
    """Run Python source with text on standard input. Raises OSError if no process can be made."""
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        (place / "program.py").write_text(source, encoding="utf-8", errors="replace")
        (place / "stdin").write_text(text_in, encoding="utf-8", errors="replace")
        argv = [*isolation(), sys.executable, "-I", "-S", "-c", LAUNCHER, json.dumps(asdict(limits))]
        timed_out = False
        with (place / "stdin").open("rb") as stdin, (place / "stdout").open("wb") as stdout:
            process = subprocess.Popen(
                argv,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder},
                stdin=stdin,
                stdout=stdout,  # a file: RLIMIT_FSIZE bounds it, and no pipe of ours can be held open
                stderr=subprocess.DEVNULL,
                # A process of rewards that takes too long is killed: what it runs is in another group and dies, too.
                preexec_fn=functools.partial(die_with, os.getpid()),  # noqa: PLW1509 - takes no lock
                start_new_session=True,
            )
            try:
                process.wait(limits.timeout_s)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
                process.wait(5.0)
        with (place / "stdout").open("rb") as written:
            output = written.read(OUTPUT_BYTES).decode("utf-8", "replace")
    return ProgramResult(output, process.returncode, timed_out)


@functools.cache
def isolation() -> tuple[str, ...]:
    """The command in front of a program that takes the network away; empty where the kernel does not let us.

    `unshare --net`: a namespace without any interface; `--pid --kill-child`: nothing outlives the program;
    `--map-root-user`: works without privileges where user namespaces are allowed.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    for options in (["--net", "--pid", "--fork", "--kill-child"], ["--net"]):
        argv = [unshare, "--user", "--map-root-user", *options]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if subprocess.run([*argv, "true"], capture_output=True, timeout=10, check=False).returncode == 0:
                return tuple(argv)
    return ()
