"""The entry point of `lagrange` and of `python -m services`.

Invariant: Ctrl-C ends a command with code 130 and without a traceback, also in the half second in which it still
imports. So this module imports nothing, and services/commands.py, which holds the commands, only inside `main`.

Exit codes: 0 done; 1 failed, starting again may help; 2 the configuration or the call cannot be used; 3 failed, and
starting again cannot help; 130 stopped by a signal.
"""

from __future__ import annotations

import sys

STOPPED = 130


def main() -> None:
    """Run the command line; does not return."""
    try:
        from services.commands import run_command  # see the module

        run_command()
    except KeyboardInterrupt:
        sys.exit(STOPPED)
