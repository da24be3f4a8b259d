"""`python die_with_parent.py PARENT_PID PROGRAM ARGUMENTS`: becomes PROGRAM, and dies with its parent.

Invariant: uses the standard library alone and imports nothing of ours; there is no instant at which the parent can die
unnoticed. PR_SET_PDEATHSIG survives exec, so the program itself needs to know nothing of it. SGLang's own processes ask
the kernel for the same, so killing the first one ends them all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to PARENT_PID and become the program; exits with 127 if it cannot be executed."""
    parent, program = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execv(program[0], program)
    except OSError as error:
        sys.stderr.write(f"{program[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
