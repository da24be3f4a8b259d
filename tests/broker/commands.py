"""The commands of workers, trainer and operator one by one, each given to Redis and to the model.

Invariant: a rule here is a call of `Broker` (or a few of the same), one of the model, and a comparison of the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from broker.errors import Fenced
from broker.types import Delivery, EngineRecord, EngineState, Group, Outcome, Refused, Ticket, VersionRecord
from tests.broker.helpers import finished
from tests.broker.machine import ENGINES, HOUR, WORKERS, Checkpoint, Compared
from tests.conftest import RUN


class Commands(Compared):
    """What anybody may do at any time, crashes of the trainer and of Redis among it."""

    # --- workers ------------------------------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS), engine=st.sampled_from(ENGINES), times=st.integers(1, 4))
    def admit(self, worker: str, engine: str, times: int) -> None:
        for _ in range(times):
            answer = self.broker.admit(worker, engine)
            self.admitted(worker, engine, answer if isinstance(answer, Refused) else (answer,), 1)

    def admitted(self, worker: str, engine: str, answer: tuple[Ticket, ...] | Refused, wanted: int) -> None:
        tickets = () if isinstance(answer, Refused) else answer
        for ticket in tickets:
            expected = self.model.admit(engine)
            assert (ticket.prompt_index, ticket.attempt, ticket.engine_version) == expected
            self.model.admitted(ticket.group_id, worker, *expected)
            self.tickets.append((worker, ticket))
        if len(tickets) < wanted:
            why = self.model.admit(engine)
            assert isinstance(why, str)
            assert not isinstance(answer, Refused) or answer.reason == why

    @precondition(lambda self: self.tickets)
    @rule(pick=st.integers(0, 7), age=st.integers(-1, 2), engine=st.sampled_from(ENGINES), wanted=st.integers(1, 3))
    def submit_and_admit(self, pick: int, age: int, engine: str, wanted: int) -> None:
        worker, ticket = self.tickets[-1 - pick % len(self.tickets)]
        version = min(max(0, ticket.engine_version + age), max(0, self.model.published))
        held = self.model.groups.get(ticket.group_id)
        if held is not None and held.state != "generating":
            return
        group = finished(ticket, RUN, version, worker=worker, response=2)
        (first,), tickets = self.broker.submit_and_admit([group], engine, wanted)
        expected = self.model.submit(ticket.group_id, worker, version, 4)
        assert (first.reason if isinstance(first, Refused) else first) == expected
        self.admitted(worker, engine, tickets, wanted)

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

    # --- trainer ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.leased)
    @rule()
    def pull(self) -> None:
        answer = self.broker.pull(self.epoch, self.model.version, self.settings.groups_per_step)
        if isinstance(answer, Refused):
            assert answer.reason == self.model.pull(self.settings.groups_per_step)
            return
        self.pulled(answer, self.broker.fetch([d.group_id for d in answer]))

    def pulled(self, deliveries: Sequence[Delivery], groups: Sequence[Group]) -> None:
        self.leased = [d.group_id for d in deliveries]
        assert self.leased == self.model.pull(self.settings.groups_per_step)
        for d, group in zip(deliveries, groups, strict=True):
            assert (group.prompt_index, group.attempt, group.response_tokens) == (
                d.prompt_index,
                d.attempt,
                d.response_tokens,
            )
            assert group.oldest_version == d.oldest_version

    @precondition(lambda self: self.leased)
    @rule(filtered=st.lists(st.booleans(), min_size=3, max_size=3), leave_out=st.booleans())
    def step(self, filtered: list[bool], leave_out: bool) -> None:
        version, outcomes, lags = self.trained(filtered, leave_out)
        for _ in range(2):  # a repeated step changes nothing
            self.broker.step(self.epoch, version, outcomes, lags, {"n": version})

    @precondition(lambda self: self.leased)
    @rule(leave_out=st.booleans(), ahead=st.sampled_from([(), (0,), (1, 0)]), go_on=st.booleans())
    def step_and_pull(self, leave_out: bool, ahead: tuple[int, ...], go_on: bool) -> None:
        """ahead: places in the queue of what is foreseen. go_on: the batch that comes with the step is trained, too."""
        version, outcomes, lags = self.trained([False, True, False], leave_out)
        wanted, ready = self.settings.groups_per_step, self.model.in_line()
        foreseen = [ready[i] for i in ahead if i < len(ready)]
        answer = self.broker.step_and_pull(self.epoch, version, outcomes, lags, {"n": version}, wanted, foreseen)
        if isinstance(answer, Refused):
            assert answer.reason == self.model.pull(wanted)
            return
        self.pulled(answer.deliveries, answer.groups)
        assert list(answer.ahead) == self.model.in_line()[:wanted]
        if go_on:
            self.step([False, False, True], False)

    def trained(self, filtered: list[bool], leave_out: bool) -> tuple[int, list[Outcome], Counter[int]]:
        """The model takes the step; the version of it, the outcomes and the tokens by lag for Redis."""
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
        return version, [Outcome(i, skip) for i, skip in outcomes], lags

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
        assert self.broker.requeue(prompt).done
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
