"""The worker against a fake engine and a real Redis: what becomes of tickets, whatever happens around them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from broker.errors import BrokerUnavailable
from broker.queue import Broker
from broker.types import NEWEST, EngineRecord, EngineState, VersionRun, check_group
from rollout.samples import SampleLog
from rollout.tasks import Prompt, Response, make_task
from services.monitor.figures import unrewarded
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.fakes.model import fake_log_prob, fake_routes
from tests.rollout.helpers import ENGINE, make_worker, ready, ready_groups, serving, until, working


async def test_groups_fill_the_bound_and_carry_what_the_engine_said(
    run: Run, folder: Path, make_config: ConfigFactory
) -> None:
    async with working(make_worker(make_config(), run.broker, folder)):
        await until(lambda: ready(run.broker) == 4)  # (max_lag 1 + 1) x 2 groups a step
    for group in ready_groups(run, 2):
        check_group(group)
        assert (group.worker, group.engine, group.task, group.samples_wanted) == ("w0", ENGINE, "max-digit", 2)
        assert len(group.trajectories) == 2
        for t in group.trajectories:
            assert t.versions == (VersionRun(0, len(t.response_ids), 0),)
            places = enumerate(t.response_ids.tolist(), start=len(t.prompt_ids))
            expected = [fake_log_prob("0", place, token) for place, token in places]
            np.testing.assert_allclose(t.log_probs, expected, rtol=1e-6)
            assert t.routes is not None
            np.testing.assert_array_equal(t.routes, fake_routes("0", t.tokens - 1, 2, 2, 8))
    run.assert_closed()


async def test_prompts_follow_the_ticket_and_rewards_the_task(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    engine.answer = lambda prompt, _rng: [max(prompt[:-1]), 2]  # ids of digits grow with the digit: always right
    async with working(make_worker(make_config(), run.broker, folder)):
        await until(lambda: ready(run.broker) == 4)
    task = make_task("max-digit", 0)
    groups = ready_groups(run, 2)
    assert sorted(g.prompt_index for g in groups) == [0, 1]
    for group in groups:
        digits = task.prompt(group.prompt_index).text[:-1]
        assert [i - 3 for i in group.trajectories[0].prompt_ids.tolist()[:-1]] == [int(d) for d in digits]
        assert [t.reward for t in group.trajectories] == [1.0, 1.0]
        assert [t.finish for t in group.trajectories] == ["stop", "stop"]


@pytest.mark.parametrize("kind", ["status", "garbage", "drop"])
async def test_a_failed_generation_is_retried_and_counted(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory, kind: str
) -> None:
    engine.fail("/generate", kind, times=2)
    worker = make_worker(make_config(), run.broker, folder)
    async with working(worker):
        await until(lambda: ready(run.broker) == 4)
    assert worker.counters.totals()["generation_retries"] == 4  # two requests of two samples
    assert run.broker.snapshot().counters["generation_retries"] == 4
    assert run.broker.snapshot().groups.failed == 0


async def test_an_answer_that_takes_too_long_is_asked_for_again(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    engine.fail("/generate", "hang", times=1)
    worker = make_worker(make_config(**{"rollout.generation_timeout_s": 1.0}), run.broker, folder)
    async with working(worker):
        await until(lambda: ready(run.broker) == 4)
    assert worker.counters.totals()["generation_retries"] >= 2  # more on a busy machine, where others take as long


async def test_a_group_goes_on_with_fewer_samples_when_one_never_succeeds(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    def spoil_first(answers: Any) -> Any:
        one = answers[0] if isinstance(answers, list) else answers
        if isinstance(answers, list):
            one["meta_info"]["weight_versions"][0]["version"] = "default"
        return answers

    engine.fail("/generate", "mutate", times=10_000, change=spoil_first)
    config = make_config(**{"rollout.generation_tries": 1, "rollout.samples_per_prompt": 3})
    worker = make_worker(config, run.broker, folder)
    async with working(worker):
        await until(lambda: ready(run.broker) == 4)
    assert [len(group.trajectories) for group in ready_groups(run, 2)] == [2, 2]
    assert worker.counters.totals()["samples_given_up"] == 4


async def test_a_group_with_too_few_samples_fails_and_its_prompt_comes_again(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    engine.fail("/generate", "status", times=1)
    config = make_config(**{"rollout.generation_tries": 1, "rollout.concurrent_groups": 1})
    async with working(make_worker(config, run.broker, folder)):
        await until(lambda: ready(run.broker) == 4)
    seen = run.broker.snapshot()
    assert seen.groups.failed == 1
    assert sorted(g.prompt_index for g in ready_groups(run, 2)) == [0, 1]
    run.assert_closed()


async def test_tokens_of_an_unconfirmed_version_are_never_submitted(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    engine.version = "default"
    worker = make_worker(make_config(**{"rollout.generation_tries": 2}), run.broker, folder)
    async with working(worker):
        await until(lambda: run.broker.snapshot().dead_letters >= 1, 20)
        assert ready(run.broker) == 0
    run.assert_closed()


async def test_tokens_older_than_the_admission_are_drawn_again(
    run: Run, engine: FakeEngine, url: str, folder: Path, make_config: ConfigFactory
) -> None:
    engine.version = "0"
    serving(run.broker, url, 1)  # the registry says 1, the engine still samples with 0
    worker = make_worker(make_config(**{"rollout.generation_tries": 50}), run.broker, folder)
    async with working(worker):
        await until(lambda: worker.counters.totals().get("generation_retries", 0) >= 4)
        assert ready(run.broker) == 0
        engine.version = "1"
        await until(lambda: ready(run.broker) == 4)
    assert {g.oldest_version for g in ready_groups(run, 2)} == {1}
    assert worker.counters.totals()["discarded_tokens"] > 0


async def test_aborted_samples_go_on_under_the_new_version_with_their_old_tokens(
    run: Run, engine: FakeEngine, url: str, folder: Path, make_config: ConfigFactory
) -> None:
    engine.most_tokens = 6
    config = make_config(**{"rollout.max_new_tokens": 40, "rollout.concurrent_groups": 1})
    worker = make_worker(config, run.broker, folder)
    async with working(worker):
        await until(lambda: engine.held(2))
        run.broker.register_engine(EngineRecord(ENGINE, url, EngineState.UPDATING, 0))
        await engine.pause("abort")
        engine.version, engine.most_tokens, engine.paused = "1", None, None
        serving(run.broker, url, 1)
        await until(lambda: ready(run.broker) >= 2)
    group = min(ready_groups(run, 2), key=lambda g: g.group_id)
    check_group(group)
    assert group.oldest_version == 0
    for t in group.trajectories:
        assert [r.version for r in t.versions] == [0, 1]
        assert len(t.response_ids) == 40
        kept = t.versions[0].length
        for i, token in enumerate(t.response_ids.tolist()):
            version = "0" if i < kept else "1"
            assert t.log_probs[i] == pytest.approx(fake_log_prob(version, len(t.prompt_ids) + i, token), rel=1e-6)
        assert t.routes is not None
        rows = len(t.prompt_ids) + kept - 1
        np.testing.assert_array_equal(t.routes[:rows], fake_routes("0", t.tokens - 1, 2, 2, 8)[:rows])
        np.testing.assert_array_equal(t.routes[rows:], fake_routes("1", t.tokens - 1, 2, 2, 8)[rows:])
    assert worker.counters.totals()["aborted_samples"] == 2


async def test_an_engine_that_is_away_costs_no_try(
    broker: Broker, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    run = Run(broker).start()
    broker.remove_engine("engine-1")
    with engine.serve() as first:
        port = int(first.rsplit(":", 1)[1])
    serving(broker, first, 0)  # nothing listens there now
    worker = make_worker(make_config(), broker, folder)
    async with working(worker):
        await until(lambda: worker.counters.totals().get("engine_unreachable", 0) >= 2)
        with engine.serve(port):
            await until(lambda: ready(broker) == 4)
    assert broker.snapshot().groups.failed == 0
    assert "generation_retries" not in worker.counters.totals()
    run.assert_closed()


async def test_a_worker_that_stops_hands_its_tickets_back_and_no_try_is_counted(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    engine.paused = "abort"  # requests wait
    began = time.monotonic()
    async with working(make_worker(make_config(), run.broker, folder)):
        await until(lambda: run.broker.snapshot().groups.generating == 4)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    seen = run.broker.snapshot()
    assert (seen.groups.generating, seen.counters["groups_released"]) == (0, 4)
    ticket = run.broker.admit("w1", ENGINE)
    assert (ticket.prompt_index, ticket.attempt) == (0, 0)  # type: ignore[union-attr]


async def test_tokens_of_groups_that_a_worker_hands_back_are_in_the_ledger(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    engine.token_seconds, engine.answer = 0.01, lambda _prompt, _rng: [5] * 200
    worker = make_worker(make_config(**{"rollout.max_new_tokens": 200}), run.broker, folder)
    async with working(worker):
        await until(lambda: any(len(sample.tokens) >= 2 for sample in list(engine.running.values())))
        engine.paused = "abort"  # what they have goes to the worker, and what asks for more waits
        engine.abort(None)
        # On busy cores the first that was aborted may have no token yet.
        await until(lambda: worker.counters.totals().get("generated_tokens", 0) > 0)
    seen = run.broker.snapshot()
    assert seen.tokens.failed == worker.counters.totals()["generated_tokens"] > 0
    assert seen.tokens.issued == seen.tokens.failed
    run.assert_closed()


async def test_a_worker_ends_by_itself_when_the_run_is_finished(
    run: Run, folder: Path, make_config: ConfigFactory
) -> None:
    run.broker.set_status("finished")
    await asyncio.wait_for(make_worker(make_config(), run.broker, folder).run(asyncio.Event()), 5)


def lease_deadline(broker: Broker, group_id: int) -> float:
    """Until when the lease of a group lasts, in ms of the server's clock."""
    score = broker._connection.client.zscore(broker._keys.named("generating"), str(group_id))
    assert isinstance(score, float), "the lease is lost"
    return score


