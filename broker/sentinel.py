"""Addresses of a server that Redis Sentinel watches: whom to ask for the primary, and its name.

Invariant: a client made here asks the sentinels again at each new connection, so it follows a failover by itself. The
sentinels are asked without a password; the server gets the one of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.sentinel import Sentinel

SCHEME, SCHEME_TLS = "redis+sentinel", "rediss+sentinel"  # with TLS: to the sentinels as to the server
PORT = 26379
FORM = f"{SCHEME}://host:port,host:port/service/database"


@dataclass(frozen=True, slots=True)
class Watched:
    """sentinels: (host, port) of each. service: the name under which they watch the primary."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    database: int = 0
    tls: bool = False


def parse(url: str) -> Watched | None:
    """What a redis+sentinel:// address names; None for another scheme. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in (SCHEME, SCHEME_TLS):
        return None
    if "@" in parts.netloc:
        raise ValueError("it holds a password; set LAGRANGE_REDIS_PASSWORD instead")
    service, _, database = parts.path.strip("/").partition("/")
    hosts = [host.rpartition(":") if ":" in host else (host, ":", str(PORT)) for host in parts.netloc.split(",")]
    if not service or not all(name and port.isdigit() for name, _, port in hosts) or not (database or "0").isdigit():
        raise ValueError(f"expected {FORM}")
    return Watched(
        tuple((name, int(port)) for name, _, port in hosts), service, int(database or 0), parts.scheme == SCHEME_TLS
    )


def client(watched: Watched, *, timeout_s: float, tls: Mapping[str, str], **settings: Any) -> redis.Redis:
    """A client of the primary. tls, settings: of its connections, as redis.Redis takes them."""
    limits: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    if watched.tls:
        limits |= {"ssl": True, **tls}
    sentinels: Any = Sentinel(watched.sentinels, sentinel_kwargs=limits)
    made: redis.Redis = sentinels.master_for(watched.service, db=watched.database, **limits, **settings)
    return made
