"""Draws docs/images/terminal.png from a run that goes on, and docs/images/report.png when it has ended.

    lagrange up configs/local.yaml                                              # names the run's folder
    python -m tests.services_local.pictures runs/ID docs/images 80              # the terminal at step 80

Invariant: what is seen is what `lagrange up` shows of that run and the report that it wrote; nothing is made up.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from services.commands import local_looker
from services.local.live import HINT, screen
from services.local.metrics import read_metrics
from tests.monitor.live import chromium

PATIENCE_S = 1800.0
COLUMNS = 118


def main(run: Path, folder: Path, step: int) -> None:
    """Write both pictures to `folder`."""
    wait_until(lambda: len(read_metrics(run / "metrics.jsonl")) >= step, f"{run} did not come to step {step}")
    drawn = terminal(run)
    wait_until((run / "report.html").exists, f"{run} has no report")
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 1620})
        page.goto((run / "report.html").absolute().as_uri())
        page.screenshot(path=folder / "report.png")
        page.set_content(drawn)
        page.locator("svg").first.screenshot(path=folder / "terminal.png", omit_background=True)
        browser.close()


def terminal(run: Path) -> str:
    """The screen of `lagrange up` now, as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with local_looker(run, HINT) as look:
        console.print(screen(look()))
    return console.export_svg(title="make run")


def wait_until(seen: Callable[[], bool], else_: str) -> None:
    """Poll; SystemExit after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not seen():
        if time.monotonic() >= end:
            raise SystemExit(f"{else_} within {PATIENCE_S:.0f} s")
        time.sleep(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
