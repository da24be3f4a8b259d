"""What one step did, as numbers: sums over all micro-batches and ranks, then means.

Invariant: a mean is a sum over all active tokens of the step divided by their number, never a mean of means; the same
under every layout. A figure that has no tokens behind it is None, not 0 and not NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.batch import MicroBatch
from trainer.losses.catalogue import LossSettings
from trainer.losses.sat import Gate, measure_gate, one_radius, staleness
from trainer.losses.tokens import Tokens, tokens_of
from trainer.quantile import SumCounts, alone, exact_quantile

SUMS = (
    "loss", "active", "nonfinite", "entropy", "kl", "abs_d", "clipped", "w", "w_squared",
    "gated", "newly_clipped", "radius_low", "radius_high", "lag", "reference_kl",
)  # fmt: skip
BY_LAG = ("tokens", "abs_d", "gated")


def step_statistics(
    batches: Sequence[MicroBatch],
    reports: Sequence[Mapping[str, Tensor]],
    *,
    version: int,
    max_lag: int,
    settings: LossSettings,
    gate: Gate | None,
    sum_over: SumCounts = alone,
) -> tuple[dict[str, Any], Gate | None]:
    """The loss's part of a step's record (docs/losses.md, "Metrics"), and the global gate of this step. Collective.

    reports: what the loss function of trainer.losses.step reported. gate: the one that the step used; None if each
    micro-batch had its own or there is no SAT: then the global one is measured for the record.
    """
    parts = [tokens_of(b, r["log_probs"], r["entropy"]) for b, r in zip(batches, reports, strict=True)]
    lags = [(version - b.versions).clamp(0, max_lag).to(torch.int64) for b in batches]
    totals = torch.zeros(len(SUMS), dtype=torch.float64)
    table = torch.zeros(max_lag + 1, len(BY_LAG), dtype=torch.float64)
    for tokens, report, lag in zip(parts, reports, lags, strict=True):
        totals += _sums(tokens, report, lag)
        gated = report["gated"] if "gated" in report else torch.zeros_like(tokens.active)
        rows = torch.stack([tokens.active.double(), _abs(tokens).double(), (gated & tokens.active).double()], dim=1)
        table.index_add_(0, lag[tokens.active], rows[tokens.active])
    both = sum_over(torch.cat([totals, table.flatten()]))
    total = dict(zip(SUMS, both[: len(SUMS)].tolist(), strict=True))
    table = both[len(SUMS) :].reshape(max_lag + 1, len(BY_LAG))
    distances = [_abs(t)[t.active] for t in parts]
    lag_of = [lag[t.active] for lag, t in zip(lags, parts, strict=True)]
    present = [index for index in range(max_lag + 1) if table[index, 0] > 0]
    record = _means(settings, total) | {
        "log_ratio_abs_max": number(exact_quantile(_join(distances), 1.0, sum_counts=sum_over)),
        "lag_min": min(present, default=None),
        "lag_max": max(present, default=None),
        "by_lag": {},
    }
    for index in present:
        count, abs_d, gated_count = table[index].tolist()
        own = [d[of == index] for d, of in zip(distances, lag_of, strict=True)]
        record["by_lag"][str(index)] = {
            "tokens": int(count),
            "log_ratio_abs": _mean(abs_d, count),
            "gate_rate": _mean(gated_count, count) if settings.entry.sat else None,
            "q": number(exact_quantile(_join(own), settings.sat.alpha, sum_counts=sum_over)),
        }
    if not settings.entry.sat:
        record["sat"] = None
        return record, None
    measured = gate
    if gate is None or settings.sat.scope == "lagged":
        measured = measure_gate(parts, settings.sat, sequence=settings.entry.sequence, sum_counts=sum_over)
    used = gate if gate is not None else measured
    assert used is not None
    kept = _join([r["contraction"][t.active] for r, t in zip(reports, parts, strict=True)])
    record["sat"] = _sat_record(settings, used, total) | {
        "c_min": number(exact_quantile(kept, 0.0, sum_counts=sum_over))
    }
    return record, measured


def _means(settings: LossSettings, total: Mapping[str, float]) -> dict[str, Any]:
    """What any loss did in a step, from the sums over its tokens (SUMS)."""
    n = total["active"]
    return {
        "loss": total["loss"],
        "entropy": _mean(total["entropy"], n),
        "kl_behaviour": _mean(total["kl"], n),
        "kl_reference": _mean(total["reference_kl"], n) if settings.reference_kl else None,
        "log_ratio_abs_mean": _mean(total["abs_d"], n),
        "clip_fraction": _mean(total["clipped"], n),
        "ess": _mean(total["w"] ** 2, total["w_squared"] * n),
        "lag_mean": _mean(total["lag"], n),
        "trained_tokens": int(n),
    }


def _sat_record(settings: LossSettings, used: Gate, total: Mapping[str, float]) -> dict[str, Any]:
    """What SAT did in a step, from the gate that it used and the sums over the step's tokens (SUMS)."""
    n = total["active"]
    plus, minus = one_radius(used, settings.sat, settings.clip_low, settings.clip_high)
    return {
        "q": number(used.quantile),
        "gate_rate": _mean(total["gated"], n),
        "radius_low": _mean(total["radius_low"], n),
        "radius_high": _mean(total["radius_high"], n),
        "d_star_plus": plus,
        "d_star_minus": minus,
        "eps_eff_high": math.expm1(plus),
        "eps_eff_low": -math.expm1(-minus),
        "new_clip_fraction": _mean(total["newly_clipped"], n),
        "nonfinite_fraction": _mean(total["nonfinite"], n + total["nonfinite"]),
        "off": 0 if used.acts else 1,
    }


def number(value: float) -> float | None:
    """None for what JSON cannot say."""
    return value if math.isfinite(value) else None


def _mean(total: float, count: float) -> float | None:
    return number(total / count) if count else None


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0)


def _abs(tokens: Tokens) -> Tensor:
    return staleness(tokens, sequence=False).abs()


def _sums(tokens: Tokens, report: Mapping[str, Tensor], lag: Tensor) -> Tensor:
    """float64 [len(SUMS)] of one micro-batch."""
    active = tokens.active
    d = staleness(tokens, sequence=False)[active].double()
    w = d.exp()
    zero = torch.zeros((), dtype=torch.float64)

    def over(name: str) -> Tensor:
        return report[name][active].double().sum() if name in report else zero

    return torch.stack(
        [
            report["loss"].double(),
            active.sum().double(),
            tokens.nonfinite.double(),
            tokens.entropy[active].double().sum(),
            (w - 1 - d).sum(),  # k3, an estimate of KL(mu || pi) that is never negative
            d.abs().sum(),
            over("clipped"),
            w.sum(),
            (w * w).sum(),
            over("gated"),
            over("newly_clipped"),
            over("radius_low"),
            over("radius_high"),
            lag[active].double().sum(),
            over("reference_kl"),
        ]
    )
