"""The whole protocol against the model: any order of commands, crashes of every process between any two of them.

After each command: Redis and the model agree on ledger, histograms, prompts and versions; the ledger closes; nothing
was trained beyond the bound; in the history that survives no group and no prompt is trained twice, and none is lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test

from broker.server import EmbeddedServer
from tests.broker.machine import REACHED
from tests.broker.schedules import on, schedules


@pytest.mark.slow
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1000, marks=pytest.mark.timeout(900)),
        pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_any_schedule_of_commands_and_crashes_keeps_the_guarantees(
    redis_server: EmbeddedServer, tmp_path: Path, count: int
) -> None:
    with on(redis_server, tmp_path) as machine:
        run_state_machine_as_test(machine, settings=schedules(count))
        missed = {name: machine.reached[name] for name in REACHED if machine.reached[name] < count / 500}
        assert not missed, f"the schedules do not get to {missed}"
