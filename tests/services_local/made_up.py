"""A made-up run for the report and the terminal view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from broker.types import NEWEST, EngineRecord, EngineState, LagCount, Snapshot, Tally
from configs import load_config

LOCAL = Path(__file__).parents[2] / "configs" / "local.yaml"
CONFIG = load_config(LOCAL, {"lag.max": 4, "run.id": "r"})


def record(step: int, clipped: float = 0.01) -> dict[str, object]:
    lags = {
        "0": {"tokens": 300, "groups": 10, "log_ratio_abs": 0.01, "gate_rate": 0.05},
        "2": {"tokens": 100, "groups": 6, "log_ratio_abs": 0.09, "gate_rate": 0.25},
    }
    return {
        "step": step, "version": step, "time_s": 0.5 * step, "reward_mean": step / 20, "by_lag": lags, "wait_s": 0.2,
        "step_s": 0.5, "tokens_per_s": 800.0, "queue_wait_ms_mean": 300.0, "lag_min": 0, "lag_mean": 0.5, "lag_max": 2,
        "sat": {"new_clip_fraction": clipped},
    }  # fmt: skip


def snapshot(**changes: object) -> Snapshot:
    base = Snapshot(
        time_ms=1, run="r", status="finished", max_lag=4, groups_per_step=16, publish_interval=1, version=10,
        published=10, highest_version=10, step=10, durable_step=10, steps_total=10, epoch=1, admission_paused=False,
        groups=Tally(issued=180, generating=3, ready=10, trained=160, filtered=5, stale=1, failed=1),
        tokens=Tally(issued=4500, ready=400, trained=4000, filtered=60, stale=40), payload_bytes=0,
        trained_by_lag={0: LagCount(100, 3000), 2: LagCount(60, 1000)},
        engines=(EngineRecord("engine-0", "http://127.0.0.1:30000", EngineState.SERVING, 10),), metrics=record(10),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


RAISED = "ValueError: invalid literal for int() with base 10: '[seven]'"
WITHOUT: dict[str, dict[str, object]] = {
    "w0": {"samples_rewarded": 400, "reward_failures": 100, f"reward_failures{NEWEST}": RAISED}
}


REWARDED = {"w0": {"samples_rewarded": 400}}
