"""docs/metrics.md names whatever the trainer, the workers and the queue's scripts count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.queue import Broker
from services.monitor.diagnosis import diagnose
from services.monitor.metrics import samples
from tests.conftest import ConfigFactory
from tests.monitor.conftest import Run
from tests.trainer.sim import MemoryCheckpoints, World, trainer_of

ROOT = Path(__file__).parents[2]
DYNAMIC = "<>"


def documented(heading: str) -> set[str]:
    """Names in the first column of the table below a heading; what stands in <> is taken out."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").split(f"### {heading}\n")[1].split("\n#")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {re.sub("<.*?>", DYNAMIC, name) for row in rows for name in re.findall("`(.*?)`", row)}


def counted() -> set[str]:
    """Names that occur as such in the code that counts."""
    found: set[str] = set()
    for file in (ROOT / "rollout").rglob("*.py"):
        for argument in re.findall(r"counters\.add\((.*?)(?:, |\)$)", file.read_text(encoding="utf-8"), re.M):
            found |= {re.sub("{.*?}", DYNAMIC, name) for name in re.findall('"(.*?)"', argument)}
    for file in (ROOT / "broker" / "lua").glob("*.lua"):
        for argument in re.findall(r"\bcount\((.*?)[,)]", file.read_text(encoding="utf-8")):
            chosen = re.sub(r"== '\w+'", "", argument)
            found |= set(re.findall(r"'([a-z]\w+[a-z])'", chosen))
    return found


def test_every_counter_of_workers_and_scripts_is_documented() -> None:
    found = counted()
    assert {"generated_tokens", f"admission_wait_{DYNAMIC}_seconds", "stale_at_pull", "steering_refused"} <= found
    assert found - documented("Of workers and of the queue") == set()


@pytest.mark.parametrize("loss", ["sat-grpo", "grpo"])
def test_every_number_of_a_step_record_is_documented(redis_url: str, make_config: ConfigFactory, loss: str) -> None:
    config = make_config(**{"run.steps": 1, "trainer.loss": {"name": loss, "reference_kl": 0.1}})
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    trainer_of(config, broker, World(config, broker), MemoryCheckpoints()).run()
    seen = broker.snapshot()
    names = {labels[0] for labels, _ in samples(seen, diagnose(seen, None, []))["trainer_metric"]}
    broker.close()
    assert "kl_reference" in names
    assert names - documented("Of the trainer") == set()


def test_what_a_living_worker_says_is_served_under_its_name(run: Run) -> None:
    run.broker.heartbeat_worker("worker-0", {"generated_tokens": 64.0, "groups_in_work": 3, "mood": "good"})
    seen = run.broker.snapshot()
    served = samples(seen, diagnose(seen, None, []))["worker_metric"]
    assert served == [(("worker-0", "generated_tokens"), 64.0), (("worker-0", "groups_in_work"), 3.0)]
