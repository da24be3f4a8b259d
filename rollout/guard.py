"""`python guard.py PROGRAM ARGUMENTS < PIPE`: runs PROGRAM, and kills its whole process group when PIPE closes.

Invariant: nothing that PROGRAM started outlives whoever holds the other end of PIPE, however that one dies. SGLang's
processes ask the kernel to die with their parent, but only once they have imported everything: killed while it starts,
a server would leave them behind, with gigabytes of memory. Nor do its files in shared memory outlive it: SGLang ends
its own processes by SIGKILL, so that none of them removes its files, and over many restarts the memory would fill. A
file is removed only if a process of the group was seen to have it mapped, its name is one of NAMES, and the server has
ended or is about to be killed. For the same reason its temporary files, five a start, lie in a folder of its own, which
goes with it. Uses the standard library alone and imports nothing of ours.
It must lead a process group; SIGTERM it hands on to the group, and it ends as PROGRAM does: with the same code, or by
the same signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127
LOOK_S = 10.0  # between two looks at what is mapped: a server that has ended by itself can no longer be asked
SHARED_MEMORY = "/dev/shm/"
# SGLang's slots for its load, its queues between ranks and its arguments, and multiprocessing's semaphores: each server
# gives them names of its own. Whatever else it has mapped there may be somebody's, weights for example.
NAMES = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_", "sem.mp-")
LONGEST = 70  # bytes of a temporary folder's name: that of a socket in it has 107 at most, and SGLang's are there


def main(program: list[str]) -> None:
    """Run `program`; does not return. Ends with 127 if it cannot be executed."""
    scratch = own_temporary_folder()
    prctl = ctypes.CDLL(None).prctl  # loaded here: between fork and exec is no place to load a library
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed
        if os.getppid() != guard:
            os.kill(os.getpid(), signal.SIGKILL)
        _execute(program)
    files: set[str] = set()

    def hand_on(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        files.update(mapped(os.getpgrp()))
        os.killpg(0, number)

    signal.signal(signal.SIGTERM, hand_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_until_the_pipe_closes, args=(files, scratch), daemon=True).start()
    _, status = os.waitpid(child, 0)
    remove(files, scratch)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def mapped(group: int) -> set[str]:
    """The files of NAMES in shared memory that processes of a process group have mapped."""
    numbers: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_text().splitlines()
                numbers.update(int(line.split()[4]) for line in lines if SHARED_MEMORY in line)
    # By inode: a semaphore is mapped under a name that is gone, before it gets its own by a link.
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        return {entry.path for entry in entries if entry.name.startswith(NAMES) and entry.inode() in numbers}
    return set()


def own_temporary_folder() -> str:
    """Make one, for us and all that we start, and name it; "" if there is no room, or its name would be too long."""
    with contextlib.suppress(OSError):
        shared = tempfile.gettempdir()
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_{os.getuid()}")  # a cache stays
        if len(shared) <= LONGEST:
            os.environ["TMPDIR"] = folder = tempfile.mkdtemp(prefix="sglang-")
            return folder
    return ""


def remove(files: set[str], scratch: str) -> None:
    """Take names away, and the folder `scratch` if there is one; whoever has such a file mapped keeps it."""
    for path in list(files):
        with contextlib.suppress(OSError):
            Path(path).unlink()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _execute(program: list[str]) -> None:
    with open(os.devnull) as nothing:  # noqa: PTH123 (no further import between fork and exec)
        os.dup2(nothing.fileno(), 0)
    try:
        os.execv(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
    os._exit(CANNOT_RUN)


def _until_the_pipe_closes(files: set[str], scratch: str) -> None:
    """Look every LOOK_S seconds at what the group has mapped, into `files`; kill it when the pipe closes."""
    closed = False
    while not closed:
        files.update(mapped(os.getpgrp()))
        closed = bool(select.select([0], [], [], LOOK_S)[0]) and not os.read(0, 1)
    files.update(mapped(os.getpgrp()))
    remove(files, scratch)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
