"""Events, workers, versions, and who caused which staleness, from a real Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from broker.queue import Broker
from broker.types import Refused
from services.monitor import detail, views
from services.monitor.detail import SHOWN, trained_wait_seconds, waiting_seconds
from services.monitor.diagnosis import diagnose
from services.monitor.metrics import samples
from tests.conftest import ConfigFactory
from tests.monitor.conftest import Run
from tests.trainer.sim import MemoryCheckpoints, World, trainer_of


def test_staleness_is_told_by_task_engine_and_worker(run: Run) -> None:
    answer = views.staleness(run.broker.snapshot(SHOWN, names=True))
    for by, name in ((answer.by_task, "max-digit"), (answer.by_engine, "engine-0"), (answer.by_worker, "worker-0")):
        assert list(by) == [name]
        assert [(b.lag, b.groups, b.tokens) for b in by[name].waiting.by_lag] == [(2, 20, 60)]
        assert [(b.lag, b.groups, b.tokens) for b in by[name].trained.by_lag] == [(0, 16, 48), (1, 16, 48)]
        tokens = by[name].trained.tokens
        assert tokens is not None
        assert tokens.p95 == 1


def test_what_a_restarted_trainer_takes_back_is_taken_back_by_name_too(run: Run) -> None:
    run.broker.attach_trainer(checkpoint_step=1, checkpoint_version=1)
    seen = run.broker.snapshot(SHOWN, names=True)
    answer = views.staleness(seen)
    assert [(b.lag, b.groups) for b in answer.by_engine["engine-0"].trained.by_lag] == [(0, 16)]
    assert sum(b.groups for b in answer.by_engine["engine-0"].waiting.by_lag) == seen.groups.ready == 36
    assert seen.detail is not None
    assert sum(seen.detail.waited.groups.values()) == 16
    for who in (("task", "max-digit"), ("engine", "engine-0"), ("worker", "worker-0")):
        assert sum(seen.detail.waited_by[who].groups.values()) == 16
        assert seen.detail.waiting_by[who].groups == 36


def test_time_in_queue_has_percentiles_of_what_waits_and_of_what_was_trained(run: Run) -> None:
    seen = run.broker.snapshot(SHOWN, names=True)
    assert seen.detail is not None
    waiting = waiting_seconds(seen.detail.waiting)
    assert waiting is not None
    assert 0 <= waiting.min <= waiting.p50 <= waiting.p95 <= waiting.max
    assert waiting.min <= waiting.mean <= waiting.max
    trained = trained_wait_seconds(seen.detail.waited)
    assert trained is not None
    assert 0 <= trained.min <= trained.p50 <= trained.p95 <= trained.max
    assert seen.mean_trained_wait_ms / 1000 == trained.mean <= trained.max


def test_time_in_queue_is_told_by_task_engine_and_worker(run: Run) -> None:
    run.broker.heartbeat_worker("worker-1", {})
    run.sample()
    run.broker._connection.client.hset(run.broker._keys.policy, "clock_shift_ms", 5000)  # five seconds later
    for _ in range(3):
        run.sample(worker="worker-1")
    run.broker._connection.client.hset(run.broker._keys.policy, "clock_shift_ms", 7000)
    answer = views.staleness(run.broker.snapshot(SHOWN, names=True))
    both, early, late = answer.by_engine["engine-0"], answer.by_worker["worker-0"], answer.by_worker["worker-1"]
    whole = answer.time_in_queue.waiting
    assert whole is not None
    assert early.waiting_seconds is not None
    assert late.waiting_seconds is not None
    assert both.waiting_seconds == answer.by_task["max-digit"].waiting_seconds == whole
    assert 2 <= late.waiting_seconds.min <= late.waiting_seconds.mean <= late.waiting_seconds.max
    assert late.waiting_seconds.max < early.waiting_seconds.min
    assert 7 <= early.waiting_seconds.min <= early.waiting_seconds.mean <= early.waiting_seconds.max
    assert (whole.min, whole.max) == (late.waiting_seconds.min, early.waiting_seconds.max)
    weighed = (21 * early.waiting_seconds.mean + 3 * late.waiting_seconds.mean) / 24
    assert whole.mean == pytest.approx(weighed, abs=1e-6)
    assert early.trained_seconds == answer.time_in_queue.trained
    assert late.trained_seconds is None
    for _ in range(8):
        run.sample(worker="worker-1")
    run.step()
    run.step()
    after = views.staleness(run.broker.snapshot(SHOWN, names=True))
    assert after.time_in_queue.waiting is None
    assert after.by_worker["worker-0"].waiting_seconds is None
    trained = after.by_worker["worker-1"].trained_seconds
    assert trained is not None
    assert trained.mean <= trained.max >= 2


def test_prometheus_has_time_in_queue_by_names_that_do_not_grow_without_end(run: Run) -> None:
    seen = run.broker.snapshot(SHOWN, names=True)
    served = samples(seen, diagnose(seen, None, []))["named_waiting_seconds"]
    statistics = ("min", "mean", "p50", "p95", "max")
    names = (("engine", "engine-0"), ("task", "max-digit"), ("worker", "worker-0"))
    assert [labels for labels, _ in served] == [(*who, one) for who in names for one in statistics]
    silent = replace(seen, workers={"worker-0": {"heartbeat_ms": seen.time_ms - 60_000}})
    found = samples(silent, diagnose(silent, None, []))
    assert {labels[0] for labels, _ in found["named_waiting_seconds"]} == {"engine", "task"}
    assert {labels[0] for labels, _ in found["named_trained_wait_seconds"]} == {"engine", "task"}


def test_a_percentile_of_the_time_in_queue_is_the_one_of_the_groups_themselves(run: Run) -> None:
    client, waiting = run.broker._connection.client, run.broker._keys.named("waiting")
    now = run.broker.server_time_ms()
    groups: Any = client.zrange(waiting, 0, -1)
    for index, name in enumerate(groups):
        client.zadd(waiting, {name: now - 1000 * (index + 1)})  # 1 s to 20 s
    seen = run.broker.snapshot(SHOWN, names=True)
    assert seen.detail is not None
    found = waiting_seconds(seen.detail.waiting)
    assert found is not None
    assert 0 <= found.min - 1 < 5
    assert 0 <= found.p50 - 10 < 5
    assert 0 <= found.p95 - 19 < 5
    assert 0 <= found.max - 20 < 5
    assert found.max - found.p50 == pytest.approx(10)


def test_the_table_of_lags_counts_as_trained_what_the_ledger_does(redis_url: str, make_config: ConfigFactory) -> None:
    config = make_config(**{"run.steps": 4, "trainer.groups_per_step": 4})
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    world = World(config, broker)
    world.reward = lambda prompt, answer: float(world.random.random()) if prompt % 2 else 0.5
    trainer_of(config, broker, world, MemoryCheckpoints()).run()
    answer = views.staleness(broker.snapshot(SHOWN, names=True))
    broker.close()
    assert 0 < answer.groups.trained < 16
    assert answer.groups.filtered > 0
    by_worker = answer.by_worker["w"].trained.by_lag
    for table in (answer.trained.by_lag, by_worker):
        assert sum(b.groups for b in table) == answer.groups.trained
        assert sum(b.tokens for b in table) == answer.tokens.trained


def test_events_are_of_the_same_snapshot_and_newest_first(run: Run) -> None:
    answer = detail.events(run.broker.snapshot(SHOWN, names=True))
    assert [e.kind for e in answer.events[:2]] == ["engine", "engine"]
    assert answer.events[-1].kind == "attach"
    assert all(e.time_ms <= answer.time_ms for e in answer.events)


def test_workers_are_shown_with_whether_they_live(run: Run) -> None:
    answer = detail.workers(run.broker.snapshot(SHOWN, names=True))
    assert answer.alive == 1
    assert (answer.workers[0].worker, answer.workers[0].stats["groups"]) == ("worker-0", 53)


def test_versions_are_shown_with_the_engines_that_serve_them_and_without_their_path(run: Run) -> None:
    answer = detail.versions(run.broker.snapshot(SHOWN, names=True))
    assert [(v.version, v.engines) for v in answer.versions] == [(0, ["engine-0"])]
    assert "secret" not in answer.model_dump_json()


def test_a_snapshot_without_detail_answers_the_rest(run: Run) -> None:
    seen = run.broker.snapshot()
    assert seen.detail is None
    assert views.staleness(seen).by_engine == {}
    assert detail.events(seen).events == []
    assert views.queue(seen).time_in_queue.waiting is None
    assert not isinstance(run.broker.admit("worker-0", "engine-0"), Refused)


def test_a_worker_that_is_forgotten_leaves_its_sums_under_one_name(run: Run) -> None:
    client = run.broker._connection.client
    client.zadd(run.broker._keys.named("workers_seen"), {"worker-0": 1})
    run.broker.heartbeat_worker("worker-1", {})
    by_worker = views.staleness(run.broker.snapshot(SHOWN, names=True)).by_worker
    assert [(b.lag, b.groups, b.tokens) for b in by_worker["(forgotten)"].trained.by_lag] == [(0, 16, 48), (1, 16, 48)]
    assert by_worker["worker-0"].trained.by_lag == []
    assert [b.groups for b in by_worker["worker-0"].waiting.by_lag] == [20]
    assert by_worker["(forgotten)"].trained_seconds is not None
    assert by_worker["worker-0"].trained_seconds is None
