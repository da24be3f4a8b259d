"""The worker as a process: how it starts, waits and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.queue import Broker
from configs.load import save_config
from configs.ports import free_port
from configs.schema import RunConfig
from rollout.main import main
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import serving, tiny_folder

RUN_WORKER = (
    "import sys; from pathlib import Path; from configs.load import load_config; from rollout.main import main; "
    "sys.exit(main(load_config(Path(sys.argv[1])), 0))"
)


@pytest.fixture
def config(make_config: ConfigFactory, tmp_path: Path, redis_url: str) -> RunConfig:
    return make_config(**{"model": {"path": tiny_folder(tmp_path)}, "redis.url": redis_url})


def start(config: RunConfig, directory: Path) -> subprocess.Popen[str]:
    save_config(config, directory / "config.yaml")
    arguments = [sys.executable, "-c", RUN_WORKER, str(directory / "config.yaml")]
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.02)


def test_sigterm_hands_the_tickets_back_and_ends_with_0_within_five_seconds(
    config: RunConfig, broker: Broker, tmp_path: Path
) -> None:
    run = Run(broker).start()
    broker.remove_engine("engine-1")
    engine = FakeEngine(version="0")
    engine.paused = "abort"
    with engine.serve() as url:
        serving(broker, url, 0)
        with start(config, tmp_path) as worker:
            wait_for(lambda: broker.snapshot().groups.generating == 4)
            began = time.monotonic()
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(10) == 0
            assert time.monotonic() - began < 5
    assert broker.snapshot().groups.generating == 0
    assert broker.snapshot().counters["groups_released"] == 4
    run.assert_closed()


def test_a_killed_worker_loses_its_leases_and_its_prompts_come_again(
    config: RunConfig, broker: Broker, tmp_path: Path
) -> None:
    run = Run(broker).start()
    broker.remove_engine("engine-1")
    engine = FakeEngine(version="0")
    engine.paused = "abort"
    with engine.serve() as url:
        serving(broker, url, 0)
        with start(config, tmp_path) as first:
            wait_for(lambda: broker.snapshot().groups.generating == 4)
            first.kill()
        run.set_clock(int(config.rollout.lease_s) + 1)
        engine.paused = None
        with start(config, tmp_path) as second:
            wait_for(lambda: broker.snapshot().groups.ready == 4)
            second.send_signal(signal.SIGTERM)
            assert second.wait(10) == 0
    seen = broker.snapshot()
    assert (seen.groups.failed, seen.counters["leases_expired"]) == (4, 4)
    batch = broker.pull(seen.epoch, 0, 2)
    assert sorted(delivery.prompt_index for delivery in batch) == [0, 1]  # type: ignore[union-attr]


def test_a_worker_ends_with_0_when_the_run_is_finished(config: RunConfig, broker: Broker, tmp_path: Path) -> None:
    Run(broker).start()
    broker.set_status("finished")
    with start(config, tmp_path) as worker:
        assert worker.wait(30) == 0


def test_a_worker_that_waits_for_redis_ends_at_once_when_told(config: RunConfig, tmp_path: Path) -> None:
    away = config.model_copy(
        update={"redis": config.redis.model_copy(update={"url": f"redis://127.0.0.1:{free_port()}", "timeout_s": 60.0})}
    )
    with start(away, tmp_path) as worker:
        assert worker.stderr is not None
        time_to_import = time.monotonic() + 2.0
        wait_for(lambda: time.monotonic() > time_to_import)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(10) in (0, -signal.SIGTERM)  # the second if it had not installed its handler yet


def test_a_configuration_that_cannot_be_used_ends_with_2(config: RunConfig, tmp_path: Path) -> None:
    nowhere = config.model_copy(update={"model": config.model.model_copy(update={"path": tmp_path / "none"})})
    unknown = config.model_copy(update={"task": config.task.model_copy(update={"name": "nothing"})})
    assert [main(case, 0) for case in (nowhere, unknown)] == [2, 2]
