"""One run on a real Redis next to its model: begin, restart, and what must hold after every command.

Invariant: after each command Redis and the model agree on ledger, histograms, prompts, versions and payloads; the
ledger closes; in the history that survives no group and no prompt is trained twice, and none is lost.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
)

from broker import scripts
from broker import snapshot as view
from broker.queue import Broker
from broker.types import PromptCursor, Ticket
from tests.broker.model import Model, Settings
from tests.conftest import RUN, small_config

HOUR = 3_600_000
WORKERS, ENGINES = ("w1", "w2"), ("e1", "e2")


@dataclass(frozen=True)
class Checkpoint:
    """What a trainer saves. history: ids trained in the run that ends here, with their prompts."""

    step: int
    version: int
    consumed: tuple[int, ...]
    cursor: PromptCursor | None
    history: tuple[tuple[int, int], ...]


REACHED = (
    "attachments",
    "dead_letters",
    "dead_letters_requeued",
    "groups_failed",
    "groups_rejected",
    "groups_released",
    "groups_returned",
    "groups_rolled_back",
    "leases_expired",
    "prompts_reissued",
    "prompts_restored",
    "pulls_starved",
    "pulls_straggler",
    "refused_bound",
    "refused_finished",
    "stale_at_attach",
    "stale_at_pull",
    "stale_at_submit",
    "stragglers_left_behind",
    "submissions_closed",
)
NOTHING = Checkpoint(0, -1, (), None, ())


class Compared(RuleBasedStateMachine):
    """Workers w1 and w2, engines e1 and e2, one trainer that may crash, a clock that jumps.

    Sizes are small, and rules do several commands at once, so that 16 of them get to the end of a run, to expired
    leases, stragglers and rollbacks; `reached` counts that they do.
    """

    broker: ClassVar[Broker]
    folder: ClassVar[Path]
    reached: ClassVar[Counter[str]]

    # Rules of the class that is run, which `begin` follows too.
    publish: Callable[[], None]
    update_engine: Callable[[str], None]
    work: Callable[[int, bool, bool, int], None]
    save: Callable[[], None]
    commit: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.redis = self.broker._connection.client

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.note_what_was_reached()
            for path in self.files():
                path.unlink()

    def note_what_was_reached(self) -> None:
        counters = self.broker.snapshot().counters
        self.reached.update(name for name in REACHED if counters.get(name))

    @initialize(
        groups_per_step=st.sampled_from([1, 1, 2]),
        max_lag=st.sampled_from([1, 1, 2, 0, 3]),
        steps=st.sampled_from([6, 3, 2, 9]),
        tries=st.integers(0, 1),
        retention=st.sampled_from(["payload", "payload", "prompt"]),
        payloads=st.sampled_from(["redis", "redis", "folder"]),
        rounds=st.lists(st.sampled_from(["work", "save", "save and commit"]), max_size=3),
    )
    def begin(
        self,
        groups_per_step: int,
        max_lag: int,
        steps: int,
        tries: int,
        retention: str,
        payloads: str,
        rounds: list[str],
    ) -> None:
        self.config = small_config(
            Path(tempfile.gettempdir()),
            **{
                "run.steps": steps,
                "lag.max": max_lag,
                "lag.straggler_wait_s": 1.5 * HOUR / 1000,
                "rollout.lease_s": HOUR / 1000,
                "rollout.group_tries": max(1, tries),
                "trainer.groups_per_step": groups_per_step,
                "trainer.retention": retention,
                "redis.payloads": payloads,
                "redis.payload_folder": str(self.folder),
            },
        )
        self.tries = tries
        self.broker._chosen = None
        self.settings = Settings(groups_per_step, max_lag, steps, tries, retention, HOUR, HOUR * 3 // 2)
        self.old_epochs: list[int] = []
        self.lost_dead: set[int] = set()  # prompts that were dead letters once
        self.checkpoints = [NOTHING]
        self.tickets: list[tuple[str, Ticket]] = []
        self.reset()
        self.restart(NOTHING)
        self.publish()
        self.update_engine("e1")
        for what in rounds:
            self.work(6, True, True, 0)
            if what != "work":
                self.save()
            if what == "save and commit":
                self.commit()

    def reset(self) -> None:
        """An empty server, and a model of it."""
        for path in self.files():
            os.utime(path, (1, 1))  # the next attachment sweeps what no record names, once it is old
        self.redis.flushall()
        self.broker.initialise(self.config)
        self.redis.hset(self.broker._keys.policy, "group_tries", self.tries)  # the configuration has at least 1
        self.model = Model(self.settings)
        self.leased: list[int] = []

    def restart(self, checkpoint: Checkpoint) -> None:
        """A trainer starts from a checkpoint."""
        state = self.broker.attach_trainer(
            checkpoint_step=checkpoint.step,
            checkpoint_version=checkpoint.version,
            consumed=checkpoint.consumed,
            cursor=checkpoint.cursor,
        )
        returned = self.model.attach(checkpoint.step, checkpoint.version, checkpoint.consumed, checkpoint.cursor)
        assert (state.returned, state.step, state.highest_version) == (returned, checkpoint.step, self.model.highest)
        self.epoch, self.leased = state.epoch, []
        self.history = list(checkpoint.history)
        self.consumed = list(checkpoint.consumed)
        self.checkpoints = [c for c in self.checkpoints if c.step <= checkpoint.step]
        assert self.broker.name_version(self.epoch) == self.model.name_version()

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def redis_agrees_with_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        m, keys = self.model, self.broker._keys
        answer, opened, reissue, freed, found = self.broker._connection.commands(
            [
                ("EVALSHA", scripts.digest("snapshot"), 1, keys.prefix, 0),
                ("ZRANGE", keys.named("open"), 0, -1),
                ("ZRANGE", keys.named("reissue"), 0, -1),
                ("LRANGE", keys.named("freed"), 0, -1),
                ("KEYS", keys.named("[ps]*:*").replace("{", "\\{")),
            ]
        )
        seen = view.parse(decoded(answer))
        assert seen.groups == m.tally(tokens=False)
        assert seen.tokens == m.tally(tokens=True)
        assert seen.groups.closes
        assert seen.tokens.closes
        assert (seen.version, seen.highest_version, seen.published) == (m.version, m.highest, m.published)
        assert (seen.step, seen.durable_step, seen.max_lag) == (m.step_number, m.durable_step, m.max_lag)
        assert seen.ready_by_version == m.ready_by_version()
        assert seen.trained_by_lag == m.trained_by_lag()
        assert {int(p) for p in opened} == m.open
        assert {int(p) for p in reissue} == set(m.reissue)
        assert not [name for name in found if b":staged:" in name]
        lying = {path.name for path in self.files()} - {name.decode() for name in freed}
        payloads = sum(b":payload:" in name for name in found) + len(lying)
        states = ("ready", "leased", "trained", "filtered")
        assert payloads == sum(g.payload for g in m.of(*states).values()), "a payload is orphaned or missing"
        assert (seen.dead_letters, bool(seen.payload_bytes)) == (len(m.dead), payloads > 0)

    @invariant()
    def nothing_is_trained_twice_or_lost(self) -> None:
        if not hasattr(self, "model"):
            return
        ids, prompts = [i for i, _ in self.history], [p for _, p in self.history]
        assert len(ids) == len(set(ids)), "a group was trained twice"
        assert len(prompts) == len(set(prompts)), "a prompt was trained twice"
        known = set(prompts) | self.model.open | self.model.dead | self.lost_dead
        assert set(range(self.model.next_prompt)) <= known, "a prompt was lost"

    def files(self) -> list[Path]:
        """Payloads in the folder, if this schedule uses it."""
        folder = self.folder / RUN
        return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def decoded(item: Any) -> Any:
    if isinstance(item, list):
        return [decoded(part) for part in item]
    return item.decode() if isinstance(item, bytes) else item
