"""Fixtures of the weight-sync tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weight_sync.live import World, world


@pytest.fixture
def w(tmp_path: Path) -> Iterator[World]:
    """Redis, a run, no engine yet."""
    with world(tmp_path) as made:
        yield made
