"""Writing beside the step: order, errors, one copy at a time, and the loop over a real broker with a real thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker.queue import Broker
from tests.conftest import ConfigFactory
from tests.trainer.sim import BigramPolicy, MemoryCheckpoints, World, records, trainer_of
from trainer.background import Worker
from trainer.versions import folder_of


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(limit_s=20)
    yield made
    made.close(20)


@pytest.fixture
def config(make_config: ConfigFactory) -> Any:
    return make_config(**{"run.steps": 6, "trainer.checkpoint": {"interval_steps": 2}, "trainer.groups_per_step": 3})


@pytest.fixture
def handle(redis_url: str, config: Any) -> Iterator[Broker]:
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    yield broker
    broker.close()


def job(seen: list[Any], name: object) -> Callable[[], Callable[[], None]]:
    return lambda: lambda: seen.append(name)


def test_jobs_run_in_the_order_in_which_they_were_handed_in(worker: Worker) -> None:
    seen: list[Any] = []
    for i in range(20):
        worker.submit("ab"[i % 2], job(seen, i))
    worker.wait()
    assert seen == list(range(20))


def test_a_step_goes_on_while_a_job_writes_and_a_second_copy_of_its_kind_waits(worker: Worker) -> None:
    may_end, copied = threading.Event(), []

    def prepare(number: int) -> Callable[[], bool]:
        copied.append(number)
        return lambda: may_end.wait(20)

    worker.submit("export", lambda: prepare(1))
    worker.submit("checkpoint", lambda: prepare(2))  # returns at once: another kind
    assert copied == [1, 2]
    threading.Timer(0.05, may_end.set).start()
    worker.submit("export", lambda: prepare(3))  # returns once the first has ended
    assert may_end.is_set()
    worker.wait()
    assert copied == [1, 2, 3]


def test_the_error_of_a_job_is_raised_at_the_next_word_and_nothing_after_it_is_begun(worker: Worker) -> None:
    seen: list[Any] = []
    may_fail = threading.Event()

    def fail() -> None:
        may_fail.wait(20)
        raise OSError("disk full")

    worker.submit("export", lambda: fail)
    worker.submit("checkpoint", job(seen, "commit"))
    may_fail.set()
    for word in (worker.wait, worker.check, lambda: worker.submit("export", job(seen, "x"))):
        with pytest.raises(OSError, match="disk full"):
            word()
    assert worker.close(20)
    assert seen == []


def test_a_job_that_hangs_is_named_and_given_up(worker: Worker) -> None:
    hung, release = Worker(limit_s=0.05), threading.Event()
    hung.submit("checkpoint", lambda: lambda: release.wait(20))
    with pytest.raises(TimeoutError, match="checkpoint"):
        hung.wait()
    assert not hung.close(0.01)
    release.set()
    assert hung.close(20)


def test_a_run_that_writes_beside_its_steps_ends_with_everything_durable(config: Any, handle: Broker) -> None:
    checkpoints, world = MemoryCheckpoints(), World(config, handle)
    trainer = trainer_of(config, handle, world, checkpoints, background=Worker(limit_s=20))
    assert trainer.run() == "finished"
    seen = handle.snapshot()
    assert (seen.status, seen.step, seen.durable_step, seen.version) == ("finished", 6, 6, 6)
    assert seen.groups.closes
    assert seen.groups.durable == 18
    assert [len(state.consumed) for state, _, _ in checkpoints.kept] == [6, 6, 6]
    assert max(r["lag_max"] for r in records(config)) <= config.lag.max
    assert (config.run.folder / "model-final" / "manifest.json").exists()


def test_a_version_is_announced_only_when_its_weights_are_whole_and_a_step_committed_only_when_its_checkpoint_is(
    config: Any, handle: Broker
) -> None:
    events: list[str] = []
    checkpoints = MemoryCheckpoints()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(handle, name)

        def publish(self, epoch: int, record: Any) -> None:
            assert (folder_of(config.run.folder / "weights", record.version) / "manifest.json").exists()
            events.append("publish")
            handle.publish(epoch, record)

        def commit(self, epoch: int, step: int) -> int:
            assert checkpoints.kept[-1][0].step == step
            events.append("commit")
            return handle.commit(epoch, step)

    world = World(config, handle)
    trainer_of(config, Watched(), world, checkpoints, background=Worker(limit_s=20)).run()
    assert events.count("publish") == 7
    assert events.count("commit") == 3


@pytest.mark.parametrize("what", ["export", "checkpoint"])
def test_a_write_that_fails_ends_the_run_and_a_restart_trains_each_group_once(
    config: Any, handle: Broker, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, world, first = MemoryCheckpoints(), World(config, handle), BigramPolicy()
    left = [3]

    def failing(stage: Callable[[Any], Callable[[], object]]) -> Callable[[Any], Callable[[], object]]:
        def staged(argument: Any) -> Callable[[], object]:
            write = stage(argument)

            def job() -> object:
                left[0] -= 1
                if left[0] == 0:
                    raise OSError("disk full")
                return write()

            return job

        return staged

    if what == "export":
        monkeypatch.setattr(first, "stage_export", failing(first.stage_export))
    else:
        monkeypatch.setattr(checkpoints, "stage", failing(checkpoints.stage))
    with pytest.raises(OSError, match="disk full"):
        trainer_of(config, handle, world, checkpoints, policy=first, background=Worker(limit_s=20)).run()
    survived = checkpoints.kept[-1][0].step if checkpoints.kept else 0
    assert handle.snapshot().durable_step == survived
    second = BigramPolicy()
    again = trainer_of(config, handle, world, checkpoints, policy=second, background=Worker(limit_s=20))
    assert again.run() == "finished"
    seen = handle.snapshot()
    assert seen.groups.closes
    assert seen.groups.trained + seen.groups.filtered == seen.groups.durable == 18
    effects = first.trained[:survived] + second.trained
    prints = [tuple(b.behaviour_log_probs.tolist()) + tuple(b.labels.tolist()) for step in effects for b in step]
    assert len(set(prints)) == len(prints)
