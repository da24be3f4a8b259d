"""The protocol as a plain Python program: what the scripts must do, without Redis.

Invariant: no call here looks at Redis; tests/broker/test_protocol.py compares the two after every command. The rules of
the bound come from broker/lag.py, so this also holds the Lua against those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker import lag
from broker.types import LagCount, PromptCursor, Tally


@dataclass
class ModelGroup:
    """One group that is not closed."""

    prompt: int
    attempt: int
    worker: str
    admitted: int
    lease: int
    state: str = "generating"
    oldest: int = -1
    tokens: int = 0
    step: int = 0
    payload: bool = True


@dataclass
class Settings:
    """What the configuration says. Times in ms of the model's clock."""

    groups_per_step: int
    max_lag: int
    steps_total: int
    group_tries: int
    retention: str
    lease: int
    straggler: int


@dataclass
class Model:
    """The state of a run."""

    settings: Settings
    max_lag: int = 0
    now: int = 0
    version: int = -1
    highest: int = -1
    published: int = -1
    step_number: int = 0
    durable_step: int = 0
    epoch: int = 0
    next_prompt: int = 0
    pull_bound: int = 0
    straggler_since: int | None = None
    groups: dict[int, ModelGroup] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    reissue: dict[int, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    closed: Counter[str] = field(default_factory=Counter)
    closed_tokens: Counter[str] = field(default_factory=Counter)
    step_lags: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    lag_groups: Counter[int] = field(default_factory=Counter)
    lag_tokens: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.max_lag = self.settings.max_lag

    # --- views --------------------------------------------------------------------------------------------------------

    def of(self, *states: str) -> dict[int, ModelGroup]:
        """Groups in one of the states, by id."""
        return {i: g for i, g in sorted(self.groups.items()) if g.state in states}

    def in_flight(self) -> int:
        return len(self.of("generating", "ready", "leased"))

    def tally(self, tokens: bool) -> Tally:
        total: Counter[str] = Counter(self.closed_tokens if tokens else self.closed)
        for g in self.groups.values():
            total[g.state] += g.tokens if tokens else 1
        total["issued"] += sum(total[s] for s in total if s not in ("durable", "issued"))
        return Tally(**total)

    def ready_by_version(self) -> dict[int, LagCount]:
        out: dict[int, LagCount] = {}
        for g in self.of("ready").values():
            before = out.get(g.oldest, LagCount())
            out[g.oldest] = LagCount(before.groups + 1, before.tokens + g.tokens)
        return out

    def trained_by_lag(self) -> dict[int, LagCount]:
        at = [x for x in {*self.lag_groups, *self.lag_tokens} if self.lag_groups[x] or self.lag_tokens[x]]
        return {x: LagCount(self.lag_groups[x], self.lag_tokens[x]) for x in at}

    def cursor(self) -> PromptCursor:
        return PromptCursor(self.next_prompt, tuple(sorted(self.open)))

    # --- moves --------------------------------------------------------------------------------------------------------

    def _reissue(self, prompt: int, attempt: int) -> None:
        self.reissue[prompt] = attempt
        self.open.add(prompt)

    def _close(self, group_id: int, state: str, mode: str) -> None:
        g = self.groups.pop(group_id)
        self.closed[state] += 1
        self.closed_tokens[state] += g.tokens
        if mode == "again":
            self._reissue(g.prompt, g.attempt)
        elif mode == "try" and g.attempt < self.settings.group_tries:
            self._reissue(g.prompt, g.attempt + 1)
        else:
            self.open.discard(g.prompt)
            self.dead.add(g.prompt)

    def _make_durable(self, group_id: int) -> None:
        g = self.groups.pop(group_id)
        state = g.state if g.state in ("trained", "filtered") else "trained"
        self.open.discard(g.prompt)
        for name in (state, "durable"):
            self.closed[name] += 1
            self.closed_tokens[name] += g.tokens

    def _reap(self) -> None:
        for i, g in self.of("generating").items():
            g.lease = min(g.lease, self.now + self.settings.lease)
            if g.lease <= self.now:
                self._close(i, "failed", "try")

    # --- workers ------------------------------------------------------------------------------------------------------

    def admit(self, engine: str) -> str | tuple[int, int, int]:
        """Why not, or (prompt, attempt, engine version); then `admitted` records the id that Redis chose."""
        if self.durable_step >= self.settings.steps_total:
            return "finished"
        if self.published < 0:
            return "no-trainer"
        if engine not in self.engines:
            return "engine"
        self._reap()
        why = lag.why_not_admit(
            version=self.version,
            in_flight=self.in_flight(),
            engine_version=self.engines[engine],
            max_lag=self.max_lag,
            groups_per_step=self.settings.groups_per_step,
            steps_left=self.settings.steps_total - self.step_number,
        )
        if why:
            return "bound"
        if self.reissue:
            prompt = min(self.reissue)
            attempt = self.reissue.pop(prompt)
        else:
            prompt, attempt = self.next_prompt, 0
            self.next_prompt += 1
        self.open.add(prompt)
        return prompt, attempt, self.engines[engine]

    def admitted(self, group_id: int, worker: str, prompt: int, attempt: int, engine_version: int) -> None:
        self.groups[group_id] = ModelGroup(prompt, attempt, worker, engine_version, self.now + self.settings.lease)

    def submit(self, group_id: int, worker: str, oldest: int | None, tokens: int, repeated: bool = False) -> str:
        """repeated: the same payload as before. Only the holder submits, and only once."""
        g = self.groups.get(group_id)
        if g is None or g.worker != worker:
            return "closed"
        if g.state != "generating":
            return "accepted" if repeated else "closed"
        g.tokens = tokens
        g.oldest = self.version if oldest is None else oldest
        if lag.is_stale(g.oldest, self.version, self.max_lag):
            self._close(group_id, "stale", "try")
            return "stale"
        g.state = "ready"
        return "accepted"

    def fail(self, group_id: int, worker: str, tokens: int, mode: str) -> bool:
        g = self.groups.get(group_id)
        if g is None or g.state != "generating" or g.worker != worker:
            return False
        g.tokens = tokens
        self._close(group_id, "failed", mode)
        return True

    def renew(self, worker: str, ids: Sequence[int]) -> tuple[int, ...]:
        held = tuple(
            i for i in ids if (g := self.groups.get(i)) is not None and g.state == "generating" and g.worker == worker
        )
        for i in held:
            self.groups[i].lease = self.now + self.settings.lease
        return held

    # --- trainer ------------------------------------------------------------------------------------------------------

    def attach(  # noqa: PLR0912 (one branch for each case of the script)
        self, step: int, version: int, consumed: Sequence[int], cursor: PromptCursor | None
    ) -> int:
        """Returns how many groups went back into the queue."""
        self.highest = self.version = max(self.highest, self.version, self.published, version)
        for i in consumed:
            if i in self.groups:
                self._make_durable(i)
        for i, g in self.of("trained", "filtered").items():
            if g.step <= step:
                self._make_durable(i)
        for past, lags in self.step_lags.items():
            if past > step:
                for at, (groups, tokens) in lags.items():
                    self.lag_groups[at] -= groups
                    self.lag_tokens[at] -= tokens
        self.step_lags.clear()
        returned = 0
        for i, g in self.of("trained", "filtered", "leased").items():
            self.open.add(g.prompt)
            if not g.payload:
                self._close(i, "failed", "again")
            elif lag.is_stale(g.oldest, self.version, self.max_lag):
                self._close(i, "stale", "again")
            else:
                g.state = "ready"
                returned += 1
        if cursor is None and step == 0:
            cursor = PromptCursor()
        if cursor is not None:
            for prompt in (*cursor.open, *range(cursor.next_index, self.next_prompt)):
                if prompt not in self.open and prompt not in self.dead:
                    self._reissue(prompt, 0)
            self.next_prompt = max(self.next_prompt, cursor.next_index)
        self.step_number = self.durable_step = step
        self.straggler_since = None
        return returned

    def name_version(self) -> int:
        self.highest = self.version = max(self.highest, self.published, *self.engines.values(), -1) + 1
        self.straggler_since = None
        return self.version

    def in_line(self) -> list[int]:
        """Ready groups, those first that are pulled first."""
        return lag.choose_batch(((i, g.oldest) for i, g in self.of("ready").items()), len(self.groups))

    def pull(self, groups: int) -> str | list[int]:
        self._reap()
        for i, g in self.of("ready").items():
            if lag.is_stale(g.oldest, self.version, self.max_lag):
                self._close(i, "stale", "try")
        ready = self.of("ready")
        if len(ready) < groups:
            return "starved"
        late = lag.straggler_deadline(
            version=self.version,
            ready=[g.oldest for g in ready.values()],
            generating=[g.admitted for g in self.of("generating").values()],
            max_lag=self.max_lag,
            groups=groups,
            groups_per_step=self.settings.groups_per_step,
        )
        if late is not None:
            if self.straggler_since is None or self.straggler_since > self.now:
                self.straggler_since = self.now
            if self.now - self.straggler_since < self.settings.straggler:
                return "straggler"
        self.straggler_since = None
        batch = lag.choose_batch(((i, g.oldest) for i, g in ready.items()), groups)
        for i in batch:
            self.groups[i].state = "leased"
        self.pull_bound = self.max_lag
        return batch

    def step(self, outcomes: Sequence[tuple[int, bool]]) -> None:
        lags: dict[int, tuple[int, int]] = {}
        self.step_number += 1
        for i, filtered in outcomes:
            g = self.groups[i]
            at = self.version - g.oldest
            assert at <= max(self.pull_bound, self.max_lag), f"group {i} is trained at lag {at}"
            g.state, g.step = ("filtered" if filtered else "trained"), self.step_number
            g.payload = g.payload and self.settings.retention == "payload"
            self.open.discard(g.prompt)
            if not filtered:
                count, tokens = lags.get(at, (0, 0))
                lags[at] = (count + 1, tokens + g.tokens)
        self.step_lags[self.step_number] = lags
        for at, (count, tokens) in lags.items():
            self.lag_groups[at] += count
            self.lag_tokens[at] += tokens
        self.return_leased()
        self.version += 1
        self.highest = max(self.highest, self.version)
        self.straggler_since = None

    def return_leased(self) -> int:
        leased = self.of("leased")
        for g in leased.values():
            g.state = "ready"
        return len(leased)

    def reject(self, group_id: int) -> None:
        self._close(group_id, "failed", "dead")

    def commit(self, step: int) -> int:
        done = [i for i, g in self.of("trained", "filtered").items() if g.step <= step]
        for i in done:
            self._make_durable(i)
        self.step_lags = {s: lags for s, lags in self.step_lags.items() if s > step}
        self.durable_step = max(self.durable_step, step)
        return len(done)

    def requeue(self, prompt: int) -> None:
        self.dead.discard(prompt)
        self._reissue(prompt, 0)
