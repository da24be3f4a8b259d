"""A run on the session's server."""

from __future__ import annotations

import pytest

from broker.queue import Broker
from tests.broker.helpers import Run


@pytest.fixture
def run(broker: Broker) -> Run:
    """Its trainer has attached and published version 0, and one engine serves it."""
    return Run(broker).start()
