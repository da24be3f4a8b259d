"""Debian's Prometheus scrapes a monitor that runs, by HTTP and with its token."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from services.monitor.metrics import METRICS
from tests.monitor.conftest import Run, record
from tests.monitor.live import TOKEN, monitor_of
from tests.weight_sync.live import free_port, wait_for


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_prometheus_scrapes_the_monitor_and_has_every_metric_that_has_a_value(run: Run, tmp_path: Path) -> None:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no Prometheus: apt-get install prometheus")
    run.broker.evaluated(record(1), "aime24", 30.0)
    with monitor_of(run, tmp_path, LAGRANGE_API_PROTECT_READS="1") as monitor:
        scrape = {
            "job_name": "monitor",
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "authorization": {"credentials": TOKEN},
            "static_configs": [{"targets": [f"127.0.0.1:{monitor.port}"]}],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
        base = f"http://127.0.0.1:{free_port()}"
        command = [binary, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([*command, f"--web.listen-address={base.removeprefix('http://')}"], **quiet) as process:

            def ask(expression: str) -> list[dict[str, Any]]:
                try:
                    answer = httpx.get(f"{base}/api/v1/query", params={"query": expression}, timeout=5, trust_env=False)
                    found: list[dict[str, Any]] = answer.json()["data"]["result"]
                    return found
                except (httpx.HTTPError, json.JSONDecodeError, KeyError):
                    return []

            try:
                wait_for(lambda: ask('up{job="monitor"} == 1'), 90)
                names = {series["metric"]["__name__"] for series in ask('{__name__=~"lagrange_.*"}')}
            finally:
                process.terminate()
                process.wait(30)
    # Of the last minute, in which nothing was trained.
    unknown_yet = {f"lagrange_{name}_share" for name in ("admission_blocked", "engine_wait", "stale_token")}
    assert {metric.exposed for metric in METRICS} - names <= unknown_yet
