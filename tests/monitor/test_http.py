"""The monitor's endpoints on a real Redis."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker.queue import Broker
from broker.types import EngineRecord, EngineState, Snapshot
from services.monitor import diagnosis
from services.monitor.app import create_app
from services.monitor.metrics import METRICS
from services.monitor.source import Source
from tests.monitor.conftest import Run
from tests.weight_sync.live import config

ENDPOINTS = ["run", "queue", "staleness", "engines", "trainer", "ledger", "diagnosis", "overview"]
ENDPOINTS += ["events", "evaluations", "samples", "dead-letters", "workers", "versions"]


def client_of(source: Source, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(source, **options), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://monitor")


@pytest.fixture
async def http(run: Run) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(Source(run.broker, fresh_s=0.0)) as client:
        yield client


async def test_staleness_shows_what_waits_and_what_was_trained_with_their_lag_and_a_ledger_that_closes(
    http: httpx.AsyncClient,
) -> None:
    answer = (await http.get("/v1/staleness")).json()
    assert answer["ready_groups"] == 20
    assert answer["waiting"]["by_lag"] == [{"lag": 2, "groups": 20, "tokens": 60}]
    trained = answer["trained"]
    assert trained["by_lag"] == [{"lag": 0, "groups": 16, "tokens": 48}, {"lag": 1, "groups": 16, "tokens": 48}]
    assert trained["groups"] == {"count": 32, "min": 0, "mean": 0.5, "p50": 0, "p95": 1, "max": 1}
    assert trained["tokens"]["count"] == 96
    assert answer["groups"]["issued"] == 53
    assert answer["groups"]["generating"] == 1
    assert answer["closes"] is True
    assert answer["time_in_queue"]["oldest_seconds"] >= answer["time_in_queue"]["mean_seconds"] >= 0
    assert {e["engine_id"]: e["publish_lag"] for e in answer["publish_lag"]} == {"engine-0": 2, "engine-1": None}


async def test_every_answer_carries_the_time_and_the_version_of_its_snapshot(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {path for path, methods in paths.items() if path.startswith("/v1/") and "get" in methods} == {
        f"/v1/{name}" for name in [*ENDPOINTS, "stream"]
    }
    for name in ENDPOINTS:
        answer = await http.get(f"/v1/{name}")
        assert answer.status_code == 200, name
        assert answer.json()["version"] == 2
        assert answer.json()["time_ms"] > 1_600_000_000_000


async def test_the_run_the_trainer_and_the_queue_are_shown(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/run")).json()["reward_mean"] == 0.5
    trainer = (await http.get("/v1/trainer")).json()
    assert (trainer["step"], trainer["wait_share"]) == (2, 0.6)
    assert trainer["lease_left_seconds"] > 0
    queue = (await http.get("/v1/queue")).json()
    assert (queue["in_flight_groups"], queue["in_flight_limit"]) == (21, 80)


async def test_the_page_history_has_one_point_a_step(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/overview")).json()["history"]["reward_mean"] == [0.25, 0.5]


async def test_no_answer_shows_a_path_or_an_address(http: httpx.AsyncClient) -> None:
    for path in [*(f"/v1/{name}" for name in ENDPOINTS), "/", "/metrics"]:
        assert "secret" not in (await http.get(path)).text, path


async def test_the_page_is_whole_without_scripts_and_has_nothing_inline_or_from_elsewhere(
    http: httpx.AsyncClient,
) -> None:
    page = await http.get("/")
    assert page.status_code == 200
    for piece in ("test", "2 / 100", "engine-0", "serving", "closes"):
        assert piece in page.text
    assert re.findall(r"<script(?![^>]*src=)|<style| on\w+=|style=", page.text) == []
    assert re.findall(r'(?:src|href)="(?:https?:)?//', page.text) == []
    assert "script-src 'self'" in page.headers["content-security-policy"]
    for file in re.findall(r'(?:src|href)="(static/[^"]+)"', page.text):
        assert (await http.get(f"/{file}")).status_code == 200


async def test_every_tile_has_its_value_without_scripts(run: Run, http: httpx.AsyncClient) -> None:
    now = run.broker.server_time_ms()
    for at, waited in ((now - 10_000, 0), (now, 5)):  # half of ten seconds
        said = f'{{"heartbeat_ms": {at}, "admission_wait_bound_seconds": {waited}}}'
        run.broker._connection.client.hset(run.broker._keys.named("workers"), "worker-0", said)
        await http.get("/")
    page = (await http.get("/")).text
    tiles = dict(re.findall(r"<dt>([^<]+)</dt><dd[^>]*>([^<]*)</dd>", page))
    assert tiles == {
        "Step": "2 / 100",
        "Version": "2",
        "Reward": "0.500",
        "Lag (bound)": "0.00 (4)",
        "Groups ready": "20",
        "In flight": "21 of 80",
        "Trainer waits": "60 %",
        "Workers held": "50 %",
        "Went stale": "–",
        "Workers live": "1",
        "Tokens/s": "12,345",
        "Response": "812",
        "No gradient": "0 %",
        "Clipped": "4 %",
        "SAT gates": "–",
        "|log-ratio|": "0.049",
        "KL (sampler)": "0.00014",
        "ESS": "98 %",
        "Entropy": "0.22",
        "Grad. norm": "0.14",
    }
    lags = re.search(r'<tbody id="lags">(.*?)</tbody>', page, re.S)
    assert lags is not None
    assert re.findall(r"<td>(\d*)</td>", lags[1]) == ["0", "0", "16", "48", "1", "0", "16", "48", "2", "20", "0", "0"]


async def test_a_page_of_a_run_that_stands_still_shows_all_that_was_found(
    run: Run, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "ENOUGH_STEPS", 1)
    run.broker.steer("drain", why="by test")
    page = (await http.get("/")).text
    assert '<p id="headline">the run is draining</p>' in page
    assert "<li>starved: the trainer waits 60 % of its time" in page


async def test_a_page_of_a_run_that_has_just_begun_has_no_empty_tile(run: Run) -> None:
    other = Broker.connect(run.url, "young", timeout_s=3.0)
    other.initialise(config(run.url, Path("/nonexistent")))
    async with client_of(Source(other)) as http:
        page = (await http.get("/")).text
    other.close()
    assert all(value for _, value in re.findall(r"<dt>([^<]+)</dt><dd[^>]*>([^<]*)</dd>", page))


async def test_the_page_escapes_what_engines_say(run: Run, http: httpx.AsyncClient) -> None:
    evil = EngineRecord("engine-2", "http://x", EngineState.QUARANTINED, detail="<script>alert(1)</script>")
    run.broker.register_engine(evil)
    assert "<script>alert" not in (await http.get("/")).text


async def test_prometheus_gets_every_documented_metric_and_no_other(http: httpx.AsyncClient) -> None:
    text = (await http.get("/metrics")).text
    families = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    assert families == {metric.exposed for metric in METRICS}
    assert 'lagrange_groups{state="ready"} 20.0' in text
    assert 'lagrange_trained_lag_tokens{lag="1"} 48.0' in text
    assert 'lagrange_verdict{verdict="healthy"} 1.0' in text
    assert "nan" not in text.lower().replace("nanoseconds", "")


def test_the_table_in_the_documentation_has_every_metric_with_its_kind_and_labels() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{metric.exposed}` | {metric.kind} | {labels} | {metric.text} |" in text, metric.exposed
    documented = set(re.findall(r"^\| `(lagrange_(?!weight_sync_)\w+)`", text, re.M))
    assert documented == {metric.exposed for metric in METRICS}


async def test_without_redis_nothing_is_claimed(run: Run, http: httpx.AsyncClient) -> None:
    assert (await http.get("/readyz")).status_code == 200
    run.broker._connection.client.shutdown(nosave=True)
    for path in ["/readyz", "/v1/staleness", "/metrics", "/"]:
        assert (await http.get(path)).status_code == 503, path
    error = (await http.get("/v1/queue")).json()["error"]
    assert error["reason"] == "unavailable"
    assert "127.0.0.1" not in error["message"]
    assert (await http.get("/healthz")).status_code == 200


async def test_a_run_that_is_not_there_is_not_ready(run: Run) -> None:
    other = Broker.connect(run.url, "other", timeout_s=1.0)
    async with client_of(Source(other)) as http:
        assert (await http.get("/readyz")).status_code == 503
    other.close()


async def test_read_endpoints_can_be_made_to_need_a_token(run: Run) -> None:
    async with client_of(Source(run.broker), read_token="s3cret") as http:
        assert (await http.get("/v1/queue")).status_code == 401
        assert (await http.get("/v1/queue", headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await http.get("/v1/queue", headers={"authorization": "Bearer s3cret"})).status_code == 200
        assert (await http.get("/healthz")).status_code == 200


async def test_many_clients_cost_redis_one_snapshot(run: Run) -> None:
    asked = []

    class Counting:
        def snapshot(self, detail: int = 0, *, names: bool = False) -> Snapshot:
            asked.append(1)
            return run.broker.snapshot(detail, names=names)

        def metrics_history(self, limit: int) -> list[dict[str, Any]]:
            return run.broker.metrics_history(limit)

    async with client_of(Source(Counting(), fresh_s=60.0)) as http:
        for _ in range(50):
            assert (await http.get("/v1/overview")).status_code == 200
    assert len(asked) == 1


async def test_an_unknown_address_and_a_wrong_method_get_an_error_body(http: httpx.AsyncClient) -> None:
    for answer in (await http.get("/v1/nothing"), await http.post("/v1/queue"), await http.get("/static/../main.py")):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"reason", "message"}
