"""Schedules of the whole protocol: plain commands, and courses of events that those alone would seldom come to.

Invariant: a course is made of commands that are compared with the model one by one (tests/broker/commands.py).
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from broker import scripts
from broker.queue import Broker
from broker.server import EmbeddedServer
from broker.spares import in_memory
from broker.types import Refused
from tests.broker.commands import Commands
from tests.broker.helpers import finished
from tests.broker.machine import WORKERS
from tests.conftest import RUN


class Protocol(Commands):
    """Commands in courses: ordinary work, slow and stalled workers, poison prompts, rollbacks, a Redis that forgets."""

    @precondition(lambda self: not self.leased and self.model.of("generating"))
    @rule(back=st.booleans())
    def patience_with_stragglers_ends(self, back: bool) -> None:
        """Workers keep their leases while the trainer polls until it does not wait any longer. back: the clock is set
        back when it has begun to wait."""
        if back and not self.leased:
            self.pull()
            self.time_passes(-9)
        for _ in range(4):
            if not self.leased:
                self.pull()
            for worker in WORKERS:
                self.renew(worker)
            self.time_passes(6)

    @precondition(lambda self: not self.leased and self.model.of("generating"))
    @rule()
    def workers_are_gone_when_the_clock_is_set_back(self) -> None:
        """Their leases run out a lease after somebody has asked for the first time."""
        self.time_passes(-9)
        for _ in range(2):
            if not self.leased:
                self.pull()
            self.time_passes(11)

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

    @rule(groups=st.integers(3, 6), leave_out=st.booleans())
    def work_of_a_trainer_of_one_rank(self, groups: int, leave_out: bool) -> None:
        """It takes its next batch with the step."""
        self.work(groups, True, False, 0)
        if self.leased:
            self.step_and_pull(leave_out, (0,), True)

    @rule(leave=st.integers(1, 2), patience=st.booleans(), back=st.booleans(), late=st.booleans())
    def slow_groups(self, leave: int, patience: bool, back: bool, late: bool) -> None:
        """The first groups go on being generated while others are trained, until the trainer waits for them.

        patience: until it does not wait any longer. late: then they are submitted, mostly past the bound.
        """
        for _ in range(self.model.max_lag + 2):
            self.work(2 * self.settings.groups_per_step + leave, True, True, leave)
        if patience and not self.leased and self.model.of("generating"):
            self.patience_with_stragglers_ends(back)
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
    """The machine on a server, with all transitions loaded; payloads in memory, if there is a folder in memory."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if in_memory(memory) else folder) as payloads:
        Protocol.broker = Broker.connect(server.url, RUN, timeout_s=30)
        Protocol.folder = Path(payloads)
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
