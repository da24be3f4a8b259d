"""The live page in a real Chromium: it renders, follows, survives a restart, and has no fault that axe finds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.types import NEWEST, EngineRecord, EngineState
from tests.monitor.conftest import Run, record, write_samples
from tests.monitor.live import Service, chromium, monitor_of

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install -r requirements/dev.txt")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install -r requirements/dev.txt")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
SCREENS = (("light", LAPTOP), ("dark", PHONE))
WAIT_MS = 120_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        made = engine.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"], timeout=2 * WAIT_MS
        )
        yield made
        made.close()


@pytest.fixture
def monitor(run: Run, tmp_path: Path) -> Iterator[Service]:
    write_samples(tmp_path / "test")
    run.broker.evaluated(record(1), "aime24", 30.0)
    counts: dict[str, float | int | str] = {
        "samples_rewarded": 6.0,
        "reward_failures": 2.0,
        f"reward_failures{NEWEST}": "ValueError: <b>",
    }
    run.broker.heartbeat_worker("worker-0", counts)
    why = "/update_weights_from_disk_of_another_host: no answer within 120 s"
    run.broker.register_engine(EngineRecord("engine-1", "http://secret-host:2", EngineState.QUARANTINED, detail=why))
    with monitor_of(run, tmp_path) as made:
        yield made


class Page:
    """A page of a browser, with what it complained about and what it asked for."""

    def __init__(self, browser: Any, url: str, scheme: str, size: dict[str, int]) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport=size)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url, wait_until="load")
        self.wait("document.getElementById('age').textContent === 'live'")

    def wait(self, condition: str) -> None:
        """Until it holds. Not wait_for_function: that needs eval, which the page's policy forbids."""
        end = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, (condition, self.errors)
            self.page.wait_for_timeout(100)

    def text(self, name: str) -> str:
        return str(self.page.text_content(f"#{name}"))


def test_the_page_renders_on_a_laptop_and_a_phone_without_an_error_or_a_fault_that_axe_finds(
    browser: Any, monitor: Service
) -> None:
    for scheme, size in SCREENS:
        renders(browser, monitor, scheme, size)


def renders(browser: Any, monitor: Service, scheme: str, size: dict[str, int]) -> None:
    """The page is whole and faultless in this scheme at this size."""
    shown = Page(browser, monitor.url, scheme, size)
    shown.wait("document.querySelectorAll('canvas').length === 6")
    assert shown.text("step") == "2 / 100"
    assert "engine-0" in shown.text("engines")
    assert "avg@8 0.500" in shown.text("evaluations")
    shown.wait("document.querySelectorAll('#samples details').length === 3")
    shown.page.evaluate("document.querySelectorAll('#samples details').forEach((box) => { box.open = true; })")
    assert "<b>1+1</b>" in shown.text("samples")
    assert shown.text("closes") == "closes"
    assert "version 0" in shown.text("events")
    assert "1.00, 2 tokens, stop" in shown.text("samples")
    assert "2 left out: no answer or no reward" in shown.text("samples")
    assert shown.text("unrewarded") == "2 of 8 samples got no reward and are left out of their groups: ValueError: <b>"
    assert shown.page.evaluate("document.querySelector('#lags meter').getAttribute('aria-label')").endswith(" tokens")
    boxes = "[...document.querySelectorAll('.tables > div, .tiles dt, .tiles dd')]"
    cut = f"{boxes}.filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.textContent)"
    assert shown.page.evaluate(cut) == []
    width = shown.page.evaluate("document.documentElement.scrollWidth")
    assert width <= size["width"], "the page is wider than the screen"
    ground = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(15, 18, 22)") is (scheme == "dark")
    found = axe.Axe().run(shown.page)
    assert found.violations_count == 0, found.generate_report()
    assert shown.errors == []
    assert {url.split("/")[2] for url in shown.asked if not url.startswith("data:")} == {monitor.url.split("/")[2]}
    shown.context.close()


def test_the_page_follows_the_run_and_survives_a_restart_of_the_monitor(
    browser: Any, monitor: Service, run: Run
) -> None:
    shown = Page(browser, monitor.url, "light", LAPTOP)
    shown.wait("document.getElementById('samples').textContent.includes('version 2, mean reward')")
    run.step(0.75)
    shown.wait("document.getElementById('samples').textContent.includes('version 2 (1 before the trainer')")
    shown.wait("document.getElementById('step').textContent === '3 / 100'")
    assert shown.text("reward") == "0.750"
    run.broker.steer("pause", why="by test")
    shown.wait("document.getElementById('mode').textContent === 'admission is paused'")
    shown.wait("document.getElementById('events').textContent.includes('pause: admission is paused (by test)')")
    assert shown.errors == []
    assert monitor.stop() == 0  # although the page follows
    shown.wait("document.getElementById('age').className === 'late'")
    shown.wait("document.getElementById('headline').textContent === 'The monitor does not answer.'")
    assert str(shown.page.title()).startswith("no answer")
    said = shown.text("age")
    assert said.startswith("no answer since ")  # no count of seconds, for screen readers
    run.broker.steer("resume", why="by test")
    monitor.start()
    shown.wait("document.getElementById('age').textContent === 'live'")
    shown.wait("document.getElementById('mode').textContent === ''")
    assert not str(shown.page.title()).startswith("no answer")
    run.broker._connection.client.shutdown(nosave=True)
    shown.wait("document.getElementById('headline').textContent.startsWith('Redis does not answer')")
    assert shown.page.get_attribute("#verdict", "class") == "verdict not-running"
    shown.page.evaluate("document.querySelector('canvas').dataset.old = 'yes'")
    shown.page.set_viewport_size(PHONE)
    shown.wait("!document.querySelector('canvas[data-old]')")
    shown.wait(
        "document.querySelectorAll('canvas').length === 6"
    )  # what was known is drawn again, though nothing comes
    # Chromium itself reports the connections that were refused meanwhile; there is nothing else.
    assert [e for e in shown.errors if "net::ERR_" not in e] == []
    shown.context.close()
