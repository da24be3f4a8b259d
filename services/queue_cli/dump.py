"""A group in a file: its payload as it was stored, and what is needed to compute it again elsewhere.

Invariant: a dump says which format, run and settings it has; reading checks the payload's own checksum. Never pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from broker import wire
from broker.types import Group
from configs import ConfigError, RunConfig
from configs.load import validated

FORMAT = "lagrange-group-1"


class Dump(msgspec.Struct, frozen=True):
    """payload: wire format. version: the trainer's when it trained the group, else when it was dumped. config: of the
    run, as a tree of plain data."""

    format: str
    run: str
    group_id: int
    version: int
    config: dict[str, Any]
    payload: bytes


def write_dump(path: Path, config: RunConfig, version: int, group_id: int, payload: bytes) -> None:
    """Write one group. Raises ConfigError if the file cannot be written."""
    tree = config.model_dump(mode="json")
    try:
        path.write_bytes(msgspec.msgpack.encode(Dump(FORMAT, config.run.id, group_id, version, tree, payload)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). Name a file in a writable folder.") from error


def read_dump(path: Path) -> tuple[Dump, Group, RunConfig]:
    """Read what write_dump wrote. Raises ConfigError; CorruptPayload or SchemaMismatch for a damaged payload."""
    try:
        dump = msgspec.msgpack.decode(path.read_bytes(), type=Dump)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). `lagrange groups dump` writes one.") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no dump of a group ({error}). `lagrange groups dump` writes one.") from error
    if dump.format != FORMAT:
        raise ConfigError(f"{path} has format {dump.format!r}, this program reads {FORMAT!r}. Use its release.")
    return dump, wire.decode(dump.payload, dump.run, dump.group_id), validated(dump.config, str(path))