async def test_leases_are_renewed_while_a_generation_lasts_and_a_lost_one_is_abandoned(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    engine.paused = "abort"
    config = make_config(**{"rollout.lease_s": 6.0, "rollout.concurrent_groups": 1})
    run.broker.initialise(config)
    worker = make_worker(config, run.broker, folder)
    async with working(worker):
        await until(lambda: bool(worker._held))
        held = next(iter(worker._held))
        first = lease_deadline(run.broker, held)
        await until(lambda: lease_deadline(run.broker, held) > first)
        assert run.broker.renew("w0", [held]) == (held,)
        assert run.broker.fail(held, "w0", "taken away by the test")
        await until(lambda: held not in worker._held)
        assert worker.counters.totals()["leases_lost"] == 1


class Flaky:
    """A broker that is away while `away` is set."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self.away, self.refused = broker, False, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._broker, name)

        def attempt(*arguments: Any, **named: Any) -> Any:
            if self.away:
                self.refused += 1
                raise BrokerUnavailable("away, by the test")
            return call(*arguments, **named)

        return attempt


async def test_a_worker_outlives_an_outage_of_redis_and_submits_what_it_has(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory
) -> None:
    flaky = Flaky(run.broker)
    engine.paused = "abort"
    worker = make_worker(make_config(), flaky, folder)
    async with working(worker):
        await until(lambda: run.broker.snapshot().groups.generating == 4)
        flaky.away = True
        engine.paused = None
        await until(lambda: flaky.refused > 8)
        assert ready(run.broker) == 0
        flaky.away = False
        await until(lambda: ready(run.broker) == 4)
    assert worker.counters.totals()["submit_wait_seconds"] > 0
    assert run.broker.snapshot().groups.failed == 0


class Awkward:
    """A task whose code misbehaves as `how` says for the first sample of each group."""

    name = "awkward"

    def __init__(self, how: str) -> None:
        self.how, self._turns = how, itertools.cycle([True, False])  # threads share it: a step of it is atomic

    def prompt(self, index: int) -> Prompt:
        if self.how == "prompt" and index == 0:
            raise LookupError("no such row")
        if self.how == "long" and index == 0:
            return Prompt(ids=(3,) * 600)
        if self.how == "vocabulary" and index == 0:
            return Prompt(ids=(3, 99))
        return Prompt(text="123>")

    def reward(self, prompt: Prompt, response: Response) -> float:
        first = next(self._turns)
        if self.how == "always":
            raise ZeroDivisionError("division by zero " + "x" * 1000)
        if first and self.how == "raise":
            raise ZeroDivisionError
        if first and self.how == "nan":
            return float("nan")
        if first and self.how == "hang":
            threading.Event().wait(600)
        return 0.5


@pytest.mark.parametrize("how", ["raise", "nan", "hang"])
async def test_a_reward_that_misbehaves_costs_its_sample_only(
    run: Run, folder: Path, make_config: ConfigFactory, how: str
) -> None:
    limit = {"rollout.reward_timeout_s": 0.2} if how == "hang" else {}
    config = make_config(**{"rollout.concurrent_groups": 1, **limit})
    worker = make_worker(config, run.broker, folder, task=Awkward(how))
    async with working(worker):
        await until(lambda: ready(run.broker) == 4)
    assert [len(group.trajectories) for group in ready_groups(run, 2)] == [1, 1]
    # On busy cores a good reward may be late, too: then its group fails, and comes again.
    failed = run.broker.snapshot().groups.failed
    assert how == "hang" or failed == 0
    assert worker.counters.totals()["reward_failures"] == 4 + 2 * failed


async def test_a_reward_that_raises_is_logged_once_in_a_while_and_its_text_is_in_the_heartbeat(
    run: Run, folder: Path, make_config: ConfigFactory
) -> None:
    worker = make_worker(make_config(), run.broker, folder, task=Awkward("raise"))

    def said() -> dict[str, Any]:
        return run.broker.snapshot().workers.get("w0", {})

    with capture_logs() as logs:
        async with working(worker):
            await until(lambda: said().get("reward_failures", 0) >= 4)
            await until(lambda: said().get("samples_rewarded", 0) >= 4)
    assert said()[f"reward_failures{NEWEST}"] == "ZeroDivisionError: "
    assert unrewarded(run.broker.snapshot().workers).share == pytest.approx(0.5, abs=0.2)
    (line,) = [line for line in logs if line["event"] == "samples got no reward"]
    assert (line["samples"], line["newest"]) == (1, "ZeroDivisionError: ")


async def test_a_group_that_failed_for_its_rewards_says_why(run: Run, folder: Path, make_config: ConfigFactory) -> None:
    async with working(make_worker(make_config(), run.broker, folder, task=Awkward("always"))):
        await until(lambda: run.broker.snapshot().dead_letters >= 1)
    for letter in run.broker.dead_letters():
        assert letter["reason"].startswith(
            "0 of 2 samples, 1 needed; a reward failed: ZeroDivisionError: division by zero "
        )
        assert len(letter["reason"]) < 400


@pytest.mark.parametrize("how", ["prompt", "long", "vocabulary"])
async def test_a_prompt_that_cannot_be_sent_goes_to_the_dead_letters_at_once(
    run: Run, engine: FakeEngine, folder: Path, make_config: ConfigFactory, how: str
) -> None:
    worker = make_worker(make_config(), run.broker, folder, task=Awkward(how))
    async with working(worker):
        await until(lambda: ready(run.broker) == 4)
    assert run.broker.snapshot().dead_letters == 1
    assert all(np.max(call["input_ids"]) < 32 for call in engine.calls("/generate"))


async def test_a_group_that_cannot_be_noted_for_people_is_submitted_all_the_same_and_counted(
    run: Run, folder: Path, make_config: ConfigFactory
) -> None:
    worker = make_worker(make_config(), run.broker, folder)
    worker._samples = SampleLog(folder / "config.json" / "below-a-file" / "w0.jsonl", worker._codec)
    async with working(worker):
        await until(lambda: ready(run.broker) == 4)
    assert worker.counters.totals()["groups_not_noted"] >= 2
