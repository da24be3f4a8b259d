"""Draws docs/images/monitor-*.png from a run that goes on.

    lagrange up configs/local.yaml          # names the monitor's address
    python -m tests.monitor.screenshots http://127.0.0.1:PORT docs/images 80

Invariant: what is seen is what the monitor shows of that run; nothing is made up or replayed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from tests.monitor.live import chromium

SHOTS = (("light", 1280, 760), ("dark", 1280, 760), ("phone-light", 390, 844), ("phone-dark", 390, 844))
WATCHED = 20
"""Steps that the pages look on before the pictures are taken."""
PATIENCE_S = 1800.0


def main(address: str, folder: Path, step: int) -> None:
    """Write the pictures to `folder` as soon as the run has so many steps."""
    reach(address, max(1, step - WATCHED))
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        pages = [opened(browser, address, *shot) for shot in SHOTS]
        reach(address, step)
        for (name, *_), page in zip(SHOTS, pages, strict=True):
            page.wait_for_timeout(1500)
            page.evaluate("document.querySelector('#samples details').open = true")
            page.screenshot(path=folder / f"monitor-{name}.png", full_page=name == "dark")
        browser.close()


def reach(address: str, step: int) -> None:
    """Return once the run has made that step."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            if httpx.get(f"{address}/v1/run", timeout=10, trust_env=False).json().get("step", 0) >= step:
                return
        except httpx.HTTPError:
            pass  # it starts with the run
        time.sleep(1)
    raise SystemExit(f"{address}: not at step {step} within {PATIENCE_S:.0f} s")


def opened(browser: Browser, url: str, name: str, width: int, height: int) -> Page:
    """A page that follows, with its plots drawn."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if "dark" in name else "light",
        device_scale_factor=2 if "phone" in name else 1,
    )
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(url)
    while page.evaluate("document.querySelectorAll('canvas').length") < 6:
        page.wait_for_timeout(200)
    return page


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]), int(sys.argv[3]))
