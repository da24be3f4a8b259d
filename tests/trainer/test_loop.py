"""The training loop over a real broker on a real Redis, with a bigram policy and an engine that is a table."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from broker.errors import BrokerUnavailable, CorruptPayload, Fenced
from broker.queue import Broker
from broker.types import Group
from tests.conftest import ConfigFactory
from tests.trainer.sim import BigramPolicy, MemoryCheckpoints, World, records, trainer_of
from trainer.progress import RunFailed
from trainer.versions import folder_of, versions_on_disk


class Wrapped:
    """A broker in which some methods are replaced."""

    def __init__(self, inner: Broker, **replaced: Any) -> None:
        self._inner, self._replaced = inner, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._inner, name)


class Killed(BaseException):
    """Stands for kill -9 at this point."""


@pytest.fixture
def config(make_config: ConfigFactory) -> Any:
    return make_config(**{"run.steps": 6, "trainer.checkpoint": {"interval_steps": 2}, "trainer.groups_per_step": 3})


@pytest.fixture
def handle(redis_url: str, config: Any) -> Any:
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    yield broker
    broker.close()


def test_a_run_trains_all_its_steps_and_ends_finished_with_everything_durable(config: Any, handle: Broker) -> None:
    world = World(config, handle)
    assert trainer_of(config, handle, world, MemoryCheckpoints()).run() == "finished"
    seen = handle.snapshot()
    assert (seen.status, seen.step, seen.durable_step, seen.version) == ("finished", 6, 6, 6)
    assert seen.groups.closes
    assert seen.tokens.closes
    assert seen.groups.trained + seen.groups.filtered == seen.groups.durable == 18
    assert (config.run.folder / "model-final" / "manifest.json").exists()
    assert [r["step"] for r in records(config)] == [1, 2, 3, 4, 5, 6]


def test_version_zero_is_published_before_anything_else(config: Any, handle: Broker) -> None:
    trainer = trainer_of(config, handle, World(config, handle), MemoryCheckpoints())
    trainer.attach()
    trainer.close()
    published = handle.published()
    assert published is not None
    assert published.version == 0
    assert folder_of(config.run.folder / "weights", 0).is_dir()


def test_every_record_holds_the_promised_keys_and_is_plain_json(config: Any, handle: Broker) -> None:
    trainer_of(config, handle, World(config, handle), MemoryCheckpoints()).run()
    wanted = {
        "step", "version", "time_s", "reward_mean", "reward_std", "loss", "grad_norm", "learning_rate",
        "entropy", "kl_behaviour", "log_ratio_abs_mean", "log_ratio_abs_max", "clip_fraction", "ess",
        "lag_min", "lag_mean", "lag_max", "by_lag", "sat", "response_tokens", "total_tokens",
        "response_length_mean", "groups", "groups_filtered", "replay_overlap", "wait_s", "wait_reason",
        "fetch_s", "pack_s", "log_prob_s", "forward_backward_s", "optimizer_s", "export_s", "checkpoint_s",
        "step_s", "tokens_per_s", "queue_wait_ms_mean",
    }  # fmt: skip
    sat = {"q", "gate_rate", "c_min", "radius_low", "radius_high", "d_star_plus", "d_star_minus", "new_clip_fraction"}
    for record in records(config):
        assert not wanted - set(record)
        assert not (sat | {"nonfinite_fraction"}) - set(record["sat"])
        for entry in record["by_lag"].values():
            assert {"tokens", "groups", "log_ratio_abs", "gate_rate"} <= set(entry)
        assert sum(e["groups"] for e in record["by_lag"].values()) == record["groups"] == 3
        assert record["response_tokens"] == 3 * 2 * 4
        assert record["total_tokens"] == 3 * 2 * 5
        parts = [v for k, v in record.items() if k.endswith("_s") and k not in ("time_s", "step_s", "tokens_per_s")]
        assert sum(parts) <= record["step_s"]
    assert handle.snapshot().metrics["step"] == 6


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_no_token_is_trained_beyond_the_bound_and_the_bound_is_used(
    redis_url: str, make_config: ConfigFactory, max_lag: int
) -> None:
    config = make_config(**{"run.steps": 10, "lag.max": max_lag})
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    trainer_of(config, broker, World(config, broker), MemoryCheckpoints()).run()
    assert max(r["lag_max"] for r in records(config)) == max_lag
    assert set(broker.snapshot().trained_by_lag) == set(range(max_lag + 1))
    broker.close()


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_every_nth_version_is_published_and_old_weights_go(
    redis_url: str, make_config: ConfigFactory, interval: int
) -> None:
    config = make_config(**{"run.steps": 9, "lag.max": 3, "weights.publish_interval": interval, "weights.keep": 2})
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    trainer_of(config, broker, World(config, broker), MemoryCheckpoints()).run()
    kept = versions_on_disk(config.run.folder / "weights")
    assert kept[-1] == 9
    assert [r.version for r in broker.versions()] == kept
    assert 2 <= len(kept) <= 3  # the two newest, and one that the engine may still serve
    assert all(v % interval == 0 for v in kept[:-1])  # the last version is always published
    broker.close()


@pytest.mark.slow
def test_the_policy_learns(redis_url: str, make_config: ConfigFactory) -> None:
    config = make_config(
        **{
            "run.steps": 60,
            "trainer.groups_per_step": 7,
            "rollout.samples_per_prompt": 8,
            "rollout.max_new_tokens": 2,
            "trainer.optimizer": {"learning_rate": 0.1},
            "trainer.checkpoint": {"interval_steps": 50},
        }
    )
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    trainer_of(config, broker, World(config, broker), MemoryCheckpoints()).run()
    rewards = [r["reward_mean"] for r in records(config)]
    assert sum(rewards[:3]) / 3 < 0.25
    assert sum(rewards[-3:]) / 3 > 0.8
    broker.close()


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
        return replace(group, trajectories=(replace(first, response_ids=ids), *others))

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


def test_groups_of_equal_reward_count_as_filtered_and_move_nothing(config: Any, handle: Broker) -> None:
    world, policy = World(config, handle), BigramPolicy()
    world.reward = lambda prompt, answer: 0.7
    trainer_of(config, handle, world, MemoryCheckpoints(), policy=policy).run()
    assert (policy.table == 0).all()
    seen = handle.snapshot()
    assert (seen.groups.filtered, seen.groups.trained) == (18, 0)
    assert seen.groups.closes
    assert all(r["groups_filtered"] == 3 and r["loss"] == 0 and math.isfinite(r["grad_norm"]) for r in records(config))


@pytest.mark.parametrize("staleness", ["lag", "ess"])
def test_a_reference_model_holds_the_policy_and_a_stale_step_is_smaller(
    redis_url: str, make_config: ConfigFactory, staleness: str
) -> None:
    held: list[float] = []
    for beta in (0.0, 10.0):
        config = make_config(
            **{
                "run.steps": 8,
                "run.id": f"held-{beta}-{staleness}",
                "lag.max": 2,
                "trainer.loss": {"reference_kl": beta},
                "trainer.optimizer": {"learning_rate": 0.05, "staleness": staleness},
            }
        )
        broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
        broker.initialise(config)
        policy = BigramPolicy()
        trainer_of(config, broker, World(config, broker), MemoryCheckpoints(), policy=policy).run()
        broker.close()
        found = records(config)
        for record in found:
            factor = 1 / max(1.0, record["lag_mean"]) if staleness == "lag" else record["ess"]
            assert record["learning_rate"] == pytest.approx(0.05 * factor)
            assert (record["kl_reference"] is None) == (beta == 0.0)
        held.append(float(policy.table.detach().square().sum()))
    assert held[1] < held[0]


def test_a_checkpoint_that_an_operator_asks_for_is_made_at_the_next_step_and_once(
    redis_url: str, make_config: ConfigFactory
) -> None:
    config = make_config(**{"run.steps": 6, "trainer.checkpoint": {"interval_steps": 50}})
    handle = Broker.connect(redis_url, config.run.id, timeout_s=5)
    handle.initialise(config)
    checkpoints, world = MemoryCheckpoints(), World(config, handle)
    asked = Wrapped(handle, checkpoint_asked=lambda: 2 if handle.snapshot().step >= 2 else -1)
    assert trainer_of(config, asked, world, checkpoints).run() == "finished"
    assert [state.step for state, _, _ in checkpoints.kept] == [3, 6]
    handle.close()


@pytest.mark.parametrize(("budget", "passes"), [(8192, 0), (4, 6)])
def test_a_log_prob_pass_is_made_only_where_a_rank_has_several_micro_batches(
    config: Any, handle: Broker, budget: int, passes: int
) -> None:
    class Counting(BigramPolicy):
        calls = 0

        def log_probs(self, micro_batches: Any) -> list[Any]:
            self.calls += 1
            return super().log_probs(micro_batches)

    policy = Counting()
    trainer = config.trainer.model_copy(update={"micro_batch_tokens": budget})
    config = config.model_copy(update={"trainer": trainer})
    trainer_of(config, handle, World(config, handle), MemoryCheckpoints(), policy=policy).run()
    assert policy.calls == passes
    assert all(r["sat"]["q"] is not None for r in records(config))


def test_several_optimizer_steps_a_batch_make_one_version_and_train_each_sample_once(
    config: Any, handle: Broker
) -> None:
    trainer = config.trainer.model_copy(update={"steps_per_batch": 2})
    config = config.model_copy(update={"trainer": trainer})
    policy = BigramPolicy()
    trainer_of(config, handle, World(config, handle), MemoryCheckpoints(), policy=policy).run()
    found = records(config)
    assert policy.steps == 12
    assert [(r["step"], r["version"]) for r in found] == [(i, i) for i in range(1, 7)]
    seen = handle.snapshot()
    assert (seen.step, seen.version) == (6, 6)
    assert seen.groups.closes
    samples = config.trainer.groups_per_step * config.rollout.samples_per_prompt
    for number, record in enumerate(found):
        parts = policy.trained[2 * number : 2 * number + 2]
        assert [sum(b.sequences for b in part) for part in parts] == [samples // 2, samples - samples // 2]
        assert sum(int(b.loss_mask.sum()) for part in parts for b in part) == record["trained_tokens"]
        assert record["lag_max"] <= config.lag.max
