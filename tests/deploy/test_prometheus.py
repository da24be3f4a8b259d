"""Prometheus: configuration, rules, alerts; Grafana: dashboards; all against the metrics that the services give."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.types import EngineRecord, EngineState, LagCount, Snapshot, Tally
from services.monitor import metrics
from services.monitor.diagnosis import diagnose
from services.weight_sync.lifecycle import Life
from services.weight_sync.member import Member
from services.weight_sync.metrics import render as render_weight_sync
from services.weight_sync.reconciler import Reconciler, Settings
from tests.deploy.tools import DEPLOY, ROOT, run, system_program

DASHBOARDS = tuple(sorted((DEPLOY / "grafana/dashboards").glob("*.json")))
RULES = tuple(sorted((DEPLOY / "prometheus/rules").glob("*.yml")))


def rules() -> list[dict[str, Any]]:
    """All rules, recording and alerting."""
    trees = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in RULES]
    return [rule for tree in trees for group in tree["groups"] for rule in group["rules"]]


def panels() -> list[tuple[str, dict[str, Any]]]:
    """(dashboard, panel)."""
    return [(f.stem, p) for f in DASHBOARDS for p in json.loads(f.read_text(encoding="utf-8"))["panels"]]


def an_engine() -> EngineRecord:
    return EngineRecord("engine-0", "http://e:30000", EngineState.SERVING, version=7, checksum="c")


def a_snapshot() -> Snapshot:
    """A run with something of everything, so that each metric has a series."""
    groups = Tally(issued=30, generating=4, ready=4, leased=2, trained=14, durable=10, filtered=2, stale=2, failed=2)
    return Snapshot(
        time_ms=int(time.time() * 1000),
        run="r",
        status="running",
        max_lag=4,
        groups_per_step=2,
        publish_interval=1,
        version=8,
        published=8,
        highest_version=8,
        step=8,
        durable_step=5,
        steps_total=100,
        epoch=1,
        admission_paused=False,
        groups=groups,
        tokens=Tally(issued=300, ready=100, leased=50, trained=120, filtered=10, stale=20),
        payload_bytes=12345,
        ready_by_version={7: LagCount(4, 100)},
        trained_by_lag={0: LagCount(4, 40), 1: LagCount(10, 80)},
        oldest_ready_ms=900,
        mean_ready_ms=400.0,
        mean_trained_wait_ms=300.0,
        engines=(an_engine(),),
        workers={"worker-0@h-1": {"heartbeat_ms": time.time() * 1000, "admission_wait_bound_seconds": 5.0}},
        counters={"refused_memory": 3.0, "trainer_lease_left_ms": 50000.0, "admission_wait_bound_seconds": 5.0},
        metrics={"reward_mean": 0.4, "step_s": 1.0, "wait_s": 0.2},
        dead_letters=1,
    )


def monitor_text() -> bytes:
    """What the monitor answers for `a_snapshot`, with an earlier one a minute ago."""
    now = a_snapshot()
    before = replace(
        now,
        time_ms=now.time_ms - 60000,
        tokens=replace(now.tokens, trained=100, stale=10),
        workers={"worker-0@h-1": {"heartbeat_ms": now.time_ms - 60000}},
    )
    steps = [{**now.metrics, "step": step, "version": step} for step in (8, 7)]  # the first waited for the engines
    return metrics.render(now, diagnose(now, before, steps))


def weight_sync_text() -> bytes:
    """What weight-sync answers with one engine."""
    reconciler = Reconciler.__new__(Reconciler)
    Reconciler.__init__(reconciler, None, None, Settings())  # type: ignore[arg-type]
    reconciler.members["engine-0"] = Member(an_engine(), None, Life(EngineState.SERVING, 7))  # type: ignore[arg-type]
    return render_weight_sync(reconciler)


def names_in(text: bytes) -> set[str]:
    return set(re.findall(r"^(lagrange_\w+)[{ ]", text.decode(), flags=re.MULTILINE))


def names_used(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"\b(lagrange[_:][\w:]+)", bare))


def test_rules_and_configuration_pass_promtool() -> None:
    run(system_program("promtool"), "check", "config", "prometheus.yml", cwd=DEPLOY / "prometheus")


def test_the_tests_of_the_rules_pass() -> None:
    for file in sorted((DEPLOY / "prometheus/tests").glob("*.yml")):
        run(system_program("promtool"), "test", "rules", file)


def test_every_alert_is_tested_firing_and_silent() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    (file,) = (DEPLOY / "prometheus/tests").glob("*.yml")
    fires: set[str] = set()
    silent: set[str] = set()
    for test in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]:
        for case in test["alert_rule_test"]:
            (fires if case["exp_alerts"] else silent).add(case["alertname"])
    assert alerts == fires == silent


def test_every_alert_has_a_severity_and_a_runbook_that_exists() -> None:
    text = (ROOT / "docs/deploy/alerts.md").read_text(encoding="utf-8")
    sections = {f"docs/deploy/alerts.md#{h.lower()}" for h in re.findall(r"^## (\w+)", text, flags=re.MULTILINE)}
    used = set()
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["annotations"]["summary"]
            used.add(rule["annotations"]["runbook"])
    assert used == sections


def test_every_metric_that_a_rule_or_a_panel_reads_is_one_that_a_service_gives() -> None:
    given = names_in(monitor_text()) | names_in(weight_sync_text())
    given |= {rule["record"] for rule in rules() if "record" in rule}
    used = {name for rule in rules() for name in names_used(rule["expr"])}
    used |= {name for _, panel in panels() for target in panel["targets"] for name in names_used(target["expr"])}
    scaler = yaml.safe_load((DEPLOY / "kubernetes/components/autoscale/rollout.yaml").read_text(encoding="utf-8"))
    used |= names_used(scaler["spec"]["triggers"][0]["metadata"]["query"])
    assert used - given == set()


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda f: f.stem)
def test_a_dashboard_is_one_that_grafana_can_load(file: Path) -> None:
    board = json.loads(file.read_text(encoding="utf-8"))
    assert board["uid"] == file.stem
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert {t["refId"] for t in panel["targets"]} == {chr(65 + i) for i in range(len(panel["targets"]))}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A live Prometheus with our rules that scrapes, each second, a page with both services' metrics."""
    binary = system_program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = monitor_text() + weight_sync_text()
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server, socket.socket() as probe:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        shutil.copytree(DEPLOY / "prometheus/rules", folder / "rules")
        for file in (folder / "rules").glob("*.yml"):
            file.write_text(file.read_text(encoding="utf-8").replace("interval: 15s", "interval: 1s"), encoding="utf-8")
        target = f"127.0.0.1:{server.server_port}"
        tree = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"},
            "rule_files": ["rules/*.yml"],
            "scrape_configs": [{"job_name": "monitor", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)
            server.shutdown()


def ask(base: str, expression: str) -> list[Any]:
    """The series that an expression gives now; empty while the server starts."""
    url = f"{base}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
            return found
    except (urllib.error.URLError, ConnectionError):
        return []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_panel_and_every_recording_gives_a_series_from_a_live_prometheus(prometheus: str) -> None:
    wanted = {t["expr"]: f"{board}: {panel['title']}" for board, panel in panels() for t in panel["targets"]}
    wanted |= {rule["record"]: "recording rule" for rule in rules() if "record" in rule}
    scaler = yaml.safe_load((DEPLOY / "kubernetes/components/autoscale/rollout.yaml").read_text(encoding="utf-8"))
    wanted[scaler["spec"]["triggers"][0]["metadata"]["query"]] = "the autoscaler"
    end = time.monotonic() + 225
    while wanted and time.monotonic() < end:
        wanted = {expr: where for expr, where in wanted.items() if not ask(prometheus, expr)}
        time.sleep(0.5)
    assert wanted == {}


def test_a_worker_that_fell_silent_is_not_counted() -> None:
    now = a_snapshot()
    gone: dict[str, dict[str, float | int | str]] = {"worker-0@h-9": {"heartbeat_ms": float(now.time_ms - 60_000)}}
    text = metrics.render(replace(now, workers={**now.workers, **gone}), diagnose(now, None, []))
    assert b"\nlagrange_workers 1.0\n" in text
