"""Starts the trainer's ranks.

Invariant: the ranks of one trainer live and die together, and none outlives the process that started them.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import RunConfig


def run_ranks(config: RunConfig, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module *arguments` on every rank of trainer.layout; returns the exit code (0 if all ranks' is 0).

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment. With one rank the
    module runs in this process (module.main(arguments)). When one rank fails, the others are ended within 10 seconds.
    """
    raise NotImplementedError
