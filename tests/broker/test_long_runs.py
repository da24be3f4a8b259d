"""What shows after many groups: flat memory, and lengths that come out as they went in."""

from __future__ import annotations

import heapq
import random

import pytest

from broker.queue import Broker
from broker.types import Outcome, Refused, Ticket
from tests.broker.helpers import ENGINE, WORKER, Run, finished
from tests.conftest import RUN, ConfigFactory

GROUPS_PER_STEP = 8


@pytest.mark.parametrize("groups", [2000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_memory_is_flat(broker: Broker, make_config: ConfigFactory, groups: int) -> None:
    broker.initialise(make_config(**{"trainer.groups_per_step": GROUPS_PER_STEP, "run.steps": 10**6, "lag.max": 3}))
    run = Run(broker).start()
    client = broker._connection.client

    def train_until(count: int) -> tuple[int, int]:
        while run.version * GROUPS_PER_STEP < count:
            tickets = broker.admit_many(WORKER, ENGINE, GROUPS_PER_STEP)
            assert not isinstance(tickets, Refused)
            broker.submit_many([finished(ticket, RUN) for ticket in tickets])
            batch = run.pull(GROUPS_PER_STEP)
            broker.step(run.epoch, run.version, [Outcome(d.group_id) for d in batch], {0: 64}, {"loss": 1.0})
            run.version += 1
            broker.commit(run.epoch, run.version)
            run.publish()
            broker.forget_version(run.version - 1)
        return int(client.info("memory")["used_memory_dataset"]), client.dbsize()

    # the lists for people (events, metrics: 1000 entries each) are full after 1000 steps, at most 300 bytes an entry
    first, keys = train_until(groups // 2)
    last, keys_then = train_until(groups)
    lists = max(0, 1000 - groups // 2 // GROUPS_PER_STEP) * 2 * 300
    assert keys_then == keys
    assert last - first < 100_000 + lists, f"{last - first} bytes more after {groups // 2} groups"
    run.assert_closed()


@pytest.mark.parametrize("waits", [True, False])
def test_slow_prompts_are_trained_as_often_as_fast_ones(
    broker: Broker, make_config: ConfigFactory, waits: bool
) -> None:
    """Generation takes as long as the response is; lengths spread over two orders of magnitude."""
    steps = 30
    broker.initialise(make_config(**{"trainer.groups_per_step": GROUPS_PER_STEP, "run.steps": steps, "lag.max": 1}))
    if not waits:  # the trainer takes what is ready, and late groups go stale
        broker._connection.client.hset(broker._keys.policy, "straggler_ms", 0)
    run, chance = Run(broker).start(), random.Random(0)
    lengths: dict[int, int] = {}
    busy: list[tuple[float, int, Ticket]] = []
    trained: list[int] = []
    now = 0.0
    while run.version < steps:
        while not isinstance(ticket := broker.admit(WORKER, ENGINE), Refused):
            length = lengths.setdefault(ticket.prompt_index, int(chance.lognormvariate(3, 1.2)) + 1)
            heapq.heappush(busy, (now + length, ticket.group_id, ticket))
        batch = broker.pull(run.epoch, run.version, GROUPS_PER_STEP)
        if not isinstance(batch, Refused):
            trained += [lengths[d.prompt_index] for d in batch]
            run.step(batch)
            run.publish()
            continue
        now, _, ticket = heapq.heappop(busy)
        broker.submit(finished(ticket, RUN, response=4))
    seen = broker.snapshot()
    issued = [lengths[prompt] for prompt in range(steps * GROUPS_PER_STEP)]
    if waits:
        assert seen.groups.stale == 0
        assert sorted(trained) == sorted(issued)
    else:
        assert seen.groups.stale > 0
        assert sum(trained) < sum(issued)
    run.assert_closed()
