"""Ports for services that listen later than the port is chosen.

Invariant: a port that `free_port` chooses lies outside the range from which the kernel serves connections and whoever
asks for any port; so in the minute until a service listens there, nobody takes it by chance. Where that range leaves
none, it is any free port.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection
from pathlib import Path
from random import SystemRandom

LOWEST, HIGHEST = 10_000, 65_535
KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_RANGE = (32_768, 65_535)  # Linux's and IANA's together, where the kernel does not tell its own
TRIES = 256


def lasting_ports(low: int, high: int) -> list[int]:
    """The ports that a kernel whose own range is `low` to `high` gives to nobody by chance; all, if there are none."""
    ports = range(LOWEST, HIGHEST + 1)
    return [port for port in ports if not low <= port <= high] or list(ports)


def free_port(host: str = "127.0.0.1", avoid: Collection[int] = (), share: tuple[int, int] = (0, 1)) -> int:
    """A port on which nothing listens now and that is none of `avoid`.

    share: (which, of how many): processes that choose at the same time, each with another `which`, choose different
    ports. Raises OSError if `host` is no address of this machine, or no port was found.
    """
    _bind(host, 0)
    which, of = share
    own = lasting_ports(*_kernels_range())[which % of :: of]
    for port in SystemRandom().sample(own, min(TRIES, len(own))):
        if port not in avoid and port_is_free(host, port):
            return port
    raise OSError(errno.EADDRINUSE, "no free port was found")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        _bind(host, port)
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _kernels_range() -> tuple[int, int]:
    try:
        low, high = KERNELS_RANGE.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return USUAL_RANGE
    return int(low), int(high)
