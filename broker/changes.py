"""Being woken when there is a version, a change of an engine or a batch, instead of asking again and again.

Invariant: a message is a hint and never the truth. It may be lost (Redis restarts, a slow listener), so whoever is
woken looks at the registry, and looks from time to time without having been woken. Nothing is delivered after `close`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from broker.connection import Connection

WAIT_S = 0.5
RECONNECT_S = 0.5


class Changes:
    """A daemon thread that calls `heard` with each message of a channel; `heard` must be quick and thread-safe.

    Messages of "changes": "version N", "engine ID STATE VERSION", "staged ID VERSION"; of "batches": "ready N"; and
    "listening" once it hears (again), because something may have been missed before.
    """

    def __init__(self, connection: Connection, channel: str, heard: Callable[[str], None]) -> None:
        self._connection, self._channel, self._heard = connection, channel, heard
        self._closed = threading.Event()
        threading.Thread(target=self._listen, daemon=True, name="changes").start()

    def close(self) -> None:
        """Hear nothing more; the thread ends within about WAIT_S."""
        self._closed.set()

    def _listen(self) -> None:
        while not self._closed.is_set():
            # Not only redis' errors: a client that is closed meanwhile takes the socket away under the reader.
            with contextlib.suppress(Exception):
                self._listen_once()
            self._closed.wait(RECONNECT_S)

    def _listen_once(self) -> None:
        client: Any = self._connection.client  # redis-py leaves pubsub untyped
        with client.pubsub(ignore_subscribe_messages=True) as channel:
            channel.subscribe(self._channel)
            self._tell("listening")
            while not self._closed.is_set():
                message = channel.get_message(timeout=WAIT_S)
                if message is not None:
                    self._tell(bytes(message["data"]).decode())

    def _tell(self, message: str) -> None:
        if not self._closed.is_set():
            with contextlib.suppress(RuntimeError):  # the listener's event loop is closed: nobody waits any more
                self._heard(message)
