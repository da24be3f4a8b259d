"""Both services against their own OpenAPI documents: whatever is sent, no 500 and no answer that is not documented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from broker.queue import Broker
from tests.monitor.conftest import Run
from tests.monitor.live import TOKEN, Service, monitor_of, service
from tests.weight_sync.live import config, redis_server

schemathesis = pytest.importorskip("schemathesis", reason="pip install -r requirements/dev.txt")
requests = pytest.importorskip("requests", reason="pip install -r requirements/dev.txt")

pytestmark = pytest.mark.timeout(600)
ENDLESS = ("/v1/stream",)


def probe(at: Service, examples: int) -> int:
    """Send valid and invalid requests to every operation; how many answers were checked."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as conforms

    checks = [
        not_a_server_error,
        conforms.status_code_conformance,
        conforms.content_type_conformance,
        conforms.response_schema_conformance,
    ]
    modes = schemathesis.GenerationMode
    schema = schemathesis.openapi.from_url(f"{at.url}/openapi.json", wait_for_schema=30)
    checked = 0
    with requests.Session() as session:
        session.headers["authorization"] = f"Bearer {TOKEN}"
        session.trust_env = False
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path in ENDLESS:
                continue
            for mode in (modes.POSITIVE, modes.NEGATIVE):
                if mode is modes.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
                    continue

                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(
                    max_examples=examples,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                )
                def try_all(case: Any) -> None:
                    nonlocal checked
                    case.call_and_validate(session=session, checks=checks, timeout=30)
                    checked += 1

                try_all()
    return checked


@pytest.fixture
def monitor(run: Run, tmp_path: Path) -> Iterator[Service]:
    with monitor_of(run, tmp_path, LAGRANGE_API_PROTECT_READS="1") as made:
        yield made


@pytest.fixture
def weight_sync(tmp_path: Path) -> Iterator[Service]:
    """Of a run that has published nothing: an order to load is answered at once."""
    with redis_server(tmp_path) as (url, _server):
        broker = Broker.connect(url, "test", timeout_s=1.0)
        broker.initialise(config(url, tmp_path))
        broker.close()
        with service("weight-sync", url, tmp_path) as made:
            yield made


@pytest.mark.slow
def test_the_monitor_answers_as_documented(monitor: Service) -> None:
    assert probe(monitor, examples=2) > 40


@pytest.mark.slow
def test_weight_sync_answers_as_documented(weight_sync: Service) -> None:
    assert probe(weight_sync, examples=2) > 5


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_both_answer_as_documented_for_long(monitor: Service, weight_sync: Service) -> None:
    assert probe(monitor, examples=1000) > 10_000
    assert probe(weight_sync, examples=1000) > 2000
