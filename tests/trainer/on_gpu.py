"""A GPU for tests without one: tensors that say they are on another device, and refuse what CUDA would refuse.

`OnGpu` holds its values in CPU memory. Under `pretend_gpu` every operation is looked at: one that mixes it with a CPU
tensor raises as CUDA would, a factory that names the device makes one, `.to("cpu")` and `.cpu()` give a plain tensor.
The device has a name of its own, "pretended": a PyTorch without CUDA has neither streams nor autograd for "cuda".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_ATEN = torch.ops.aten
_MOVES = {_ATEN._to_copy.default, _ATEN.copy_.default}
_INDEXES = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
"""CUDA takes indexes in CPU memory as well."""


# Now, as this is imported: autograd counts the devices at the first backward pass of a process.
_setup_privateuseone_for_python_backend("pretended")
GPU = torch.device("pretended", 0)


class OnGpu(Tensor):
    """A tensor on the pretended GPU. held: its values, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=GPU,
        )
        made.held = held
        return made

    @property
    def data(self) -> Tensor:
        """As of any tensor; what is set is held, too."""
        plain: Any = Tensor.data
        value: Tensor = plain.__get__(self)
        return value

    @data.setter
    def data(self, other: Tensor) -> None:
        plain: Any = Tensor.data
        plain.__set__(self, other)
        self.held = _held(other)

    def type(self) -> str:  # type: ignore[override]
        """As CUDA's tensors say it: Megatron's optimizers sort parameters by it."""
        return f"torch.cuda.{str(self.held.type()).rpartition('.')[2]}"

    def tolist(self) -> Any:
        """Of a subclass torch's own refuses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


class _Gpu(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    on_gpu = [value for value in inputs if isinstance(value, OnGpu)]
    strangers = [value for value in inputs if not isinstance(value, OnGpu) and value.dim()]
    if on_gpu and strangers and func not in _MOVES | _INDEXES:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found pretended:0 and cpu")
    wanted = kwargs.get("device")
    stays = bool(on_gpu) if wanted is None else torch.device(wanted).type != "cpu"
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if func is _ATEN.copy_.default:
        return args[0]
    # What was changed in place is still itself.
    known = {id(value.held): value for value in on_gpu}
    return tree_map(lambda value: _placed(value, known), result) if stays else result


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def _placed(value: Any, known: dict[int, OnGpu]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return known[id(value)] if id(value) in known else OnGpu(value)


@contextmanager
def pretend_gpu() -> Iterator[torch.device]:
    """Within it tensors can be made on, and moved to, the device that is yielded."""
    plain = torch.tensor

    def tensor(data: Any, *, device: Any = "cpu", **options: Any) -> Tensor:
        # Torch's own reads numbers and moves its result behind the back of a dispatch mode.
        made = plain(tree_map(lambda value: value.item() if isinstance(value, OnGpu) else value, data), **options)
        return made.to(GPU) if torch.device(device).type != "cpu" else made

    with patch.object(torch, "tensor", tensor), _Gpu():  # type: ignore[no-untyped-call]
        yield GPU
