"""What a server leaves in shared memory and among temporary files: SGLang, ended by SIGKILL, removes neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout import guard
from rollout.command import Launch
from rollout.process import ServerProcess
from tests.rollout.helpers import until

MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not MEMORY.is_dir(), reason="no /dev/shm here")

MAP_THEM = """
import mmap, os, signal, sys, time
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = []
for path in sys.argv[1].split(","):
    aside = path + ".aside"
    os.link(path, aside)  # as the C library makes a semaphore: mapped under a name that goes
    with open(aside, "r+b") as file:
        held.append(mmap.mmap(file.fileno(), 16))
    os.unlink(aside)
if "child" in sys.argv and os.fork():
    held.clear()
os.write(1, b"%d\\n" % os.getpid())  # at once: the guard writes there, too, and print may write a line in two parts
time.sleep(600)
"""
GUARD = """
import os, sys, rollout.guard as guard
look = guard.mapped
def told(group):
    found = look(group)
    if len(found) == 3:
        os.write(1, b"seen\\n")
    return found
guard.LOOK_S, guard.mapped = 0.02, told
guard.main(sys.argv[1:])
"""


class Files:
    """Files in shared memory. own: a server's, which it maps; others: not to be touched, though it may map them."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:12]
        self.own = [MEMORY / f"{name}{mark}" for name in ("sglang_loads_", "sem.mp-", "sgl_shm_mq_1_")]
        self.weights = MEMORY / f"model-{mark}.safetensors"
        self.strange = [MEMORY / f"sglang_loads_other{mark}.shm", MEMORY / f"sem.mp-other{mark}"]
        for path in (*self.own, self.weights, *self.strange):
            path.write_bytes(b"0" * 16)

    @property
    def mapped(self) -> str:
        return ",".join(map(str, (*self.own, self.weights)))

    def left(self) -> list[str]:
        """Names of a server's files that are there; fails if another file is gone."""
        assert all(path.exists() for path in (self.weights, *self.strange))
        return [path.name for path in self.own if path.exists()]


@pytest.fixture
def files() -> Iterator[Files]:
    found = Files()
    yield found
    for path in (*found.own, found.weights, *found.strange):
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("how", ["", "ignore", "child"])
async def test_a_server_that_is_stopped_leaves_nothing_of_its_own_in_shared_memory(
    tmp_path: Path, files: Files, how: str
) -> None:
    command = Launch((sys.executable, "-c", MAP_THEM, files.mapped, how), dict(os.environ))
    server = await ServerProcess.start(command, tmp_path / "log", None)
    await until(lambda: bool(server.lines))
    assert len(files.left()) == 3
    await server.stop()
    assert files.left() == []


@pytest.mark.parametrize("end", ["killed", "supervisor gone"])
def test_a_server_that_ends_in_another_way_leaves_nothing_either(files: Files, end: str) -> None:
    command = [sys.executable, "-c", GUARD, sys.executable, "-c", MAP_THEM, files.mapped]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as guard:
        assert guard.stdin is not None
        assert guard.stdout is not None
        try:
            said: list[str] = []
            while len(set(said)) < 2 or said.count("seen") < 2:  # twice: what the first look saw is noted by then
                said.append(guard.stdout.readline().strip())
            if end == "killed":
                os.kill(next(int(line) for line in said if line != "seen"), signal.SIGKILL)
            else:
                guard.stdin.close()
            assert guard.wait(timeout=10) == -signal.SIGKILL
        finally:
            guard.kill()
    assert files.left() == []


@pytest.mark.parametrize("end", ["stopped", "killed", "supervisor gone"])
def test_a_server_leaves_no_temporary_files_but_its_caches(end: str) -> None:
    make = "import os, tempfile, time; open(tempfile.mkstemp()[1]); os.makedirs(os.environ['TORCHINDUCTOR_CACHE_DIR']);"
    make += "print(os.getpid(), flush=True); time.sleep(600)"
    # PyTorch sets it for a process that compiled something, as this one may have.
    clean = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as shared,  # a short name
        subprocess.Popen(
            [sys.executable, "-IS", guard.__file__, sys.executable, "-c", make],
            env=clean | {"TMPDIR": shared},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            server = int(process.stdout.readline())
            assert len(list(Path(shared).glob("sglang-*/*"))) == 1
            if end == "stopped":
                process.terminate()
            elif end == "killed":
                os.kill(server, signal.SIGKILL)
            else:
                process.stdin.close()
            assert process.wait(timeout=10) < 0
        finally:
            process.kill()
        assert [path.name for path in Path(shared).iterdir()] == [f"torchinductor_{os.getuid()}"]
