"""Lets megatron-core 0.19.2 run on a machine without a GPU, Transformer Engine, apex or triton.

Invariant: on a machine with a GPU `install` changes nothing; without one, every change is made once, here, by
`install`, and before megatron is imported. (`results_stay_in_this_process` is for both.) The modules of this package
that import megatron at their top (`attention`, `export`, `checkpoint_io`, `model`, `schedule`, `weights`) must be
imported after `install`; `parallel.parallel` calls it first.

Each entry below names the place in megatron-core 0.19.2 that needs it. torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import queue
import sys
import types
import warnings
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "tensor",
    "zeros",
    "zeros_like",
)


def install() -> None:
    """Prepare this process for megatron-core; without effect where there is a GPU, and when called again."""
    installed: Any = torch.cuda.current_device
    if torch.cuda.is_available() or installed is _current_device:
        return
    from torch import _dynamo  # noqa: F401 - torch.optim imports it on first use; it must see torch unpatched

    _stand_in_modules()
    _cuda_namespace()
    _tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one warning for each optional package that is absent
        _megatron()


def results_stay_in_this_process() -> None:
    """Before a checkpoint is written, on any device: what its writer has to say goes through a plain queue.

    Megatron starts a Manager process for it, which takes seconds (filesystem_async.py:get_write_results_queue).
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _current_device() -> torch.device:
    return _CPU


class _Stream:
    """A CUDA stream where there is none: work is in order anyway (token_dispatcher.py:469)."""

    device = _CPU

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, _: object) -> None: ...
    def wait_event(self, _: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: object) -> _Event:
        return _Event()


class _Event:
    """A CUDA event where there is none."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


def _stand_in_modules() -> None:
    """Two submodules are replaced before megatron's packages import them.

    paged_stash: `import triton` without a guard (transformer/moe/ops/paged_stash.py:4), reached from the schedules; its
    kernels are never called without CUDA graphs. jit: `jit_fuser` is torch.compile (core/jit.py), which costs seconds
    of compilation for functions that gain nothing on a CPU.
    """

    class Missing(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)

            def missing(*_: object, **__: object) -> None:
                raise RuntimeError(f"{self.__name__}.{name} needs triton, which this machine lacks")

            return missing

    if importlib.util.find_spec("triton") is None:
        name = "megatron.core.transformer.moe.ops.paged_stash"
        sys.modules.setdefault(name, Missing(name))
    jit = types.ModuleType("megatron.core.jit")

    def unchanged(function: Any) -> Any:
        return function

    jit.__dict__.update(
        jit_fuser=unchanged, noop_decorator=unchanged, enable_jit_fuser=lambda: None, disable_jit_fuser=lambda: None
    )
    sys.modules.setdefault("megatron.core.jit", jit)


def _cuda_namespace() -> None:
    """torch.cuda answers for the CPU: current_device() names the device of new tensors in some thirty places."""
    cuda: Any = torch.cuda
    stream = _Stream()
    generator = torch.Generator()  # stands for the device's generator (tensor_parallel/random.py:303)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    def nothing(*_: object, **__: object) -> None: ...

    cuda.current_device = _current_device
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.synchronize = cuda.empty_cache = cuda.set_device = nothing
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing
    cuda.manual_seed = cuda.manual_seed_all = manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: generator.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: generator.set_state(state) and None


def _tensors() -> None:
    """Factories called with device="cuda" (clip_grads.py:108, optimizer.py:315, schedules.py:749), .cuda() and .type().

    Tensor.type(): optimizers sort parameters by 'torch.cuda.FloatTensor' and the like (distrib_optimizer.py:401).
    """

    def on_cpu(factory: Any) -> Any:
        @functools.wraps(factory)
        def made(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return made

    namespace: Any = torch
    for name in _FACTORIES:
        setattr(namespace, name, on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    plain_type = tensor.type

    def cuda_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    tensor.type = cuda_type
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda *_: None


def _megatron() -> None:
    """What has to be changed inside megatron itself."""
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    from megatron.core.tensor_parallel import mappings

    # The tracker's fork() reads the device's generator by ways that need a device (random.py:303-306).
    rng._get_cuda_rng_state = lambda *_, **__: torch.cuda.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.cuda.set_rng_state(state)

    # Split sizes become numpy only when they come from a GPU; gloo's all_to_all then gets tensors (moe_utils.py:1184).
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )

    # gloo exchanges equal parts alone, and experts that are cut over ranks get unequal ones (mappings.py:154, :205).
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_unequal(value: Any, group: Any, sizes: list[int] | None = None, *more: Any, **named: Any) -> Any:
        if sizes is None or group.size() == 1 or len(set(sizes)) == 1:
            return gather(value, group, sizes, *more, **named)
        padded = value.new_zeros(max(sizes), *value.shape[1:])
        padded[: value.shape[0]] = value
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_unequal(value: Any, group: Any, sizes: list[int] | None = None, *more: Any, **named: Any) -> Any:
        if sizes is None or group.size() == 1 or len(set(sizes)) == 1:
            return scatter(value, group, sizes, *more, **named)
        total = value.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(list(sizes))[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_unequal
    mappings._reduce_scatter_along_first_dim = scatter_unequal
