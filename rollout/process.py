"""One SGLang server as a child process: its log, its end, and that nothing of it is left behind.

Invariant: the server and all its processes are in one process group of their own; `stop` returns with the group gone
within STOP_S and a second, and the group is killed when this process dies in any way; either way its files in shared
memory go too (rollout/guard.py). The API key is in no line that is written down: SGLang prints its arguments, key
included, at start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from pathlib import Path

from rollout.command import Launch
from rollout.diagnosis import says_port_taken

STOP_S = 1.5
KEPT_LINES = 60
LOG_BYTES = 64 << 20  # then the log becomes <name>.1 and a new one begins


class ServerProcess:
    """A running server; make it with `start`. lines: the end of its output. port_taken: it said that it cannot listen;
    SGLang may live on after that, and do nothing."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: tuple[asyncio.StreamReader, asyncio.ReadTransport],
        log: Path,
        secret: str | None,
    ) -> None:
        self._process, self._log, self._secret = process, log, secret
        self._stream, self._output = output
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.port_taken = asyncio.Event()
        self._pump = asyncio.create_task(self._forward())

    @classmethod
    async def start(cls, launch: Launch, log: Path, secret: str | None) -> ServerProcess:
        """Start it; output goes to `log`, without `secret`. Raises OSError if no process can be made."""
        log.parent.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()  # of our own: asyncio's stays open as long as anybody holds the other end
        output = await _reader(read)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-IS",
                str(Path(__file__).with_name("guard.py")),
                *launch.argv,
                env=launch.environment,
                stdin=asyncio.subprocess.PIPE,  # never written to; it closes when this process ends
                stdout=write,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError:
            output[1].close()
            raise
        finally:
            os.close(write)
        return cls(process, output, log, secret)

    @property
    def pid(self) -> int:
        """Process id of the guard, which is also the id of the group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end; its exit code."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._pump), 0.5)
        return code

    async def stop(self) -> None:
        """End the server and all its processes: SIGTERM, and after STOP_S seconds the guard kills them."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()  # the guard hands it on to the group
            await self._ended_within(STOP_S)
        if self._process.stdin is not None:
            self._process.stdin.close()  # which has the guard kill the group
        await self._ended_within(0.5)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what the first process left behind, or a guard that hangs
        await self._ended_within(0.5)
        self._pump.cancel()
        self._output.close()
        await asyncio.sleep(0)  # the pipes close in the loop's next round, which may be its last

    async def _ended_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)

    async def _forward(self) -> None:
        while True:
            try:
                raw = await self._stream.readline()
            except ValueError:  # a line beyond the limit: asyncio has dropped it
                continue
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip("\n")
            if self._secret:
                line = line.replace(self._secret, "***")
            self.lines.append(line)
            if says_port_taken(line):
                self.port_taken.set()
            with contextlib.suppress(OSError):  # a full disk must not end the engine
                self._write(line)

    def _write(self, line: str) -> None:
        if self._log.exists() and self._log.stat().st_size > LOG_BYTES:
            self._log.replace(self._log.with_name(f"{self._log.name}.1"))
        with self._log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Read a pipe; close the transport."""
    stream = asyncio.StreamReader(limit=1 << 20)
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    return stream, transport
