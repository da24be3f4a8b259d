"""The figures at the top of the page, as words. Pure.

Invariant: the page as it is served and as its script keeps it show the same words, for both take them from here.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.types import Snapshot
from services.monitor.figures import capacity, in_flight, number

UNKNOWN = "–"
LABELS = {
    "step": "Step",
    "version": "Version",
    "reward": "Reward",
    "lag": "Lag (bound)",
    "queue": "Groups ready",
    "flying": "In flight",
    "wait": "Trainer waits",
    "blocked": "Workers held",
    "stale": "Went stale",
    "workers": "Workers live",
    "pace": "Tokens/s",
    "length": "Response",
    "equal": "No gradient",
    "clipped": "Clipped",
    "gated": "SAT gates",
    "ratio": "|log-ratio|",
    "kl": "KL (sampler)",
    "ess": "ESS",
    "entropy": "Entropy",
    "gradient": "Grad. norm",
}
"""Name of a tile -> what stands above it: first how the run goes, then what the last step did to the policy."""


def tiles(s: Snapshot, figures: Mapping[str, float | None]) -> dict[str, str]:
    """Name of each tile -> its figure. figures: of the diagnosis (diagnosis.figures_of); shares lie between 0 and 1."""
    return {
        "step": f"{s.step} / {s.steps_total}",
        "version": str(s.version) if s.version >= 0 else "none",
        "reward": _decimal(number(s.metrics, "reward_mean"), 3),
        "lag": f"{_decimal(number(s.metrics, 'lag_mean'), 2)} ({s.max_lag})",
        "queue": str(s.groups.ready),
        "flying": f"{in_flight(s)} of {capacity(s)}",
        "wait": share(figures["trainer_wait_share"]),
        "blocked": share(figures["admission_blocked_share"]),
        "stale": share(figures["stale_share"]),
        "workers": _decimal(figures["workers"], 0),
        "pace": _decimal(number(s.metrics, "tokens_per_s"), 0),
        "length": _decimal(number(s.metrics, "response_length_mean"), 0),
        "equal": share(figures["filtered_share"]),
        "clipped": share(number(s.metrics, "clip_fraction")),
        "gated": share(number(s.metrics, "gate_rate")),
        "ratio": _digits(number(s.metrics, "log_ratio_abs_mean")),
        "kl": _digits(number(s.metrics, "kl_behaviour")),
        "ess": share(number(s.metrics, "ess")),
        "entropy": _digits(number(s.metrics, "entropy")),
        "gradient": _digits(number(s.metrics, "grad_norm")),
    }


def share(value: float | None) -> str:
    """In per cent, or UNKNOWN."""
    return UNKNOWN if value is None else f"{value:.0%}".replace("%", " %")


def _decimal(value: float | None, places: int) -> str:
    return UNKNOWN if value is None else f"{value:,.{places}f}"


def _digits(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2g}"
