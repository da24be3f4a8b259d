"""One trace from the prompt to the optimizer step: a worker and a trainer over a real Redis, and a real collector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from broker.queue import Broker
from broker.traces import open_traces, trace_id
from broker.types import EngineRecord, EngineState
from configs.schema import RunConfig
from rollout.samples import readable
from services.queue_cli.dump import read_dump
from tests.broker.helpers import Run, wait_for
from tests.broker.test_queue_cli import said
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import ENGINE, make_worker, ready, serving, tiny_folder, until, working
from tests.traces.helpers import Collector, Memory, collector
from tests.trainer.helpers import OneRank
from tests.trainer.sim import BigramPolicy, MemoryCheckpoints
from trainer.loop import Trainer

WORKER = ["admit", "generate", "generate", "reward", "submit"]
TRAINER = ["fetch", "queue", "step"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with collector() as server:
        yield server


@pytest.fixture
def config(told: Collector, redis_url: str, make_config: ConfigFactory) -> RunConfig:
    return make_config(
        **{
            "redis.url": redis_url,
            "run.steps": 1,
            "traces": {"endpoint": told.endpoint, "ratio": 1.0, "interval_s": 0.1},
        }
    )


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version="0")


class Sink:
    """Keeps the records of the steps."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)

    def close(self) -> None:
        """Nothing to do."""


def trainer_of(config: RunConfig, broker: Broker, traces: Any, sink: Sink) -> Trainer:
    policy = BigramPolicy()
    policy.table = torch.zeros(64, 64, requires_grad=True)
    policy.optimizer = torch.optim.AdamW([policy.table], lr=0.1)
    return Trainer(
        config,
        broker=broker,
        ranks=OneRank(),
        policy=policy,
        checkpoints=MemoryCheckpoints().of(policy),
        sink=lambda step: sink,
        route_shape=None,
        traces=traces,
    )


async def test_a_collector_receives_one_connected_trace_from_the_prompt_to_the_step(
    broker: Broker, told: Collector, config: RunConfig, engine: FakeEngine, tmp_path: Path
) -> None:
    sink = Sink()
    with engine.serve() as url, contextlib.closing(open_traces(config, "trainer")) as of_trainer:
        broker.initialise(config)
        trainer = trainer_of(config, broker, of_trainer, sink)
        trainer.attach()
        serving(broker, url, 0)
        of_worker = open_traces(config, "worker-0")
        async with working(make_worker(config, broker, tiny_folder(tmp_path), traces=of_worker)):
            await until(lambda: ready(broker) == 2)
        of_worker.close()
        assert trainer.step()
    assert len(told.spans) == 2 * len(["group", *WORKER, *TRAINER])
    roots = [span for span in told.spans if not span.parent_span_id]
    assert len({root.trace_id for root in roots}) == len(roots) == 2
    for root in roots:
        below = [span for span in told.spans if span.trace_id == root.trace_id and span is not root]
        assert sorted(span.name for span in below) == sorted(WORKER + TRAINER)
        assert {span.parent_span_id for span in below} == {root.span_id}
        by = {span.name: told.services[span.span_id] for span in [root, *below]}
        assert by == dict.fromkeys(["group", *WORKER], "worker-0") | dict.fromkeys(TRAINER, "trainer")
        (step,) = [span for span in below if span.name == "step"]
        facts = {a.key.removeprefix("lagrange."): a.value for a in step.attributes}
        assert [facts[name].int_value for name in ("step", "version", "published", "lag")] == [1, 1, 1, 0]
        assert facts["forward_backward_s"].double_value > 0
        (waited,) = [span for span in below if span.name == "queue"]
        (submitted,) = [span for span in below if span.name == "submit"]
        # Redis' clock has milliseconds.
        assert submitted.start_time_unix_nano - 10**6 <= waited.start_time_unix_nano <= submitted.end_time_unix_nano
        assert step.end_time_unix_nano >= step.start_time_unix_nano >= waited.start_time_unix_nano
    assert sink.records[0]["trace_spans_dropped"] == 0


