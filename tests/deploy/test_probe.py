"""`lagrange-probe`, which health checks run."""

from __future__ import annotations

import http.server
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from services.deployment import initialise
from tests.deploy.test_prometheus import a_snapshot
from tests.deploy.tools import DEPLOY, ROOT, deploy_config


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("lagrange_probe", DEPLOY / "docker/probe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def served() -> Iterator[tuple[int, dict[str, int]]]:
    """A server's port, and what it answers by path."""
    answers: dict[str, int] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers.get(self.path, 404))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, answers
        server.shutdown()


@pytest.fixture
def file(tmp_path: Path, redis_url: str) -> Path:
    tree = deploy_config("tiny")
    tree["run"]["directory"] = str(tmp_path / "runs")
    tree["redis"]["url"] = redis_url
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def test_a_service_is_well_only_if_its_readiness_says_so(
    probe: ModuleType, served: tuple[int, dict[str, int]], file: Path
) -> None:
    port, answers = served
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    tree["monitor"]["port"] = port
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(Exception, match="404"):
        probe.probe("monitor", file)
    answers["/readyz"] = 503
    with pytest.raises(Exception, match="503"):
        probe.probe("monitor", file)
    answers["/readyz"] = 200
    probe.probe("monitor", file)


def test_a_run_is_prepared_once_init_made_model_and_records(probe: ModuleType, file: Path) -> None:
    with pytest.raises(Exception, match=r"."):
        probe.probe("init", file)
    initialise(file)
    probe.probe("init", file)


def test_what_asks_over_http_imports_nothing_of_ours(file: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['p', 'monitor']\n"
        f"try: runpy.run_path({str(DEPLOY / 'docker/probe.py')!r}, run_name='__main__')\n"
        "except SystemExit: print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    ).stdout
    assert not [name for name in ("broker", "configs", "services", "numpy", "pydantic", "redis") if f"'{name}'" in out]


def test_the_exit_code_and_one_line_say_what_is_wrong(
    probe: ModuleType, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "CONFIG", file)
    monkeypatch.setattr(sys, "argv", ["lagrange-probe", "trainer"])
    initialise(file)
    assert probe.main() == 1
    assert capsys.readouterr().err.startswith("trainer: NotWell: no trainer renewed its lease")


def test_a_trainer_is_well_while_it_holds_its_lease_and_after_the_run(probe: ModuleType) -> None:
    now = a_snapshot()
    probe.trainer_is_attached(now)
    late = replace(now, counters={"trainer_lease_left_ms": -1.0})
    with pytest.raises(probe.NotWell):
        probe.trainer_is_attached(late)
    probe.trainer_is_attached(replace(late, status="finished"))


def test_a_worker_is_well_if_redis_heard_of_it_lately_and_not_of_another_host(probe: ModuleType) -> None:
    now = a_snapshot()
    beat: dict[str, dict[str, float | int | str]] = {"worker-0@box-17": {"heartbeat_ms": float(now.time_ms - 1000)}}
    probe.worker_beats(replace(now, workers=beat), "box")
    with pytest.raises(probe.NotWell):
        probe.worker_beats(replace(now, workers=beat), "ox")
    old: dict[str, dict[str, float | int | str]] = {"worker-0@box-17": {"heartbeat_ms": float(now.time_ms - 60000)}}
    with pytest.raises(probe.NotWell):
        probe.worker_beats(replace(now, workers=old), "box")
    probe.worker_beats(replace(now, workers={}, status="finished"), "box")


def test_the_role_is_found_in_the_containers_own_command(probe: ModuleType) -> None:
    plain = b"/opt/lagrange/bin/python3\0/opt/lagrange/bin/lagrange\0weight-sync\0--config\0/etc/lagrange/config.yaml\0"
    init = b"/sbin/docker-init\0--\0lagrange\0rollout\0--config\0/etc/lagrange/config.yaml\0"
    assert probe.role_of_container(plain) == "weight-sync"
    assert probe.role_of_container(init) == "rollout"
    assert probe.role_of_container(b"sleep\x001\0") == "unknown"
