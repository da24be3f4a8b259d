"""Draws docs/images/monitor-*.png: a run's metrics are replayed through a real queue and looked at in Chromium.

    python -m tests.monitor.screenshots runs/<id>/metrics.jsonl docs/images

Invariant: step records and samples are the run's own; groups, engines and events are as the replay made them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from broker.queue import Broker
from broker.types import EngineRecord, EngineState, Outcome, Refused, Ticket, VersionRecord
from tests.monitor.conftest import GROUPS_PER_STEP, Run
from tests.monitor.live import chromium, monitor_of
from tests.weight_sync.live import config, redis_server

SHOTS = (("light", 1280, 760), ("dark", 1280, 760), ("phone-light", 390, 844), ("phone-dark", 390, 844))
WATCHED = 20
"""Steps that are replayed while the pages look on, one a second."""


def replay(run: Run, records: list[dict[str, object]]) -> None:
    """Each record is the step of one batch; the engines follow one version behind."""
    for record in records:
        while run.broker.snapshot().groups.ready < 2 * GROUPS_PER_STEP:
            run.sample()
        batch = run.broker.pull(run.epoch, run.version, GROUPS_PER_STEP)
        assert not isinstance(batch, Refused), batch
        lags: dict[int, int] = {}
        for delivery in batch:
            lag = run.version - delivery.oldest_version
            lags[lag] = lags.get(lag, 0) + delivery.response_tokens
        filtered = int(str(record.get("groups_filtered", 0)))
        outcomes = [Outcome(d.group_id, i < filtered) for i, d in enumerate(batch)]
        run.broker.step(run.epoch, run.version, outcomes, lags, record)
        run.version += 1
        run.broker.publish(run.epoch, VersionRecord(run.version, run.version, "/weights", "c0ffee"))
        for name in ("engine-0", "engine-1"):
            run.broker.register_engine(EngineRecord(name, "http://e", EngineState.SERVING, run.version))
        if run.version % 25 == 0:
            run.broker.commit(run.epoch, run.version)


def main(metrics: Path, folder: Path) -> None:
    """Replay `metrics` and write the pictures to `folder`."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()][:95]
    with tempfile.TemporaryDirectory() as made, redis_server(Path(made)) as (url, _server):
        settings = config(url, Path(made))
        named = settings.run.model_copy(update={"id": metrics.absolute().parent.name})
        settings = settings.model_copy(update={"run": named})
        broker = Broker.connect(url, settings.run.id, timeout_s=10.0)
        broker.initialise(settings)
        epoch = broker.attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch
        run = Run(broker, url, epoch, broker.name_version(epoch), settings.run.id)
        broker.publish(epoch, VersionRecord(0, 0, "/weights", "c0ffee"))
        broker.register_engine(EngineRecord("engine-0", "http://e", EngineState.SERVING, 0))
        copy_samples(metrics.parent / "samples", settings.run.folder / "samples", len(records))
        replay(run, records[:-WATCHED])
        broker.steer("lag", 2, why="by ada: log-ratios grow")
        with monitor_of(run, Path(made)) as monitor, sync_playwright() as engine:
            browser = engine.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
            pages = [opened(browser, monitor.url, *shot) for shot in SHOTS]
            for record in records[-WATCHED:]:
                broker.heartbeat_worker("worker-0", {"groups": 53})
                replay(run, [record])
                pages[0].wait_for_timeout(1000)
            assert isinstance(broker.admit("worker-0", "engine-0"), Ticket)
            for (name, *_), page in zip(SHOTS, pages, strict=True):
                page.wait_for_timeout(1500)
                page.evaluate("document.querySelector('#samples details').open = true")
                page.screenshot(path=folder / f"monitor-{name}.png", full_page=name == "dark")
            browser.close()
        broker.close()


def copy_samples(source: Path, target: Path, version: int) -> None:
    """The groups that were sampled before this version."""
    target.mkdir(parents=True)
    for file in source.glob("*.jsonl"):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        (target / file.name).write_text("".join(line for line in lines if json.loads(line)["version"] < version))


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
    while page.evaluate("document.querySelectorAll('canvas').length") < 4:
        page.wait_for_timeout(200)
    return page


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
