"""Commands as bytes on the socket, with large payloads sent from where they lie.

Invariant: `pack` writes exactly what the RESP protocol asks for; no buffer of LARGE bytes or more is copied on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import hiredis

LARGE = 16 * 1024
Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded group in pieces that follow each other. size: bytes of all. checksum: 16 hex digits."""

    parts: tuple[Buffer, ...]
    size: int
    checksum: str

    def joined(self) -> bytes:
        """All of it in one piece (a copy)."""
        return b"".join(self.parts)


Argument = str | int | float | bytes | Payload
Command = tuple[Argument, ...]


def pack(commands: Sequence[Command]) -> list[Buffer]:
    """The commands as chunks to send one after the other."""
    chunks: list[Buffer] = []
    small: list[Buffer] = []

    def put(part: Buffer) -> None:
        if len(part) < LARGE:
            small.append(part)
            return
        flush()
        chunks.append(part)

    def flush() -> None:
        if small:
            chunks.append(b"".join(small))
            small.clear()

    for command in commands:
        if Payload not in map(type, command):
            put(hiredis.pack_command(command))  # type: ignore[arg-type]  # its stub names one item
            continue
        put(b"*%d\r\n" % len(command))
        for argument in command:
            if isinstance(argument, Payload):
                put(b"$%d\r\n" % argument.size)
                for part in argument.parts:
                    put(part)
                put(b"\r\n")
            else:
                text = argument if isinstance(argument, bytes) else str(argument).encode()
                put(b"$%d\r\n%b\r\n" % (len(text), text))
    flush()
    return chunks
