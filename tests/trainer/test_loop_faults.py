"""The training loop where something goes wrong: kills, bad payloads, a lost Redis, a second trainer, a stop."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from broker.errors import BrokerUnavailable, CorruptPayload, Fenced
from broker.queue import Broker
from broker.types import Group, VersionRun
from tests.trainer.sim import BigramPolicy, MemoryCheckpoints, World, Wrapped, records, trainer_of
from trainer.progress import RunFailed


class Killed(BaseException):
    """Stands for kill -9 at this point."""


@pytest.mark.parametrize("point", ["step", "commit", "publish", "after step", "after commit", "save"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_killing_the_trainer_at_any_point_trains_no_group_twice_and_loses_none(
    config: Any, handle: Broker, point: str, at: int
) -> None:
    checkpoints, world = MemoryCheckpoints(), World(config, handle)
    calls = 0
    method = point.removeprefix("after ")

    def kill(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not point.startswith("after"):
            raise Killed
        answer = getattr(handle, method)(*arguments, **named)
        if calls == at:
            raise Killed
        return answer

    broker = Wrapped(handle, **({} if point == "save" else {method: kill}))
    first = BigramPolicy()
    trainer = trainer_of(config, broker, world, checkpoints, policy=first)
    if point == "save":
        staged = checkpoints.stage

        def save_then_die(state: Any) -> Any:
            write = staged(state)

            def job() -> None:
                nonlocal calls
                calls += 1
                write()
                if calls == at:
                    raise Killed

            return job

        checkpoints.stage = save_then_die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        trainer.run()
    survived = checkpoints.kept[-1][0].step if checkpoints.kept else 0
    highest = handle.snapshot().highest_version

    second = BigramPolicy()
    resumed = trainer_of(config, handle, world, checkpoints, policy=second)
    assert resumed.run() == "finished"
    assert resumed.progress.version > highest
    seen = handle.snapshot()
    assert seen.groups.closes
    assert seen.tokens.closes
    assert seen.groups.trained + seen.groups.filtered == seen.groups.durable == 18
    # In the surviving history each step trained three groups, none of them twice.
    effects = first.trained[:survived] + second.trained
    assert len(effects) == 6
    fingerprints = [tuple(b.behaviour_log_probs.tolist()) + tuple(b.labels.tolist()) for step in effects for b in step]
    assert len(set(fingerprints)) == len(fingerprints)
    assert [r["step"] for r in records(config)] == [1, 2, 3, 4, 5, 6]
    assert max(r["lag_max"] for r in records(config)) <= config.lag.max


def test_a_restart_under_an_empty_redis_goes_on_with_the_prompts_of_the_checkpoint(
    config: Any, handle: Broker, redis_url: str
) -> None:
    import redis

    checkpoints, world = MemoryCheckpoints(), World(config, handle)
    trainer = trainer_of(config, handle, world, checkpoints, stop=lambda: trainer.progress.step >= 4)
    assert trainer.run() == "stopped"
    with redis.Redis.from_url(redis_url, socket_timeout=5) as client:
        client.flushall()
    handle.initialise(config)
    world = World(config, handle)
    assert trainer_of(config, handle, world, checkpoints).run() == "finished"
    seen = handle.snapshot()
    assert seen.step == 6
    assert seen.groups.closes


def test_a_gradient_that_is_not_finite_stops_before_the_update_keeps_the_batch_and_returns_the_groups(
    config: Any, handle: Broker
) -> None:
    policy, world = BigramPolicy(), World(config, handle)
    policy.poison = lambda step: step == 2
    trainer = trainer_of(config, handle, world, MemoryCheckpoints(), policy=policy)
    with pytest.raises(RunFailed, match="step 3: the gradient is not finite"):
        trainer.run()
    assert policy.steps == 2
    assert torch.isfinite(policy.table).all()
    seen = handle.snapshot()
    assert (seen.step, seen.groups.leased) == (2, 0)
    folder = config.run.folder / "failed-batch-3"
    assert len(list(folder.glob("group-*.bin"))) == 3
    assert json.loads((folder / "rank-0.json").read_text())["version"] == 2
    assert (folder / "rank-0.safetensors").stat().st_size > 0


def test_a_payload_that_cannot_be_read_is_rejected_and_the_step_goes_on_with_others(
    config: Any, handle: Broker
) -> None:
    broken: list[int] = []

    def fetch(ids: Any) -> Any:
        if not broken:
            broken.append(ids[1])
        if broken[0] in ids:
            raise CorruptPayload(broken[0], "checksum")
        return handle.fetch(ids)

    world = World(config, handle)
    assert trainer_of(config, Wrapped(handle, fetch=fetch), world, MemoryCheckpoints()).run() == "finished"
    seen = handle.snapshot()
    assert seen.groups.failed == 1
    assert seen.groups.closes
    assert [int(letter["group_id"]) for letter in handle.dead_letters()] == broken


def test_a_token_id_that_the_model_does_not_have_is_rejected_before_it_ends_the_trainer(
    config: Any, handle: Broker
) -> None:
    spoilt: list[int] = []

    def fetch(ids: Any) -> Any:
        spoilt[:] = spoilt or [ids[1]]
        return [foreign(group) if group.group_id in spoilt else group for group in handle.fetch(ids)]

    def foreign(group: Group) -> Group:
        first, *others = group.trajectories
        ids = np.full_like(first.response_ids, 10**6)
        return replace(group, trajectories=(structs.replace(first, response_ids=ids), *others))

    broker = Wrapped(handle, fetch=fetch)
    trainer = trainer_of(config, broker, World(config, handle), MemoryCheckpoints(), vocabulary=1000)
    assert trainer.run() == "finished"
    (letter,) = handle.dead_letters()
    assert int(letter["group_id"]) == spoilt[0]
    assert "token id is outside 0 .. 999" in str(letter["reason"])


def test_a_trainer_whose_place_was_taken_stops_and_names_the_newer_epoch(config: Any, handle: Broker) -> None:
    world = World(config, handle)
    old = trainer_of(config, handle, world, MemoryCheckpoints())
    old.attach()
    new = trainer_of(config, handle, world, MemoryCheckpoints())
    new.attach()
    with pytest.raises(Fenced, match=str(new.progress.epoch)):
        old.step()
    old.close()
    new.close()


def test_no_version_is_named_again_whose_weights_are_on_disk_although_redis_forgot_it(
    config: Any, handle: Broker
) -> None:
    (config.run.folder / "weights" / "v000041").mkdir(parents=True)
    trainer = trainer_of(config, handle, World(config, handle), MemoryCheckpoints())
    trainer.attach()
    trainer.close()
    assert trainer.progress.version == 42


def test_an_impossible_lag_stops_the_trainer_before_the_update(config: Any, handle: Broker) -> None:
    world, policy = World(config, handle), BigramPolicy()
    trainer = trainer_of(config, handle, world, MemoryCheckpoints(), policy=policy)
    trainer.attach()
    trainer.step()

    def fetch(ids: Any) -> Any:
        groups = handle.fetch(ids)
        trainer.progress.version += 5  # as if the queue had let them through
        return groups

    trainer.broker = Wrapped(handle, fetch=fetch)
    with pytest.raises(RunFailed, match="beyond the bound of 1"):
        trainer.step()
    trainer.close()
    assert policy.steps == 1


def test_a_bound_that_is_lowered_after_a_batch_was_pulled_fails_no_run(config: Any, handle: Broker) -> None:
    world, policy = World(config, handle), BigramPolicy()
    trainer = trainer_of(config, handle, world, MemoryCheckpoints(), policy=policy)
    trainer.attach()
    handle.set_max_lag(4)
    for _ in range(4):
        trainer.step()

    def fetch(ids: Any) -> Any:
        handle.set_max_lag(1)
        return [of_version(group, trainer.progress.version - 3) for group in handle.fetch(ids)]

    trainer.broker = Wrapped(handle, fetch=fetch)
    trainer.step()
    trainer.close()
    assert policy.steps == 5


def of_version(group: Group, version: int) -> Group:
    """The same, as if `version` had sampled it."""
    sampled = [structs.replace(t, versions=(VersionRun(0, len(t.response_ids), version),)) for t in group.trajectories]
    return replace(group, trajectories=tuple(sampled))


def test_a_request_to_stop_ends_the_run_with_a_checkpoint_and_an_empty_lease(config: Any, handle: Broker) -> None:
    checkpoints, world = MemoryCheckpoints(), World(config, handle)
    trainer = trainer_of(config, handle, world, checkpoints, stop=lambda: trainer.progress.step >= 3)
    assert trainer.run() == "stopped"
    assert checkpoints.kept[-1][0].step == 3
    seen = handle.snapshot()
    assert (seen.durable_step, seen.groups.leased) == (3, 0)


def test_a_short_absence_of_redis_is_waited_out(config: Any, handle: Broker) -> None:
    failures = iter([True] * 3)

    def pull(*arguments: Any) -> Any:
        if next(failures, False):
            raise BrokerUnavailable("away")
        return handle.pull(*arguments)

    world = World(config, handle)
    assert trainer_of(config, Wrapped(handle, pull=pull), world, MemoryCheckpoints()).run() == "finished"
