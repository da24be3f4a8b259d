"""A rank's part of a distributed optimizer as named tensors, and back.

Invariant: optimizers that are given what others of the same layout held go on bit for bit. That takes the parameters as
the optimizer holds them (float32), the state of each, and the number of steps: torch's AdamW counts them by parameter,
the fused ones of Transformer Engine and apex in their groups, where forgetting it would undo the bias correction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def optimizer_part(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """What `optimizers` hold, by name: the tensors themselves. Names follow the order, which a layout fixes."""
    out: dict[str, Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        for j, parameter in enumerate(_parameters(optimizer)):
            out[f"optimizer/{i}/{j}/parameter"] = parameter
            out |= {f"optimizer/{i}/{j}/{name}": value for name, value in optimizer.state[parameter].items()}
        for j, group in enumerate(optimizer.param_groups):
            if "step" in group:
                out[f"optimizer/{i}/group/{j}/step"] = torch.as_tensor(group["step"])
    return out


def restore_optimizer_part(optimizers: Sequence[Optimizer], own: Mapping[str, Tensor]) -> None:
    """Give `optimizers` what `optimizer_part` found in others."""
    with torch.no_grad():
        for i, optimizer in enumerate(optimizers):
            for j, parameter in enumerate(_parameters(optimizer)):
                prefix = f"optimizer/{i}/{j}/"
                state = {k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)}
                parameter.copy_(state.pop("parameter"))
                optimizer.state[parameter] = {
                    name: value.to(parameter.device if value.dim() else "cpu") for name, value in state.items()
                }
            for j, group in enumerate(optimizer.param_groups):
                steps = own.get(f"optimizer/{i}/group/{j}/step")
                if steps is not None:
                    group["step"] = int(steps)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
