"""The one place that talks to Redis: finite timeouts, bounded retries, one clear message when the server is away.

Invariant: a command is sent again only if repeating it changes nothing (every script of broker/lua is written so, or
its lost answer is undone by a lease), and no call takes much longer than twice `timeout_s`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker import sentinel
from broker.commands import Argument, Command, pack
from broker.errors import BrokerError, BrokerUnavailable, NotAllowed
from broker.scripts import digest, script

T = TypeVar("T")
READ_BYTES = 1 << 20  # of one recv: a payload of megabytes in a few system calls
_LATER = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.MasterDownError,
)


# Of Redis 7.0 and of 7.2: there an error inside a script has no class of its own.
_DENIED_IN_A_SCRIPT = ("The user executing the script", "ACL failure in script")
# A primary that was cut off from its replicas, and a server whose disk is full, take no writes.
_NO_WRITES = ("NOREPLICAS", "MISCONF")


class OutOfMemory(BrokerError):
    """Redis is at its memory limit and refused a write; nothing was changed."""


class Connection:
    """A thread-safe client of one server. url: redis[s]://, unix:// or redis[s]+sentinel://, without a password.

    user: None is the server's default user. ca_file: who may have signed the server's certificate; None: the system's.
    """

    def __init__(
        self,
        url: str,
        *,
        password: str | None,
        timeout_s: float,
        user: str | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._user = user
        self._idle: list[redis.Connection] = []  # kept out of the pool, whose checks cost what a small call does
        self._process = os.getpid()
        try:
            self.client = _client(url, user, password, timeout_s, ca_file)
        except ValueError as error:
            raise BrokerUnavailable(f"redis.url {url!r} cannot be used: {error}") from error

    def close(self) -> None:
        """Close all sockets."""
        self._put_back()
        self.client.close()

    def call(self, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> list[Any]:
        """Run the transition `name`; answers are ints, str, None and lists of them."""
        return self.call_after([], name, keys, arguments)[1]

    def call_after(
        self, before: Sequence[Command], name: str, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> tuple[list[Any], list[Any]]:
        """Plain commands, then a transition, in one round trip; the answers of both. An error of any is raised.

        Each is atomic, all together they are not, and all are sent again if the server does not know the script. Errors
        as of `attempt`.
        """
        commands: list[Command] = [*before, ("EVALSHA", digest(name), len(keys), *keys, *arguments)]

        def once() -> list[Any]:
            answers = self._exchange(commands)
            if isinstance(answers[-1], redis.exceptions.NoScriptError):
                self._exchange([("SCRIPT", "LOAD", script(name))])
                answers = self._exchange(commands)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        *found, answer = self.attempt(once)
        return found, cast(list[Any], _text(answer))

    def commands(self, commands: Sequence[Command]) -> list[Any]:
        """Plain commands in one round trip, bytes as they come; an error is raised as of `attempt`."""

        def once() -> list[Any]:
            answers = self._exchange(commands)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        return self.attempt(once)

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Answers in order, an error of the server among them as an exception that is not raised."""
        connection: Any = self._take()
        answers: list[Any] = []
        try:
            connection.send_packed_command(pack(commands))
            for _ in commands:
                try:
                    answers.append(connection.read_response())
                except redis.exceptions.ResponseError as error:
                    answers.append(error)
        except BaseException:
            self._idle.append(connection)
            self._put_back()  # unread answers must not meet another command; and where one broke, others may have
            raise
        self._idle.append(connection)
        return answers

    def _take(self) -> redis.Connection:
        if self._process != os.getpid():  # a fork must not use its parent's sockets
            self._idle, self._process = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self.client.connection_pool.get_connection()

    def _put_back(self) -> None:
        """Disconnect what no thread uses now; the pool connects it again."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took it meanwhile
                connection = self._idle.pop()
                connection.disconnect()
                self.client.connection_pool.release(connection)

    def attempt(self, action: Callable[[], T], *, tries_for_s: float | None = None) -> T:
        """Do `action`, again while the server is away, for `tries_for_s` (default: timeout_s) seconds."""
        end, pause = time.monotonic() + (self.timeout_s if tries_for_s is None else tries_for_s), 0.02
        while True:
            try:
                return action()
            except redis.exceptions.AuthenticationError as error:
                raise BrokerUnavailable(
                    f"Redis at {self.url} refuses the password of user {self._user or 'default'} ({error}). Set "
                    "LAGRANGE_REDIS_PASSWORD, and LAGRANGE_REDIS_USER if the server has users."
                ) from error
            except _LATER as error:
                if time.monotonic() + pause >= end:
                    raise BrokerUnavailable(
                        f"Redis at {self.url} did not answer within {self.timeout_s:g} s ({error}). "
                        "Check that the server runs and that redis.url names it."
                    ) from error
            except redis.exceptions.OutOfMemoryError as error:
                raise OutOfMemory(f"Redis at {self.url} is at its memory limit ({error})") from error
            except redis.exceptions.ResponseError as error:
                if str(error).startswith(_NO_WRITES):
                    if time.monotonic() + pause < end:
                        time.sleep(pause)
                        continue
                    raise BrokerUnavailable(
                        f"Redis at {self.url} takes no writes ({error}). Is its disk full? Make room: all goes on then."
                    ) from error
                if isinstance(error, redis.exceptions.NoPermissionError) or str(error).startswith(_DENIED_IN_A_SCRIPT):
                    raise NotAllowed(
                        f"Redis at {self.url} does not let user {self._user or 'default'} do this ({error}). A process "
                        "signs in as its role (LAGRANGE_REDIS_USER); `lagrange redis-users` says what each may do."
                    ) from error
                if "OOM" in str(error):
                    raise OutOfMemory(f"Redis at {self.url} is at its memory limit ({error})") from error
                raise BrokerError(f"Redis at {self.url} refused a command: {error}") from error
            time.sleep(pause)
            pause = min(2 * pause, 0.5)


def _client(url: str, user: str | None, password: str | None, timeout_s: float, ca_file: Path | None) -> redis.Redis:
    settings: dict[str, Any] = {
        "username": user,
        "password": password,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "socket_read_size": READ_BYTES,
    }
    tls = {"ssl_ca_certs": str(ca_file)} if ca_file is not None and url.startswith("rediss") else {}
    watched = sentinel.parse(url)
    if watched is not None:
        return sentinel.client(watched, timeout_s=timeout_s, tls=tls, **settings)
    return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, **tls, **settings)


def _text(item: Any) -> Any:
    if isinstance(item, bytes):
        return item.decode(errors="replace")
    if isinstance(item, list):
        return [_text(part) for part in item]
    return item
