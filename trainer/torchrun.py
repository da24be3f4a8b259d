"""torchrun as a process of ours: `python -m trainer.launch trainer.torchrun ARGUMENTS...`.

Invariant: it ends with the exit code of the rank that failed first, which says whether starting again can help
(trainer/main.py), or as ranks do that stopped on request; torchrun's own code is 1 whatever its ranks say.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.launch import STOPPED, outcome


def main(arguments: Sequence[str]) -> int:
    """torchrun with these arguments, to its end."""
    from torch.distributed.elastic.multiprocessing.api import SignalException  # imports torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    try:
        run(list(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return outcome([failure.exitcode]) or 1
    except SignalException:  # SIGTERM or SIGINT; its ranks have ended by it, or by themselves
        return STOPPED
    return 0
