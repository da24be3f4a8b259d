"""worker.py on a pretended GPU: weights, batches and Megatron's own tensors lie on a device that no CPU tensor meets.

python -m tests.trainer_megatron.gpu_worker OUT SPEC. Megatron's kernels and collectives are those of the CPU; what is
held is where each tensor lies, in our code and in Megatron's, and that no other thread than the trainer's uses a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.trainer.on_gpu import GPU, pretend_gpu
from tests.trainer_megatron import worker
from tests.trainer_megatron.settings import run_config
from trainer.launch import run_ranks
from trainer.megatron import compat, parallel, scores


def main(arguments: Sequence[str]) -> int:
    """Run the spec: start the ranks, or be one of them."""
    first = run_config(json.loads(arguments[1])[0]["config"])
    if first.trainer.layout.ranks > 1 and "RANK" not in os.environ:
        return run_ranks(first, "tests.trainer_megatron.gpu_worker", arguments)
    _move_to_gpu()
    with pretend_gpu():
        return worker.main(arguments)


def _move_to_gpu() -> None:
    """What compat puts on the CPU, and what the configuration calls cuda, goes to the pretended device."""
    compat.install()
    from megatron.core.transformer.moe import token_dispatcher  # after compat.install

    def to_cpu(value: Any, as_numpy: bool = False, **_: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.cpu().numpy() if as_numpy else value.cpu()

    changed: Any = torch.Tensor
    changed.cuda = lambda self, *_, **__: self.to(GPU)
    compat._CPU = GPU
    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
    parallel._device = lambda config: GPU
    scores.CHUNK_ELEMENTS[GPU.type] = scores.CHUNK_ELEMENTS["cpu"]
    modules: Any = torch.nn.Module
    modules._apply = _with_marks(modules._apply)


def _with_marks(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Module._apply that keeps Megatron's marks on parameters, as it does from a CPU to a CUDA device."""

    def kept(self: Any, function: Any, recurse: bool = True) -> Any:
        marks = {name: vars(value).copy() for name, value in self._parameters.items() if value is not None}
        apply(self, function, recurse)
        for name, mark in marks.items():
            mark.pop("held", None)
            vars(self._parameters[name]).update(mark)
        return self

    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
