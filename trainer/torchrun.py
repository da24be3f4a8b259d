"""torchrun as a process of ours: `python -m trainer.launch trainer.torchrun ARGUMENTS...`.

Invariant: it ends with the exit code of the rank that failed first, which says whether starting again can help
(trainer/main.py); torchrun's own code is 1 whatever its ranks say.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.launch import outcome


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
    except SignalException as error:  # its ranks have ended by the signal, or by themselves
        return 128 + int(error.sigval)
    return 0
