"""Admission of a worker against a fake engine and a real Redis: whom it asks, how it waits, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from broker.types import PAST_THE_END_MS, EngineRecord, EngineState, Ticket
from rollout.tasks import Prompt, make_task
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import ENGINE, make_worker, ready, ready_groups, serving, until, working


def lacking(missing: Callable[[int], bool]) -> Any:
    """A task without some prompts."""
    real = make_task("max-digit", 0)

    def prompt(index: int) -> Prompt:
        if missing(index):
            raise IndexError(f"1 epochs of rows end before prompt {index}")
        return real.prompt(index)

    return SimpleNamespace(name=real.name, prompt=prompt, reward=real.reward)


async def test_a_data_set_that_has_ended_is_asked_now_and_then_and_nothing_of_it_fails(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    config = make_config(**{"rollout.concurrent_groups": 1})
    worker = make_worker(config, run.broker, folder, task=lacking(lambda index: index >= 2))
    began_ms = run.broker.server_time_ms()

    def said() -> float:
        return float(run.broker.snapshot().workers.get("w0", {}).get(PAST_THE_END_MS, -1))

    async with working(worker):
        await until(lambda: run.broker.snapshot().counters.get("groups_released", 0) >= 6 and said() > 0)
        first = said()
        assert began_ms <= first <= run.broker.server_time_ms()
        await until(lambda: said() > first)
    assert worker.counters.totals()["admission_wait_prompt_seconds"] >= 0.05 * (2 + 3 + 4 + 5)
    seen = run.broker.snapshot()
    assert (ready(run.broker), seen.dead_letters, seen.counters.get("groups_failed", 0)) == (2, 0, 0)
    ticket = run.broker.admit("another", ENGINE)
    assert isinstance(ticket, Ticket)
    assert ticket.prompt_index == 2  # the prompts beyond are as they were, for a run that goes on with more epochs


async def test_a_task_that_has_no_prompt_at_one_index_alone_has_not_ended(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    worker = make_worker(make_config(), run.broker, folder, task=lacking(lambda index: index == 1))
    async with working(worker):
        await until(lambda: ready(run.broker) == 4)
    seen = run.broker.snapshot()
    assert seen.dead_letters == 1
    assert PAST_THE_END_MS not in seen.workers["w0"]


async def test_waiting_for_admission_is_measured_by_reason(run: Run, folder: Path, make_config: ConfigFactory) -> None:
    worker = make_worker(make_config(), run.broker, folder)
    async with working(worker):
        await until(lambda: worker.counters.totals().get("admission_wait_bound_seconds", 0) > 0.1)
    assert worker.counters.totals()["admission_wait_seconds"] >= 0.1


async def test_a_newer_engine_is_asked_when_an_old_one_is_past_the_bound(
    run: Run, url: str, folder: Path, make_config: ConfigFactory
) -> None:
    other = FakeEngine(version="3")
    run.publish()
    for _ in range(3):
        run.train()
    run.broker.remove_engine("engine-1")
    serving(run.broker, url, 0)
    with other.serve() as newer:
        serving(run.broker, newer, 3, "engine-9")
        async with working(make_worker(make_config(), run.broker, folder)):
            await until(lambda: ready(run.broker) == 4)
    assert {g.engine for g in ready_groups(run, 2)} == {"engine-9"}


async def test_no_request_is_sent_to_an_engine_that_is_not_serving(
    run: Run, engine: FakeEngine, url: str, folder: Path, make_config: ConfigFactory
) -> None:
    run.broker.register_engine(EngineRecord(ENGINE, url, EngineState.UPDATING, 0))
    worker = make_worker(make_config(), run.broker, folder)
    async with working(worker):
        await until(lambda: worker.counters.totals().get("admission_wait_engine_seconds", 0) > 0.2)
        assert engine.calls("/generate") == []
        serving(run.broker, url, 0)
        await until(lambda: ready(run.broker) == 4)
