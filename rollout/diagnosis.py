"""Why a server did not start or ended, in one sentence that says what to do.

Invariant: pure; always gives a sentence. `hopeless` is set only for causes that another try cannot mend.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import EngineSection

_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "memoryerror", "cannot allocate memory")
_MODULES = ("sglang", "lagrange_sglang_cpu", "torch")
_IN_USE = ("address already in use", "errno 98", "errno 48")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """message: for the user. hopeless: starting again is pointless. port_taken: another process listens on its port."""

    message: str
    hopeless: bool = False
    port_taken: bool = False


def says_port_taken(line: str) -> bool:
    """Whether a line of a server's output says that it cannot listen, since another process has its port."""
    return any(word in line.lower() for word in _IN_USE)


def diagnose(exit_code: int | None, lines: Sequence[str], engine: EngineSection, port: int) -> Diagnosis:
    """exit_code: of the server, negative for a signal, None if it still ran (too slow, or it failed the probe).

    lines: the end of its log.
    """
    text = "\n".join(lines).lower()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")[:300]
    python, setup = f"engine.python: {engine.python}", "Make it with `make setup`, or set it."
    missing = next((m for m in _MODULES if f"no module named '{m}'" in text or f"no module named {m}" in text), None)
    killed = exit_code == -signal.SIGKILL
    rules = (
        (exit_code == 127, Diagnosis(f"{python} cannot be run. {setup}", True)),
        (missing is not None, Diagnosis(f"{python} has no {missing}. {setup}", True)),
        (says_port_taken(text), Diagnosis(_port_taken(engine, port), port_taken=True)),
        (
            killed or any(word in text for word in _NO_MEMORY),
            Diagnosis(
                f"the engine {'was killed, perhaps for want of memory' if killed else 'ran out of memory'}. "
                "Lower engine.max_total_tokens or engine.memory_fraction."
            ),
        ),
        ("unrecognized arguments" in text, Diagnosis(f"engine.extra_arguments: {last}", True)),
        (
            "cannot find any model weights" in text or "safetensors_rust" in text,
            Diagnosis(f"model.path: its weights are missing or damaged: {last}", True),
        ),
        (exit_code is None, Diagnosis(f"not ready within {engine.start_timeout_s:g} s; last line: {last}")),
    )
    found = next((diagnosis for holds, diagnosis in rules if holds), None)
    return found or Diagnosis(f"the engine ended with code {exit_code}; last line: {last}")


def _port_taken(engine: EngineSection, port: int) -> str:
    if engine.port:
        return f"engine.port: port {port} on {engine.host} is in use. End what listens there, or set 0 for a free one."
    return f"another process took port {port} on {engine.host} before SGLang listened there; it starts again on another"
