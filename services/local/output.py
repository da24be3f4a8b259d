"""Where `lagrange up` writes what people read: a terminal, a file, or a pipe, any of which may go away.

Invariant: no run ends with a traceback, or without its report, because nobody reads it. A reader that is gone for good
(`| head -1`, a terminal that was closed) is a request to stop, but for a terminal of a process that is to ignore
hang-ups; a line that a full disk refuses is left out.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import IO, TextIO, cast

from rich.console import Console

GONE = (errno.EPIPE, errno.EIO)


def console_of(gone: Callable[[], object]) -> Console:
    """A console on standard output, which may have been closed before we began. gone: see Output."""
    return Console(file=None if sys.stdout is None else cast(IO[str], Output(sys.stdout, gone)))


class Output:
    """A text stream for rich.Console. gone: called, once, when the reader is."""

    def __init__(self, stream: TextIO, gone: Callable[[], object]) -> None:
        self._stream, self._gone = stream, gone
        self._was_terminal = False

    @property
    def encoding(self) -> str:
        """Of the stream."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Whether it is a terminal. One that was closed is none any more, and who asks may then write nothing: so it is
        found out here, too."""
        terminal = self._stream.isatty()
        if self._was_terminal and not terminal:
            self._lose(errno.EIO)
        self._was_terminal = terminal
        return terminal

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write what can be written; raises nothing for the rest."""
        return self._tried(lambda: self._stream.write(text))

    def flush(self) -> None:
        """As `write`."""
        self._tried(self._stream.flush)

    def _tried(self, step: Callable[[], int | None]) -> int:
        try:
            return step() or 0
        except OSError as error:
            if error.errno in GONE:
                self._lose(error.errno)
            return 0

    def _lose(self, number: int) -> None:
        """The reader is gone; number: GONE's, which says how."""
        self._silence()
        self._was_terminal = False
        if number == errno.EPIPE or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._gone()

    def _silence(self) -> None:
        """What is still in the stream's buffer goes nowhere, also when the interpreter ends."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)