async def test_the_id_of_a_trace_is_shown_wherever_its_group_is(
    broker: Broker, config: RunConfig, engine: FakeEngine, tmp_path: Path
) -> None:
    memory, run = Memory(), Run(broker).start()
    broker.initialise(config)
    with engine.serve() as url:
        serving(broker, url, 0)
        worker = make_worker(config, broker, folder := tiny_folder(tmp_path), traces=memory.traces)
        async with working(worker):
            await until(lambda: ready(broker) == 2)
    (group, _) = broker.fetch([record.group_id for record in broker.groups("ready", 2)])
    traced = trace_id(group.trace)
    assert traced in {f"{span.context.trace_id:032x}" for span in memory.named("submit") if span.context}
    file = tmp_path / "config.yaml"
    file.write_text(config.model_dump_json())
    assert f"trace {traced}" in said("groups", "show", file, group.group_id)
    said("groups", "dump", file, group.group_id, tmp_path / "dump")
    assert read_dump(tmp_path / "dump")[1].trace == group.trace
    assert readable(group, worker._codec)["trace"] == traced
    assert folder.is_dir()
    run.assert_closed()


async def test_a_sample_that_an_update_interrupts_goes_on_in_the_same_span(
    broker: Broker, engine: FakeEngine, make_config: ConfigFactory, tmp_path: Path
) -> None:
    memory, config = Memory(), make_config(**{"rollout.max_new_tokens": 40, "rollout.concurrent_groups": 1})
    Run(broker).start()
    broker.remove_engine("engine-1")
    engine.most_tokens = 6
    with engine.serve() as url:
        serving(broker, url, 0)
        async with working(make_worker(config, broker, tiny_folder(tmp_path), traces=memory.traces)):
            await until(lambda: engine.held(2))
            broker.register_engine(EngineRecord(ENGINE, url, EngineState.UPDATING, 0))
            await engine.pause("abort")
            engine.version, engine.most_tokens, engine.paused = "1", None, None
            serving(broker, url, 1)
            await until(lambda: ready(broker) >= 1)
    samples = [span for span in memory.named("generate") if (span.attributes or {}).get("lagrange.versions") == 2]
    assert [[event.name for event in span.events] for span in samples] == [["request", "interrupted", "request"]] * 2


async def test_a_group_that_fails_says_so_in_its_trace(
    broker: Broker, engine: FakeEngine, make_config: ConfigFactory, tmp_path: Path
) -> None:
    memory = Memory()
    config = make_config(**{"rollout.generation_tries": 1, "rollout.concurrent_groups": 1})
    Run(broker).start()
    broker.remove_engine("engine-1")
    engine.fail("/generate", "status", times=1)
    with engine.serve() as url:
        serving(broker, url, 0)
        async with working(make_worker(config, broker, tiny_folder(tmp_path), traces=memory.traces)):
            await until(lambda: ready(broker) >= 1)
    failed = [span for span in memory.named("group") if span.status.description]
    assert failed[0].status.description is not None
    assert failed[0].status.description.startswith("0 of 2 samples, 1 needed; Engine")


async def test_a_collector_that_is_away_changes_nothing_in_a_run(
    broker: Broker, told: Collector, config: RunConfig, engine: FakeEngine, tmp_path: Path
) -> None:
    told.status = 503
    sink, of_trainer, of_worker = Sink(), open_traces(config, "trainer"), open_traces(config, "worker-0")
    with engine.serve() as url:
        broker.initialise(config)
        trainer = trainer_of(config, broker, of_trainer, sink)
        trainer.attach()
        serving(broker, url, 0)
        async with working(make_worker(config, broker, tiny_folder(tmp_path), traces=of_worker)):
            await until(lambda: ready(broker) == 2)
        assert trainer.step()
    of_trainer.close()
    of_worker.close()
    wait_for(lambda: of_trainer.counts()["trace_spans_dropped"] == 2 * len(TRAINER))
    assert broker.snapshot().groups.trained + broker.snapshot().groups.filtered == 2
