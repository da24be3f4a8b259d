"""`lagrange status` and `lagrange watch` against a monitor elsewhere."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from broker.types import EngineRecord, EngineState, Snapshot, Ticket
from services.local.live import ProcessFacts, plain_line, screen, view_of
from services.monitor import views
from services.monitor.remote import CannotWatch, ask, view_of_overview
from services.monitor.source import Source
from tests.monitor.conftest import Run
from tests.monitor.live import TOKEN, monitor_of


def drawn(view: object) -> str:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(view)
    return captured.get()


@pytest.mark.parametrize("paused", [False, True])
def test_the_view_from_afar_is_the_view_from_here(run: Run, paused: bool) -> None:
    run.broker.register_engine(EngineRecord("engine-2", "http://x", EngineState.QUARANTINED, detail="[bold]no"))
    if paused:
        run.broker.steer("pause", why="by test")
    ticket = run.broker.admit("worker-0", "engine-0")
    assert paused or (isinstance(ticket, Ticket) and run.broker.release(ticket.group_id, "worker-0"))
    seen = Source(run.broker).look()
    far = view_of_overview(views.overview(seen.snapshot, seen.before, seen.records).model_dump(mode="json"), "u", "h")
    near = view_of(seen.snapshot, [0.25, 0.5], ProcessFacts(far.facts.elapsed_s, "u", news=far.facts.news, hint="h"))
    assert far == near
    assert ("1 given back" in far.ledger) is not paused
    assert (far.status == "paused") is paused
    assert "engine-2" in drawn(screen(far))


def test_from_afar_a_run_that_resumes_shows_no_figures_of_the_session_before(run: Run) -> None:
    now = replace(Source(run.broker).look().snapshot, step=2, durable_step=2, version=3, metrics={"version": 2})
    joining = (EngineRecord("engine-0", "http://x", EngineState.JOINING, -1),)

    def shown(snapshot: Snapshot) -> str:
        far = view_of_overview(views.overview(snapshot, None, []).model_dump(mode="json"), "u", "h")
        return plain_line(far).partition("  |  ")[0] + ("" if far.reward is None else " live")

    assert shown(replace(now, engines=joining)) == "resuming from step 2"
    assert shown(replace(now, status="starting", version=2)) == "resuming from step 2"  # with the engines of before
    assert shown(replace(now, status="running")) == "running"
    assert (
        shown(replace(now, status="running", version=2, metrics={"version": 2, "reward_mean": 0.5})) == "running live"
    )
    assert shown(replace(now, status="finished", metrics={"version": 2, "reward_mean": 0.5})) == "finished live"


@pytest.mark.slow
def test_status_shows_a_remote_run_and_says_what_is_wrong_otherwise(run: Run, tmp_path: Path) -> None:
    with monitor_of(run, tmp_path, LAGRANGE_API_PROTECT_READS="1") as monitor:
        command = [sys.executable, "-m", "services", "status", monitor.url]
        without = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        assert (without.returncode, "needs a token" in without.stderr) == (1, True)
        environment = {**monitor.environment, "COLUMNS": "120"}
        shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
        assert shown.returncode == 0, shown.stderr
        for piece in ("test", "engine-0", "closes", "53 issued"):
            assert piece in shown.stdout
        assert ask(monitor.url, TOKEN)()["version"] == 2
    with pytest.raises(CannotWatch, match="does not answer"):
        ask(monitor.url, TOKEN)()
