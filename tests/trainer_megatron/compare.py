"""How two sets of tensors differ."""

from __future__ import annotations

import torch
from torch import Tensor

Named = dict[str, Tensor]


def part(tensors: Named, prefix: str) -> Named:
    """The tensors whose names begin with `prefix`; there must be some."""
    found = {name: value for name, value in tensors.items() if name.startswith(prefix)}
    assert found, f"nothing begins with {prefix}"
    return found


def largest(got: Named, want: Named) -> float:
    """Largest absolute difference over all of `want`; names must be equal."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())[:8]
    return max(float((got[name] - value).abs().max()) if value.numel() else 0.0 for name, value in want.items())


def relative(got: Named, want: Named) -> float:
    """Largest difference of a tensor relative to its own largest entry."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())[:8]
    return max(
        float((got[name] - value).abs().max() / value.abs().max().clamp_min(1e-12))
        for name, value in want.items()
        if value.numel()
    )


def different(got: Named, want: Named) -> list[str]:
    """Names whose tensors are not equal bit for bit."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())[:8]
    return [name for name in want if not torch.equal(got[name], want[name])]


def weights(tensors: Named) -> Named:
    """The model's weights among a step's results."""
    return {name: value for name, value in tensors.items() if name.startswith(("model.", "lm_head."))}


def distance(got: Named, want: Named) -> float:
    """Norm of the difference over the norm of `want`, over the whole model."""
    assert got.keys() == want.keys()
    error = sum(float((got[name] - want[name]).double().square().sum()) for name in want)
    size = sum(float(want[name].double().square().sum()) for name in want)
    return float((error / size) ** 0.5)
