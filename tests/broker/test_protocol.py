"""The whole protocol against the model: any order of commands, crashes of every process between any two of them.

After each command: Redis and the model agree on ledger, histograms, prompts and versions; the ledger closes; nothing
was trained beyond the bound; in the history that survives no group and no prompt is trained twice, and none is lost.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker import scripts
from broker.errors import Fenced
from broker.queue import Broker
from broker.server import EmbeddedServer
from broker.types import EngineRecord, EngineState, Outcome, Refused, VersionRecord
from tests.broker.helpers import finished
from tests.broker.machine import ENGINES, HOUR, REACHED, WORKERS, Checkpoint, Compared
from tests.conftest import RUN


class Protocol(Compared):
    """The commands of workers, trainer and operator, and crashes."""

    # --- workers ------------------------------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS), engine=st.sampled_from(ENGINES), times=st.integers(1, 4))
    def admit(self, worker: str, engine: str, times: int) -> None:
        for _ in range(times):
            answer, expected = self.broker.admit(worker, engine), self.model.admit(engine)
            if isinstance(answer, Refused):
                assert answer.reason == expected
                return
            assert (answer.prompt_index, answer.attempt, answer.engine_version) == expected
            self.model.admitted(answer.group_id, worker, *expected)
            self.tickets.append((worker, answer))

    @precondition(lambda self: self.tickets)
    @rule(picks=st.lists(st.integers(0, 7), min_size=1, max_size=4), age=st.integers(-1, 2), response=st.integers(1, 4))
    def submit(self, picks: list[int], age: int, response: int) -> None:
        for pick in picks:
            worker, ticket = self.tickets[-1 - pick % len(self.tickets)]
            version = min(max(0, ticket.engine_version + age), max(0, self.model.published))
            held = self.model.groups.get(ticket.group_id)
            if held is not None and held.state != "generating":
                continue  # the same worker never submits two different groups under one ticket
            group = finished(ticket, RUN, version, worker=worker, response=response)
            answer = self.broker.submit(group)
            expected = self.model.submit(ticket.group_id, worker, version, 2 * response)
            assert (answer.reason if isinstance(answer, Refused) else answer) == expected
            if pick == 0:
                again = self.broker.submit(group)
                expected = self.model.submit(ticket.group_id, worker, version, 2 * response, repeated=True)
                assert (again.reason if isinstance(again, Refused) else again) == expected

    @precondition(lambda self: self.tickets)
    @rule(pick=st.integers(0, 7), stranger=st.booleans())
    def somebody_submits_what_is_not_theirs(self, pick: int, stranger: bool) -> None:
        """Another worker, or the holder once more with other content: neither replaces what is there."""
        holder, ticket = self.tickets[-1 - pick % len(self.tickets)]
        held = self.model.groups.get(ticket.group_id)
        if not stranger and (held is None or held.state == "generating"):
            return
        worker = next(w for w in WORKERS if (w != holder) == stranger)
        group = finished(ticket, RUN, ticket.engine_version, worker=worker, response=7)
        answer = self.broker.submit(group)
        assert isinstance(answer, Refused)
        assert answer.reason == self.model.submit(ticket.group_id, worker, ticket.engine_version, 14)

    @precondition(lambda self: self.tickets)
    @rule(
        pick=st.integers(0, 7),
        mode=st.sampled_from(["try", "dead", "again"]),
        worker=st.sampled_from(WORKERS),
        tokens=st.integers(0, 9),
    )
    def give_up(self, pick: int, mode: str, worker: str, tokens: int) -> None:
        _, ticket = self.tickets[-1 - pick % len(self.tickets)]
        if mode == "again":
            answer, tokens = self.broker.release(ticket.group_id, worker), 0
        else:
            answer = self.broker.fail(ticket.group_id, worker, "reason", tokens, final=mode == "dead")
        assert answer == self.model.fail(ticket.group_id, worker, tokens, mode)

    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker: str) -> None:
        ids = [t.group_id for _, t in self.tickets[-8:]]
        assert self.broker.renew(worker, ids) == self.model.renew(worker, ids)

    @rule(tenths=st.sampled_from([6, 11]))
    def time_passes(self, tenths: int) -> None:
        self.redis.hincrby(self.broker._keys.policy, "clock_shift_ms", HOUR * tenths // 10)
        self.model.now += HOUR * tenths // 10

    @precondition(lambda self: not self.leased and self.model.of("generating"))
    @rule()
    def patience_with_stragglers_ends(self) -> None:
        """Workers keep their leases while the trainer polls until it does not wait any longer."""
        for _ in range(4):
            if not self.leased:
                self.pull()
            for worker in WORKERS:
                self.renew(worker)
            self.time_passes(6)

    # --- trainer ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.leased)
    @rule()
    def pull(self) -> None:
        answer = self.broker.pull(self.epoch, self.model.version, self.settings.groups_per_step)
        expected = self.model.pull(self.settings.groups_per_step)
        if isinstance(answer, Refused):
            assert answer.reason == expected
            return
        self.leased = [d.group_id for d in answer]
        assert self.leased == expected
        for d, group in zip(answer, self.broker.fetch(self.leased), strict=True):
            assert (group.prompt_index, group.attempt, group.response_tokens) == (
                d.prompt_index,
                d.attempt,
                d.response_tokens,
            )
            assert group.oldest_version == d.oldest_version

    @precondition(lambda self: self.leased)
    @rule(filtered=st.lists(st.booleans(), min_size=3, max_size=3), leave_out=st.booleans())
    def step(self, filtered: list[bool], leave_out: bool) -> None:
        outcomes = list(zip(self.leased, filtered, strict=False))
        if leave_out and len(outcomes) > 1:
            outcomes.pop()
        version, lags = self.model.version, Counter[int]()
        for i, skip in outcomes:
            g = self.model.groups[i]
            self.history.append((i, g.prompt))
            self.consumed.append(i)
            if not skip:
                lags[version - g.oldest] += g.tokens
        self.leased = []
        self.model.step(outcomes)
        said = [Outcome(i, skip) for i, skip in outcomes]
        for _ in range(2):  # a repeated step changes nothing
            self.broker.step(self.epoch, version, said, lags, {"n": version})

    @precondition(lambda self: self.leased)
    @rule()
    def abort_step(self) -> None:
        assert self.broker.return_leased(self.epoch) == self.model.return_leased()
        self.leased = []

    @precondition(lambda self: self.leased)
    @rule()
    def reject(self) -> None:
        group_id = self.leased.pop()
        assert self.broker.reject(self.epoch, group_id, "corrupt")
        self.model.reject(group_id)

    @precondition(lambda self: not self.leased)
    @rule()
    def save(self) -> None:
        m = self.model
        cursor = self.broker.prompt_cursor(self.epoch, m.step_number)
        assert cursor == m.cursor()
        saved = Checkpoint(m.step_number, m.version, tuple(self.consumed), cursor, tuple(self.history))
        self.checkpoints = [*self.checkpoints, saved][-3:]

    @rule()
    def commit(self) -> None:
        step = self.checkpoints[-1].step
        if step <= self.model.step_number:
            assert self.broker.commit(self.epoch, step) == self.model.commit(step)
            self.consumed = [i for i in self.consumed if i in self.model.groups]

    @rule(back=st.integers(1, 2))
    def crash_of_the_trainer(self, back: int) -> None:
        self.old_epochs.append(self.epoch)
        self.restart(self.checkpoints[-min(back, len(self.checkpoints))])

    @rule()
    def publish(self) -> None:
        self.broker.publish(self.epoch, VersionRecord(self.model.version, self.model.step_number, "path", "sum"))
        self.model.published = self.model.version

    @precondition(lambda self: self.old_epochs)
    @rule()
    def a_stale_trainer_is_fenced(self) -> None:
        for act in (self.broker.return_leased, self.broker.name_version, self.broker.renew_trainer):
            with pytest.raises(Fenced):
                act(self.old_epochs[-1])

    @rule(groups=st.integers(1, 6), newest=st.booleans(), step=st.booleans(), leave=st.integers(0, 2))
    def work(self, groups: int, newest: bool, step: bool, leave: int) -> None:
        """Undisturbed work in batches, but for the first `leave` groups, which go on being generated."""
        if newest:
            self.publish()
            self.update_engine("e1")
        answer = self.broker.admit_many("w1", "e1", groups)
        wanted: list[tuple[int, int, int]] = []
        while len(wanted) < groups and isinstance(expected := self.model.admit("e1"), tuple):
            wanted.append(expected)
            self.model.admitted(-len(wanted), "w1", *expected)  # its id comes below
        if isinstance(answer, Refused):
            assert not wanted
            assert answer.reason == expected
        else:
            assert [(a.prompt_index, a.attempt, a.engine_version) for a in answer] == wanted
            for serial, ticket in enumerate(answer, start=1):
                self.model.groups[ticket.group_id] = self.model.groups.pop(-serial)
                self.tickets.append(("w1", ticket))
        held = self.model.of("generating")
        mine = [t for w, t in self.tickets if t.group_id in held and held[t.group_id].worker == w == "w1"][leave:]
        answers = self.broker.submit_many([finished(t, RUN, t.engine_version, worker="w1") for t in mine])
        for ticket, one in zip(mine, answers, strict=True):
            expects = self.model.submit(ticket.group_id, "w1", ticket.engine_version, 8)
            assert (one.reason if isinstance(one, Refused) else one) == expects
        if not self.leased:
            self.pull()
        if step and self.leased:
            self.step([False, True, False], False)

    @rule(groups=st.integers(3, 6), leave=st.integers(0, 2))
    def work_on(self, groups: int, leave: int) -> None:
        """The same, chosen more often than other rules."""
        self.work(groups, True, True, leave)

    @rule(leave=st.integers(1, 2), patience=st.booleans(), late=st.booleans())
    def slow_groups(self, leave: int, patience: bool, late: bool) -> None:
        """The first groups go on being generated while others are trained, until the trainer waits for them.

        patience: until it does not wait any longer. late: then they are submitted, mostly past the bound.
        """
        for _ in range(self.model.max_lag + 2):
            self.work(2 * self.settings.groups_per_step + leave, True, True, leave)
        if patience and not self.leased and self.model.of("generating"):
            self.patience_with_stragglers_ends()
        if late:
            if self.leased:
                self.step([False, False, False], False)
            self.work(1, True, False, 0)

    @precondition(lambda self: self.model.of("generating"))
    @rule(then=st.sampled_from(["admit", "pull", "submit"]))
    def a_worker_stalls(self, then: str) -> None:
        """Its leases expire; the next admission or pull returns the work, or its late submission meets that."""
        self.time_passes(11)
        if then == "pull" and not self.leased:
            self.pull()
        else:
            self.admit("w2", "e1", 1)
        if then == "submit" and self.tickets:
            self.submit([0, 1], 0, 1)

    @rule(worker=st.sampled_from(WORKERS), more=st.integers(1, 2))
    def a_worker_is_drained(self, worker: str, more: int) -> None:
        """What it holds goes back without a try used up; somebody else is given it."""
        self.admit(worker, "e1", more)
        held = self.model.of("generating")
        for ticket in [t for w, t in self.tickets if w == worker and t.group_id in held]:
            assert self.broker.release(ticket.group_id, worker) == self.model.fail(ticket.group_id, worker, 0, "again")
        self.admit(WORKERS[worker == WORKERS[0]], "e1", 1)

    @rule(what=st.sampled_from(["abort", "reject", "leave out"]))
    def a_batch_goes_wrong(self, what: str) -> None:
        """It is put back, holds a corrupt payload, or the step leaves a group out."""
        if not self.leased:
            self.work(4, True, False, 0)
        if self.leased and what == "abort":
            self.abort_step()
        elif self.leased and what == "reject":
            self.reject()
        elif self.leased:
            self.step([False, True, False], True)

    @precondition(lambda self: self.tickets)
    @rule(final=st.booleans())
    def a_poison_prompt(self, final: bool) -> None:
        """Fails until it is a dead letter; then somebody issues it again."""
        self.admit("w1", "e1", 1)
        for _ in range(2):
            self.give_up(0, "dead" if final else "try", "w1", 3)
            self.admit("w1", "e1", 1)
        if final and self.model.dead:
            self.requeue()

    @rule(save=st.booleans(), commit=st.booleans(), back=st.integers(1, 2), leave=st.integers(1, 2))
    def work_and_crash(self, save: bool, commit: bool, back: int, leave: int) -> None:
        """Steps after a checkpoint, then a rollback, which names a version while a group is still generated."""
        if not self.leased and save:
            self.save()
        if commit:
            self.commit()
        self.work(4, True, True, 0)
        self.work(4, True, False, leave)
        self.crash_of_the_trainer(back)
        self.pull()

    # --- others -------------------------------------------------------------------------------------------------------

    @rule(engine=st.sampled_from(ENGINES))
    def update_engine(self, engine: str) -> None:
        if self.model.published >= 0:
            self.model.engines[engine] = self.model.published
            self.broker.register_engine(EngineRecord(engine, "http://e", EngineState.SERVING, self.model.published))

    @rule(max_lag=st.integers(0, 4))
    def change_the_bound(self, max_lag: int) -> None:
        self.broker.set_max_lag(max_lag)
        self.model.max_lag = max_lag

    @precondition(lambda self: self.model.dead)
    @rule()
    def requeue(self) -> None:
        prompt = min(self.model.dead)
        self.lost_dead.add(prompt)
        assert self.broker.requeue(prompt)
        self.model.requeue(prompt)

    @precondition(lambda self: self.model.step_number >= 2)
    @rule(dice=st.integers(0, 2))
    def redis_is_replaced_by_an_empty_one(self, dice: int) -> None:
        if dice != 2:
            return  # seldom: it ends what the schedule has built up
        self.note_what_was_reached()
        self.old_epochs.append(self.epoch)
        engines = dict(self.model.engines)
        self.lost_dead |= self.model.dead  # with those issued again since: a checkpoint does not know of either
        self.reset()
        for engine, version in engines.items():
            self.broker.register_engine(EngineRecord(engine, "http://e", EngineState.SERVING, version))
            self.model.engines[engine] = version
        self.restart(self.checkpoints[-1])

    # Not in the two cases that docs/how-the-guarantees-work.md, "What a failover may lose", names as exceptions.
    @precondition(
        lambda self: not self.model.reissue and all(g.lease > self.model.now for g in self.model.groups.values())
    )
    @precondition(lambda self: self.config.redis.payloads == "redis")
    @rule(saved=st.booleans())
    def redis_forgets_what_it_was_told_last(self, saved: bool) -> None:
        """It comes back as it was a step ago, as after a power failure or a failover; the checkpoint may be ahead."""
        if self.leased:
            self.abort_step()
        self.note_what_was_reached()
        before = {name: self.redis.dump(name) or b"" for name in self.redis.scan_iter()}
        model, tickets = copy.deepcopy(self.model), list(self.tickets)
        self.work(3, True, True, 1)
        if saved and not self.leased:
            self.save()
        for path in self.files():
            os.utime(path, (1, 1))  # old enough to be swept, if no record names it any more
        self.redis.flushall()
        for name, value in before.items():
            self.redis.restore(name, 0, value)
        self.model, self.tickets = model, tickets
        self.restart(self.checkpoints[-1])


@contextmanager
def on(server: EmbeddedServer, folder: Path) -> Iterator[type[Protocol]]:
    """The machine on a server, with all transitions loaded."""
    Protocol.broker = Broker.connect(server.url, RUN, timeout_s=30)
    Protocol.folder = folder
    Protocol.reached = Counter()
    for name in scripts.names():
        Protocol.broker._connection.client.script_load(scripts.script(name))
    try:
        yield Protocol
    finally:
        Protocol.broker.close()


def schedules(count: int, *phases: Phase) -> settings:
    """count: how many; phases: none for all but the replay of old failures."""
    return settings(
        max_examples=count,
        stateful_step_count=16,
        deadline=None,
        database=None,
        phases=phases or (Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1000, marks=pytest.mark.timeout(900)),
        pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_any_schedule_of_commands_and_crashes_keeps_the_guarantees(
    redis_server: EmbeddedServer, tmp_path: Path, count: int
) -> None:
    with on(redis_server, tmp_path) as machine:
        run_state_machine_as_test(machine, settings=schedules(count))
        missed = {name: machine.reached[name] for name in REACHED if machine.reached[name] < count / 500}
        assert not missed, f"the schedules do not get to {missed}"
