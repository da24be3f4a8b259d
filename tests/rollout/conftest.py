"""A fake engine that serves version 0 of a run in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.queue import Broker
from tests.broker.helpers import Run
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import serving, tiny_folder


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version="0")


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with engine.serve() as address:
        yield address


@pytest.fixture
def run(broker: Broker, url: str) -> Run:
    run = Run(broker).start()
    broker.remove_engine("engine-1")
    serving(broker, url, 0)
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path)
