"""What is said when a server does not start."""

from __future__ import annotations

import pytest

from configs.schema import EngineSection
from rollout.diagnosis import diagnose


@pytest.mark.parametrize(
    ("code", "lines", "says", "hopeless"),
    [
        (127, [], "engine.python", True),
        (1, ["ModuleNotFoundError: No module named 'sglang'"], "has no sglang", True),
        (1, ["x.py: No module named lagrange_sglang_cpu"], "has no lagrange_sglang_cpu", True),
        (1, ["[Errno 98] error while attempting to bind: address already in use"], "starts again on another", False),
        (1, ["RuntimeError: Not enough memory. Please try to increase"], "engine.memory_fraction", False),
        (-9, ["fine"], "memory", False),
        (2, ["launch_server.py: error: unrecognized arguments: --foo"], "--foo", True),
        (1, ["RuntimeError: Cannot find any model weights with `/m`"], "model.path", True),
        (None, ["still loading"], "still loading", False),
        (3, ["the last words", ""], "the last words", False),
        (3, [], "printed nothing", False),
    ],
)
def test_the_cause_is_named_with_what_to_do(code: int | None, lines: list[str], says: str, hopeless: bool) -> None:
    found = diagnose(code, lines, EngineSection(), 30000)
    assert says in found.message
    assert found.hopeless is hopeless


def test_a_port_that_was_asked_for_and_is_taken_is_for_the_user_to_change() -> None:
    found = diagnose(None, ["[Errno 98] Address already in use", "idle"], EngineSection(port=30000), 30000)
    assert found.port_taken
    assert found.message.startswith("engine.port: port 30000 on 127.0.0.1 is in use. End what listens there")
