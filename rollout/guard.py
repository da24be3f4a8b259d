"""`python guard.py PROGRAM ARGUMENTS < PIPE`: runs PROGRAM, and kills its whole process group when PIPE closes.

Invariant: nothing that PROGRAM started outlives whoever holds the other end of PIPE, however that one dies. SGLang's
processes ask the kernel to die with their parent, but only once they have imported everything: killed while it starts,
a server would leave them behind, with gigabytes of memory. Uses the standard library alone and imports nothing of ours.
It must lead a process group; it ends as PROGRAM does: with the same code, or by the same signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127


def main(program: list[str]) -> None:
    """Run `program`; does not return. Ends with 127 if it cannot be executed."""
    prctl = ctypes.CDLL(None).prctl  # loaded here: between fork and exec is no place to load a library
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed
        if os.getppid() != guard:
            os.kill(os.getpid(), signal.SIGKILL)
        _execute(program)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the server, which gets it as well: same group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_until_the_pipe_closes, daemon=True).start()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _execute(program: list[str]) -> None:
    with open(os.devnull) as nothing:  # noqa: PTH123 (no further import between fork and exec)
        os.dup2(nothing.fileno(), 0)
    try:
        os.execv(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
    os._exit(CANNOT_RUN)


def _until_the_pipe_closes() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
