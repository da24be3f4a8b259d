"""A run in the terminal, asked from a monitor over HTTP: what `lagrange status` and `lagrange watch` show of a URL.

Invariant: what is on the screen is one answer of GET /v1/overview, which is one snapshot; the token is sent to the
address that was named and nowhere else (no redirect is followed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx

from services.local.live import (
    RELEASED,
    REWARD_POINTS,
    EngineView,
    LiveView,
    ProcessFacts,
    condensed,
    lag_of,
    ledger_words,
    remaining_s,
    shown_status,
    start_from,
)
from services.monitor.figures import number, unrewarded, wait_share

TIMEOUT_S = 5.0
WHERE = "Name the address that `lagrange up` or `lagrange status runs/<id>` calls the monitor's."


class CannotWatch(Exception):
    """The monitor does not show the run; the message is meant for the user."""


def ask(url: str, token: str | None) -> Callable[[], Mapping[str, Any]]:
    """A function that asks the monitor at `url` for its overview. The function raises CannotWatch."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    address = f"{url.rstrip('/')}/v1/overview"

    def overview() -> Mapping[str, Any]:
        try:
            answer = httpx.get(address, headers=headers, timeout=TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CannotWatch(f"{url} does not answer ({type(error).__name__}). {WHERE}") from error
        if answer.status_code == 401:
            raise CannotWatch(f"{url} needs a token. Set LAGRANGE_API_TOKEN.")
        try:
            found = answer.json()
            if answer.status_code == 200 and {"progress", "staleness", "fleet", "trainer"} <= set(found):
                return dict(found)
            why = found["error"]["message"]
        except (ValueError, KeyError, TypeError) as error:
            raise CannotWatch(f"{url} answered {answer.status_code}, but not as a monitor does. {WHERE}") from error
        raise CannotWatch(f"{url}: {why}")

    return overview


def view_of_overview(o: Mapping[str, Any], url: str, hint: str) -> LiveView:
    """What the terminal shows of an answer of GET /v1/overview.

    A trainer that attaches makes a version of its own: until its first step the last record is of one before, and is
    left out as live.since does.
    """
    progress, staleness, metrics = o["progress"], o["staleness"], dict(o["trainer"]["metrics"])
    status, steps, reward = progress["status"], progress["step"], progress["reward_mean"]
    before = status == "starting" or metrics.get("version", o["version"]) != o["version"]
    if before and status in ("starting", "running"):
        metrics, steps, reward = {}, progress["durable_step"], None
        if not any(engine["routable"] for engine in o["fleet"]["engines"]) or status == "starting":
            status = start_from(steps)
    groups = staleness["groups"]
    rewards = [float(r) for r in o["history"]["reward_mean"] if r is not None]
    seconds = [float(s) for s in o["history"]["step_s"] if s is not None]
    total = progress["steps_total"]
    return LiveView(
        run=o["run"],
        status=shown_status(status, progress["admission_paused"]),
        step=steps,
        steps_total=total,
        version=o["version"],
        reward=reward,
        rewards=tuple(condensed(rewards, REWARD_POINTS)),
        lag=lag_of(metrics),
        max_lag=progress["max_lag"],
        ready=groups["ready"],
        generating=groups["generating"],
        limit=staleness["in_flight_limit"],
        trainer_wait=wait_share([metrics]),
        tokens_per_s=number(metrics, "tokens_per_s"),
        engines=tuple(
            EngineView.of(e["engine_id"], e["state"], e["version"], e["detail"]) for e in o["fleet"]["engines"]
        ),
        closes=staleness["closes"],
        ledger=ledger_words(groups, staleness.get(RELEASED, 0)),
        eta_s=remaining_s(seconds, total - steps) if metrics and not progress["admission_paused"] else None,
        facts=ProcessFacts(number(metrics, "time_s"), url, news=o["diagnosis"]["headline"], hint=hint),
        dead_letters=staleness["dead_letters"],
        unrewarded=unrewarded(o["fleet"]["workers"]),
    )
