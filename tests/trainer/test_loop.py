"""The training loop over a real broker on a real Redis, with a bigram policy and an engine that is a table."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.queue import Broker
from tests.conftest import ConfigFactory
from tests.trainer.sim import BigramPolicy, MemoryCheckpoints, World, Wrapped, records, trainer_of
from trainer.progress import RunFailed
from trainer.versions import folder_of, versions_on_disk


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


def test_a_run_whose_data_set_ends_trains_whole_steps_and_is_finished(config: Any, handle: Broker) -> None:
    world = World(config, handle)
    world.prompts = 10
    trainer = trainer_of(config, handle, world, MemoryCheckpoints(), clock=itertools.count().__next__)
    with capture_logs() as said:
        assert trainer.run() == "finished"
    seen = handle.snapshot()
    assert (seen.status, seen.step, seen.durable_step, seen.published) == ("finished", 3, 3, 3)
    assert (seen.groups.ready, seen.dead_letters) == (1, 0)
    assert (config.run.folder / "model-final" / "manifest.json").exists()
    (end,) = [line for line in said if line["event"] == "the data set has ended"]
    assert (end["steps"], end["of"], end["groups_left_over"]) == (3, 6, 1)


def test_a_data_set_without_enough_prompts_for_one_step_fails_and_says_so(config: Any, handle: Broker) -> None:
    world = World(config, handle)
    world.prompts = 2
    trainer = trainer_of(config, handle, world, MemoryCheckpoints(), clock=itertools.count().__next__)
    with pytest.raises(RunFailed, match=r"before the first step had its 3 groups.*groups_per_step"):
        trainer.run()


@pytest.mark.parametrize("trained", [0, 3])
def test_prompts_that_became_dead_letters_are_named_with_the_newest_reason_when_no_more_come(
    config: Any, handle: Broker, trained: int
) -> None:
    world = World(config, handle)
    world.prompts = 10
    real = world.group

    def group(ticket: Any) -> Any:
        if ticket.prompt_index >= trained:
            raise ValueError("no reward: 'seven' is no number")
        return real(ticket)

    world.group = group  # type: ignore[method-assign]
    trainer = trainer_of(config, handle, world, MemoryCheckpoints(), clock=itertools.count().__next__)
    if trained:
        with capture_logs() as said:
            assert trainer.run() == "finished"
        (end,) = [line for line in said if line["event"] == "the data set has ended"]
        assert end["dead_letters"] == 7
    else:
        with pytest.raises(RunFailed, match=r"10 of its prompts are dead letters.*'seven' is no number.*--requeue"):
            trainer.run()


def test_version_zero_is_published_before_anything_else(config: Any, handle: Broker) -> None:
    trainer = trainer_of(config, handle, World(config, handle), MemoryCheckpoints())
    trainer.attach()
    trainer.close()
    published = handle.published()
    assert published is not None
    assert published.version == 0
    assert folder_of(config.run.folder / "weights", 0).is_dir()


def test_weights_that_a_trainer_that_died_was_writing_are_removed(config: Any, handle: Broker) -> None:
    run = config.run.folder
    unfinished = [run / "weights" / ".v000003.partial", run / ".model-final.partial"]
    kept = [run / "weights" / ".other", run / "weights" / "v000002"]
    for folder in (*unfinished, *kept):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
    trainer = trainer_of(config, handle, World(config, handle), MemoryCheckpoints())
    trainer.attach()
    trainer.close()
    assert not any(folder.exists() for folder in unfinished)
    assert all(folder.exists() for folder in kept)


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


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_system_clock_that_is_set_changes_no_duration(config: Any, handle: Broker, jump_s: float) -> None:
    wall = [1_700_000_000.0]
    checkpoints, policy = MemoryCheckpoints(), BigramPolicy()

    def step_on(step: int) -> bool:
        if step == 2:
            wall[0] += jump_s
        return False

    policy.poison = step_on
    trainer_of(config, handle, World(config, handle), checkpoints, policy=policy, wall=lambda: wall[0]).run()
    times = [record["time_s"] for record in records(config)]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 3600
    # What the next trainer counts on from is by the clock as it is set now.
    assert abs(wall[0] - times[-1] - checkpoints.kept[-1][0].extra["began"]) < 1e-3


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
