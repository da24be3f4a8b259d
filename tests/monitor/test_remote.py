"""`lagrange status` and `lagrange watch` against a monitor elsewhere."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from broker.types import EngineRecord, EngineState
from services.local.live import ProcessFacts, screen, view_of
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


def test_the_view_from_afar_is_the_view_from_here(run: Run) -> None:
    run.broker.register_engine(EngineRecord("engine-2", "http://x", EngineState.QUARANTINED, detail="[bold]no"))
    seen = Source(run.broker).look()
    far = view_of_overview(views.overview(seen.snapshot, seen.before, seen.records).model_dump(mode="json"), "u", "h")
    near = view_of(
        seen.snapshot, [0.25, 0.5], ProcessFacts(far.facts.elapsed_s, "u", "", news=far.facts.news, hint="h")
    )
    assert far == near
    assert "engine-2" in drawn(screen(far))


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
