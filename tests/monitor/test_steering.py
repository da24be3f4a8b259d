"""Steering a real run over HTTP: what is done, what is refused, and that all of it is in the event log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from broker.types import Refused, Ticket
from services.http import MAX_BODY_BYTES
from services.monitor.app import create_app
from services.monitor.source import Source
from tests.monitor.conftest import Run

TOKEN = "s3cret"
COMMANDS = [("PATCH", "/v1/lag")] + [
    ("POST", f"/v1/{name}") for name in ("pause", "resume", "drain", "checkpoint", "evaluate", "dead-letters/1/requeue")
]


def client_of(run: Run, token: str | None = TOKEN, **options: Any) -> httpx.AsyncClient:
    app = create_app(Source(run.broker, fresh_s=0.0), steer=run.broker, token=token, **options)
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://monitor", headers=headers
    )


@pytest.fixture
async def http(run: Run) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(run) as client:
        yield client


async def reason(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["reason"])


async def newest(http: httpx.AsyncClient) -> dict[str, str]:
    found: dict[str, str] = (await http.get("/v1/events", params={"limit": 1})).json()["events"][0]
    return found


async def test_a_lower_bound_holds_from_the_next_admission_and_pull_and_is_in_the_event_log(
    run: Run, http: httpx.AsyncClient
) -> None:
    order = {"max_lag": 1, "by": "ada", "reason": "loss spikes"}
    answer = await http.patch("/v1/lag", json=order)
    assert (answer.status_code, answer.json()["detail"]) == (200, "max_lag 4 -> 1")
    event = await newest(http)
    assert (event["kind"], event["text"]) == ("steer", "lag: max_lag 4 -> 1 (by ada: loss spikes)")
    refused = run.broker.admit("worker-0", "engine-0")
    assert isinstance(refused, Refused)
    assert refused.reason == "bound"
    run.broker.pull(run.epoch, run.version, 16)
    after = (await http.get("/v1/staleness")).json()
    assert (after["groups"]["stale"], after["ready_groups"], after["closes"]) == (20, 0, True)


async def test_a_higher_bound_admits_more(run: Run, http: httpx.AsyncClient) -> None:
    assert (await http.patch("/v1/lag", json={"max_lag": 9})).status_code == 200
    assert (await http.get("/v1/queue")).json()["in_flight_limit"] == 160


async def test_a_bound_below_what_the_publish_interval_needs_is_refused_and_logged(
    run: Run, http: httpx.AsyncClient
) -> None:
    run.broker._connection.client.hset(run.broker._keys.policy, "publish_interval", 4)
    answer = await http.patch("/v1/lag", json={"max_lag": 2})
    assert (answer.status_code, await reason(answer)) == (409, "interval")
    assert (await newest(http))["kind"] == "steer-refused"
    assert (await http.get("/v1/run")).json()["max_lag"] == 4


async def test_a_bound_that_somebody_else_changed_meanwhile_is_not_overwritten(http: httpx.AsyncClient) -> None:
    assert (await http.patch("/v1/lag", json={"max_lag": 6, "expected": 4})).status_code == 200
    answer = await http.patch("/v1/lag", json={"max_lag": 2, "expected": 4})
    assert (answer.status_code, await reason(answer)) == (409, "changed")


async def test_a_pause_stops_admission_and_resume_lets_it_go_on(run: Run, http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/pause")).status_code == 200
    refused = run.broker.admit("worker-0", "engine-0")
    assert isinstance(refused, Refused)
    assert refused.reason == "paused"
    assert (await http.get("/v1/queue")).json()["admission_paused"] is True
    assert (await http.post("/v1/resume")).status_code == 200
    assert isinstance(run.broker.admit("worker-0", "engine-0"), Ticket)


async def test_a_drain_trains_what_is_in_flight_survives_a_restarted_trainer_and_ends_with_resume(
    run: Run, http: httpx.AsyncClient
) -> None:
    assert (await http.post("/v1/drain")).status_code == 200
    seen = (await http.get("/v1/run")).json()
    assert (seen["status"], seen["drained"]) == ("draining", False)
    run.step()
    assert (await http.get("/v1/run")).json()["drained"] is True
    run.broker.attach_trainer(checkpoint_step=3, checkpoint_version=3)
    assert (await http.get("/v1/run")).json()["status"] == "draining"
    assert (await http.post("/v1/resume")).status_code == 200
    assert (await http.get("/v1/run")).json()["status"] == "running"


async def test_a_checkpoint_is_asked_for_until_the_commit_of_that_step(run: Run, http: httpx.AsyncClient) -> None:
    assert run.broker.checkpoint_asked() == -1
    assert (await http.post("/v1/checkpoint")).status_code == 200
    assert run.broker.checkpoint_asked() == 2
    assert (await http.get("/v1/run")).json()["checkpoint_asked"] is True
    run.broker.commit(run.epoch, 1)
    assert run.broker.checkpoint_asked() == 2
    run.broker.commit(run.epoch, 2)
    assert run.broker.checkpoint_asked() == -1
    assert (await newest(http))["kind"] == "checkpoint"
    again = await http.post("/v1/checkpoint")
    assert (again.status_code, await reason(again)) == (409, "nothing-new")


async def test_a_checkpoint_without_a_living_trainer_is_refused(run: Run, http: httpx.AsyncClient) -> None:
    run.broker._connection.client.hset(run.broker._keys.policy, "trainer_deadline", 1)
    answer = await http.post("/v1/checkpoint")
    assert (answer.status_code, await reason(answer)) == (409, "no-trainer")


async def test_an_evaluation_needs_a_living_evaluator_and_is_asked_for_until_it_begins(
    run: Run, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/evaluate")
    assert (answer.status_code, await reason(answer)) == (409, "no-evaluator")
    assert run.broker.evaluator(30.0) is False
    assert (await http.post("/v1/evaluate")).status_code == 200
    assert run.broker.evaluator(30.0) is True
    assert run.broker.evaluator(30.0, begins=True) is True
    assert run.broker.evaluator(30.0) is False


async def test_a_run_that_is_over_takes_no_command(run: Run, http: httpx.AsyncClient) -> None:
    run.broker.set_status("finished")
    for method, path in COMMANDS[:-1]:
        answer = await http.request(method, path, json={"max_lag": 3} if method == "PATCH" else {})
        assert (answer.status_code, await reason(answer)) == (409, "ended"), path


async def test_what_is_done_and_what_is_refused_tells_time_and_version_of_that_instant(
    run: Run, http: httpx.AsyncClient
) -> None:
    ticket = run.broker.admit("worker-0", "engine-0")
    assert isinstance(ticket, Ticket)
    run.broker.fail(ticket.group_id, "worker-0", "no reward", tokens=3, final=True)
    before, sent = run.broker.server_time_ms(), []
    requeue = f"/v1/dead-letters/{ticket.prompt_index}/requeue"
    for method, path in [*COMMANDS[:-1], ("POST", requeue), ("POST", requeue)]:
        sent.append(await http.request(method, path, json={"max_lag": 3} if method == "PATCH" else {}))
    assert [answer.status_code for answer in sent] == [200, 200, 200, 200, 200, 409, 200, 404]
    for answer in sent:
        assert before <= answer.json()["time_ms"] <= run.broker.server_time_ms()
        assert answer.json()["version"] == run.version


async def test_a_dead_letter_is_shown_and_issued_again(run: Run, http: httpx.AsyncClient) -> None:
    ticket = run.broker.admit("worker-0", "engine-0")
    assert isinstance(ticket, Ticket)
    run.broker.fail(ticket.group_id, "worker-0", "no reward", tokens=3, final=True)
    letters = (await http.get("/v1/dead-letters")).json()
    assert letters["total"] == 1
    assert letters["dead_letters"][0]["reason"] == "no reward"
    path = f"/v1/dead-letters/{letters['dead_letters'][0]['prompt_index']}/requeue"
    assert (await http.post(path, json={"by": "ada", "reason": "the judge is mended"})).status_code == 200
    assert (await newest(http))["text"].endswith(" (by ada: the judge is mended)")
    assert (await http.post(path)).status_code == 404
    assert (await http.get("/v1/dead-letters")).json()["total"] == 0


@pytest.mark.parametrize(("method", "path"), COMMANDS)
async def test_every_command_needs_the_token(run: Run, http: httpx.AsyncClient, method: str, path: str) -> None:
    body = {"max_lag": 3} if method == "PATCH" else {}
    for sent in ({"authorization": "Bearer wrong"}, {"authorization": ""}, {"authorization": f"Basic {TOKEN}"}):
        answer = await http.request(method, path, json=body, headers=sent)
        assert answer.status_code == 401, path
    assert all(e["kind"] not in ("steer", "steer-refused") for e in (await http.get("/v1/events")).json()["events"])


async def test_a_monitor_without_a_token_steers_nothing_unless_told_that_something_else_decides(run: Run) -> None:
    async with client_of(run, token=None) as http:
        answer = await http.post("/v1/pause")
        assert (answer.status_code, await reason(answer)) == (403, "no-token")
    async with client_of(run, token=None, open_to_all=True) as http:
        assert (await http.post("/v1/pause")).status_code == 200


@pytest.mark.parametrize(
    "body", [{}, {"max_lag": -1}, {"max_lag": 5000}, {"max_lag": 1, "more": 2}, {"max_lag": 1, "by": "a\nb"}]
)
async def test_an_order_that_is_not_one_is_refused_with_the_field(
    http: httpx.AsyncClient, body: dict[str, object]
) -> None:
    answer = await http.patch("/v1/lag", json=body)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith("body.")


async def test_a_body_that_is_not_called_json_is_told_what_to_send(http: httpx.AsyncClient) -> None:
    for kind in ({}, {"content-type": "application/x-www-form-urlencoded"}):  # the latter: curl -d
        answer = await http.patch("/v1/lag", content=b'{"max_lag": 1}', headers=kind)
        assert answer.status_code == 422
        assert answer.json()["error"]["message"] == "body: send JSON, and say so: Content-Type: application/json."
    answer = await http.patch("/v1/lag", json=[1])
    assert "Content-Type" not in answer.json()["error"]["message"]


async def test_another_sites_page_cannot_steer(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/pause", headers={"sec-fetch-site": "cross-site"})
    assert (answer.status_code, await reason(answer)) == (403, "cross-site")


async def test_a_body_that_is_no_text_is_refused_as_documented(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/pause", content=b"\xff\xfe:F", headers={"content-type": "application/json"})
    assert (answer.status_code, await reason(answer)) == (422, "invalid")


async def test_a_body_above_the_limit_is_refused_before_it_is_read(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/pause", content=b"x" * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, await reason(answer)) == (413, "too-large")
