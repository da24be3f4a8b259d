"""The queue: every transition of a group, from admission to a durable step, and the registry of versions and engines.

Invariant: each method is one atomic script (broker/lua), so the ledger closes between any two of them; the lag bound
is checked at `admit`, `submit` and `pull`; trainer methods carry the epoch that `attach_trainer` gave and raise Fenced
once a newer one exists. Nothing is decided here: the rules are in the scripts and, as pure functions, in broker/lag.py.
Synchronous and thread-safe; async callers use asyncio.to_thread. Any method may raise BrokerUnavailable.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from broker import snapshot as view
from broker import wire
from broker.changes import Changes
from broker.connection import Connection, OutOfMemory
from broker.errors import (
    BrokerError,
    CorruptPayload,
    Fenced,
    NotInitialised,
    NotLeased,
    SchemaMismatch,
    VersionMismatch,
    WrongRun,
)
from broker.keys import Keys
from broker.memory import keep_large_buffers
from broker.store import PayloadStore, RedisPayloadStore, Staged, max_bytes, store_of_run, submission
from broker.types import (
    Delivery,
    EngineRecord,
    EngineState,
    Group,
    GroupRecord,
    ListedState,
    Outcome,
    PromptCursor,
    Refused,
    Snapshot,
    Steered,
    Ticket,
    TrainerState,
    VersionRecord,
    check_group,
)
from configs.schema import RunConfig

SCHEMA = "2"
SubmitResult = Literal["accepted"]
Command = Literal["lag", "pause", "resume", "drain", "checkpoint", "evaluate"]


class Broker:
    """A process' handle on one run; see the module."""

    def __init__(self, connection: Connection, run_id: str, store: PayloadStore | None = None) -> None:
        self.run_id = run_id
        self._connection = connection
        self._keys = Keys(run_id)
        self._chosen = store
        self._codec: wire.Codec = "raw"

    @classmethod
    def connect(cls, url: str, run_id: str, *, password: str | None = None, timeout_s: float = 10.0) -> Broker:
        """Open a handle and see that the server answers; raises BrokerUnavailable after `timeout_s` seconds."""
        keep_large_buffers()
        connection = Connection(url, password=password, timeout_s=timeout_s)
        connection.attempt(connection.client.ping)
        return cls(connection, run_id)

    def close(self) -> None:
        """Close the connections; the run is untouched."""
        self._connection.close()

    # --- set-up -------------------------------------------------------------------------------------------------------

    def initialise(self, config: RunConfig) -> None:
        """Write the run's policy; again: update all settings but max_lag (set_max_lag changes that one).

        Raises SchemaMismatch if the keys hold another schema version or another run.
        """
        settings: dict[str, str | int] = {
            "max_lag": config.lag.max,
            "straggler_ms": int(config.lag.straggler_wait_s * 1000),
            "groups_per_step": config.trainer.groups_per_step,
            "publish_interval": config.weights.publish_interval,
            "steps_total": config.run.steps,
            "samples": config.rollout.samples_per_prompt,
            "group_tries": config.rollout.group_tries,
            "lease_ms": max(1, int(config.rollout.lease_s * 1000)),
            "trainer_lease_ms": max(1, int(config.trainer.lease_s * 1000)),
            "retention": config.trainer.retention,
            "max_bytes": max_bytes(config.redis),
            "payloads": config.redis.payloads,
            "payload_folder": str(config.redis.payload_folder or ""),
            "compression": config.redis.compression,
        }
        flat = [item for pair in settings.items() for item in pair]
        answer = self._connection.call("initialise", [self._keys.policy], [SCHEMA, self.run_id, *flat])
        if answer[0] == "schema":
            raise SchemaMismatch(
                f"Redis holds run {answer[2]!r} with schema {answer[1]} under the keys of {self.run_id!r} "
                f"(schema {SCHEMA}). Use another run id, or the release that wrote it."
            )

    def set_status(self, status: Literal["starting", "running", "draining", "finished", "stopped"]) -> None:
        """Say where the run is; `draining` stops admission, `finished` and `stopped` tell workers to end."""
        self._call("set_policy", "status", status)

    def pause_admission(self, paused: bool) -> None:
        """Stop or resume admission; work in flight goes on."""
        self._call("set_policy", "paused", int(paused))

    def set_max_lag(self, max_lag: int) -> None:
        """Change the bound while the run goes on; it holds from the next admission, submission and pull."""
        if max_lag < 0:
            raise ValueError(f"max_lag is {max_lag}, expected 0 or more")
        self._call("set_policy", "max_lag", max_lag)

    def steer(self, command: Command, value: int = 0, *, why: str = "", expected: int | None = None) -> Steered:
        """An operator's command, recorded in the event log with `why` whether it is done or refused.

        lag: set max_lag to `value` (only if it is `expected` now, if given). pause, resume: admission; resume also ends
        a drain. drain: start nothing more, train what is in flight. checkpoint: the trainer saves after its step.
        """
        answer = self._call("steer", command, value, why, "" if expected is None else expected)
        refused = answer[0] == "refused"
        reason, detail = (answer[3], answer[4]) if refused else ("", answer[3])
        return Steered(not refused, reason, detail, int(answer[1]), int(answer[2]))

    # --- rollout worker -----------------------------------------------------------------------------------------------

    def admit(self, worker: str, engine_id: str) -> Ticket | Refused:
        """Ask for a group to generate on an engine. Renew its lease, then submit, fail or release it."""
        answer = self.admit_many(worker, engine_id, 1)
        return answer if isinstance(answer, Refused) else answer[0]

    def admit_many(self, worker: str, engine_id: str, groups: int) -> tuple[Ticket, ...] | Refused:
        """Ask for up to `groups` groups at once; at least one, or Refused."""
        try:
            answer = self._call("admit", worker, engine_id, groups)
        except OutOfMemory as error:
            return Refused("memory", str(error))
        if answer[0] == "refused":
            return Refused(answer[1], answer[2])
        return tuple(Ticket(*map(int, item)) for item in answer[1:])

    def submit(self, group: Group, *, stats: Mapping[str, float] | None = None) -> SubmitResult | Refused:
        """Hand a finished group in. stats: added to the counters of the same names. Refused("memory"): try again later.

        Raises InvalidTrajectory, or WrongRun for a group of another run.
        """
        return self.submit_many([group], stats=stats)[0]

    def submit_many(
        self, groups: Sequence[Group], *, stats: Mapping[str, float] | None = None
    ) -> tuple[SubmitResult | Refused, ...]:
        """Hand several groups in, in one round trip; an answer for each. stats: counted once if any of them is new."""
        for group in groups:
            check_group(group)
            if group.run != self.run_id:
                raise WrongRun(
                    f"group {group.group_id} belongs to run {group.run!r}, this broker serves {self.run_id!r}"
                )
        if not groups:
            return ()
        store = self._store()
        arguments: list[str | int | float] = [len(groups)]
        staged: list[Staged] = []
        try:
            for group in groups:
                staged.append(store.stage(group.group_id, wire.pieces(group, self._codec)))
                arguments += submission(group, staged[-1])
            for name, value in (stats or {}).items():
                arguments += [name, float(value)]
            keys = [self._keys.policy, *(s.key for s in staged if s.key)]
            before = [command for s in staged for command in s.commands]
            answer = self._initialised(self._connection.calls(before, [("submit", keys, arguments)])[0])
        except OutOfMemory as error:
            return (Refused("memory", str(error)),) * len(groups)
        results: list[SubmitResult | Refused] = []
        for one, of in zip(answer, staged, strict=True):
            results.append("accepted" if one[0] == "accepted" else Refused(one[1], one[2]))
            store.settle(of, one[0] == "accepted")
        return tuple(results)

    def fail(self, group_id: int, worker: str, reason: str, tokens: int = 0, final: bool = False) -> bool:
        """Give a group up; its prompt is issued again while tries are left, unless final. False if it was not held.

        tokens: trainable tokens that were generated for nothing.
        """
        return bool(self._call("fail", group_id, worker, reason, tokens, "dead" if final else "try")[0])

    def drop(self, group_id: int, worker: str, tokens: int = 0) -> bool:
        """The group's rewards are all equal: it is filtered, its prompt done with, and another takes its place.

        tokens: trainable tokens of it. False if the worker does not hold it.
        """
        return bool(self._call("fail", group_id, worker, "all rewards are equal", tokens, "drop")[0])

    def release(self, group_id: int, worker: str) -> bool:
        """Give a group back because the worker stops; not counted as a try. False if it was not held."""
        return bool(self._call("fail", group_id, worker, "released", 0, "again")[0])

    def renew(self, worker: str, group_ids: Sequence[int]) -> tuple[int, ...]:
        """Keep groups for another lease time; returns those still held, the others are to be abandoned."""
        return tuple(map(int, self._call("renew", worker, *group_ids))) if group_ids else ()

    def heartbeat_worker(self, worker: str, stats: Mapping[str, float | int | str]) -> None:
        """Show a worker on the monitor; the server adds heartbeat_ms."""
        self._call("heartbeat", worker, msgspec.json.encode(dict(stats)))

    # --- trainer ------------------------------------------------------------------------------------------------------

    def attach_trainer(
        self,
        *,
        checkpoint_step: int,
        checkpoint_version: int,
        consumed: Sequence[int] = (),
        cursor: PromptCursor | None = None,
    ) -> TrainerState:
        """Take the run over from a checkpoint, fencing every older trainer.

        checkpoint_step, checkpoint_version: 0 and -1 without a checkpoint; a newer version whose weights are on disk
        counts instead, so that it is not named again. consumed: ids of groups trained up to it
        whose commit may not have been recorded. cursor: the checkpoint's; it restores the prompts if Redis lost them.
        """
        opened = cursor.open if cursor else ()
        answer = self._call(
            "attach",
            checkpoint_step,
            checkpoint_version,
            len(consumed),
            cursor.next_index if cursor else -1,
            *consumed,
            *opened,
        )
        self._tidy(sweep=True)
        return TrainerState(*map(int, answer))

    def pull(self, epoch: int, version: int, groups: int) -> tuple[Delivery, ...] | Refused:
        """Lease the batch of the step at `version`: `groups` groups, earliest deadline first. Poll while Refused."""
        answer = self._trainer("pull", epoch, version, groups, uuid.uuid4().hex, asked=version)
        if answer[0] == "refused":
            return Refused(answer[1], answer[2])
        return tuple(Delivery(*map(int, item)) for item in answer[1:])

    def fetch(self, group_ids: Sequence[int]) -> list[Group]:
        """Payloads of accepted groups, arrays read-only. Raises CorruptPayload for the first that cannot be read.

        Any process of the run may fetch: each data-parallel rank its own share of the batch that rank 0 pulled.
        """
        found = self.fetch_bytes(group_ids)
        return [wire.decode(data, self.run_id, i) for i, data in zip(group_ids, found, strict=True)]

    def fetch_bytes(self, group_ids: Sequence[int]) -> list[bytes | memoryview]:
        """The same as they are stored (broker/wire.py)."""
        found = self._store().fetch(group_ids)
        for group_id, data in zip(group_ids, found, strict=True):
            if data is None:
                raise CorruptPayload(group_id, "missing")
        return [data for data in found if data is not None]

    def collect_payloads(self, *, sweep: bool = False) -> int:
        """Delete files of closed groups from a payload folder, with `sweep` also those that crashes left; how many."""
        store = self._store()
        return store.collect() + (store.sweep() if sweep else 0)

    def reject(self, epoch: int, group_id: int, reason: str) -> bool:
        """A leased group cannot be used: it fails for good and becomes a dead letter. False if it was not leased."""
        return bool(self._trainer("reject", epoch, group_id, reason)[0])

    def step(
        self,
        epoch: int,
        version: int,
        outcomes: Sequence[Outcome],
        lag_tokens: Mapping[int, int],
        metrics: Mapping[str, object],
    ) -> None:
        """Record the optimizer step taken at `version`, and what to show of it.

        lag_tokens: lag -> tokens trained at it. Raises NotLeased or VersionMismatch, having changed nothing.
        """
        flat = [item for o in outcomes for item in (o.group_id, int(o.filtered))]
        lags = [item for lag, tokens in lag_tokens.items() for item in (lag, tokens)]
        record = msgspec.json.encode(dict(metrics))
        answer = self._trainer("step", epoch, version, record, len(outcomes), *flat, *lags, asked=version)
        if answer[0] == "not-leased":
            raise NotLeased(int(answer[1]))
        self._tidy()

    def prompt_cursor(self, epoch: int, step: int) -> PromptCursor:
        """The trained frontier, to keep in the checkpoint of `step`, the one recorded last (else VersionMismatch)."""
        answer = self._trainer("cursor", epoch, step, asked=step)
        return PromptCursor(int(answer[1]), tuple(map(int, answer[2])))

    def commit(self, epoch: int, step: int) -> int:
        """The checkpoint of `step` is on disk: its groups are durable, their payloads go. Returns how many."""
        committed = int(self._trainer("commit", epoch, step, asked=step)[1])
        self._tidy()
        return committed

    def name_version(self, epoch: int) -> int:
        """A new version that is not a step, above all others: for the weights of a restored checkpoint."""
        return int(self._trainer("name_version", epoch)[1])

    def publish(self, epoch: int, record: VersionRecord) -> None:
        """Announce a version whose weights are complete in the store; versions only grow, up to the newest named."""
        self._trainer("publish", epoch, record.version, view.version_json(record), asked=record.version)

    def checkpoint_asked(self) -> int:
        """The step at which an operator asked for a checkpoint that no commit has answered yet, -1: none."""
        client = self._connection.client
        found: Any = self._connection.attempt(lambda: client.hget(self._keys.policy, "checkpoint_asked"))
        return -1 if found is None else int(found)

    def renew_trainer(self, epoch: int) -> None:
        """Show that the trainer lives."""
        self._trainer("renew_trainer", epoch)

    def return_leased(self, epoch: int) -> int:
        """Put the leased batch back into the queue (a step that was aborted); returns how many groups."""
        return int(self._trainer("return_leased", epoch)[1])

    # --- registry -----------------------------------------------------------------------------------------------------

    def register_engine(self, record: EngineRecord) -> None:
        """Add an engine, or start its record afresh. The server stamps since_ms and heartbeat_ms."""
        self._call("engine", record.engine_id, view.engine_json(record), "", "register")

    def update_engine(self, record: EngineRecord, expected_state: EngineState | None = None) -> bool:
        """Write an engine's record if it is registered and in `expected_state` (None: any); whether it was written."""
        expected = expected_state.value if expected_state else ""
        return bool(self._call("engine", record.engine_id, view.engine_json(record), expected, "update")[0])

    def heartbeat_engine(self, engine_id: str, staged: int = -1, staged_path: str = "") -> bool:
        """Stamp heartbeat_ms of a registered engine; False if it is not registered.

        staged, staged_path: the version that lies on its host, and where; -1 changes nothing.
        """
        told = msgspec.json.encode({"staged": staged, "staged_path": staged_path}).decode() if staged >= 0 else ""
        return bool(self._call("engine", engine_id, told, "", "heartbeat")[0])

    def remove_engine(self, engine_id: str) -> None:
        """Forget an engine."""
        self._hash("engines", "hdel", engine_id)

    def engines(self) -> tuple[EngineRecord, ...]:
        """All engines, by id."""
        found = cast(dict[bytes, bytes], self._hash("engines", "hgetall"))
        return tuple(view.engine(found[name].decode()) for name in sorted(found))

    def published(self) -> VersionRecord | None:
        """The newest published version, None before the first."""
        return max(self.versions(), key=lambda record: record.version, default=None)

    def versions(self) -> tuple[VersionRecord, ...]:
        """Published versions that were not forgotten, oldest first."""
        found = cast(dict[bytes, bytes], self._hash("versions", "hgetall"))
        return tuple(sorted((view.version(text.decode()) for text in found.values()), key=lambda r: r.version))

    def forget_version(self, version: int) -> None:
        """A version's files are gone."""
        self._hash("versions", "hdel", str(version))

    def hold(self, role: str, holder: str, seconds: float) -> str:
        """Have a role of the run for `seconds`, again to renew, 0 to give it up; whose it is now, "" if nobody's.

        holder: unique to the process. Whoever did not renew in time finds the name of another here, or its own.
        """
        answer = self._call("hold", role, holder, int(seconds * 1000))
        if answer[0] == "other":
            return str(answer[1])
        return holder if seconds else ""

    def evaluator(self, seconds: float, *, begins: bool = False) -> bool:
        """Say that an evaluator lives for `seconds`; whether an operator asked for an evaluation.

        begins: it takes up the newest version now, so that what was asked for is done.
        """
        return bool(self._call("evaluator", int(seconds * 1000), int(begins), "", "")[0] == "asked")

    def evaluated(self, record: Mapping[str, Any], words: str, seconds: float) -> None:
        """Hand in a result, and say that the evaluator lives for `seconds`. words: the result for the event log."""
        self._call("evaluator", int(seconds * 1000), 0, msgspec.json.encode(record), words)

    def listen(self, heard: Callable[[str], None]) -> Changes:
        """Call `heard`, in another thread, when a version is published or an engine changes; see broker/changes.py."""
        return Changes(self._connection, self._keys.named("changes"), heard)

    # --- watching -----------------------------------------------------------------------------------------------------

    def snapshot(self, detail: int = 0, *, names: bool = False) -> Snapshot:
        """Everything at one instant. detail: that many events and dead letters, 0: neither. names: lag by name, too."""
        return view.parse(self._call("snapshot", detail, int(names)))

    def dead_letters(self) -> list[dict[str, Any]]:
        """Prompts that were given up, newest last: group_id, prompt_index, attempt, reason, worker, time_ms."""
        found = cast(dict[bytes, bytes], self._hash("dead", "hgetall"))
        return sorted((msgspec.json.decode(text) for text in found.values()), key=lambda letter: letter["time_ms"])

    def requeue(self, prompt_index: int) -> bool:
        """Issue the prompt of a dead letter again, with all its tries. False if it is none."""
        return bool(self._call("requeue", prompt_index)[0])

    def groups(self, state: ListedState, limit: int = 100) -> list[GroupRecord]:
        """Groups that are not closed, the first to be used or lost first. `trained`: not yet durable, with filtered."""
        return [view.group_record(item) for item in self._call("groups", state, limit)]

    def group(self, group_id: int) -> GroupRecord | None:
        """One group, None if it is closed (or never was)."""
        found = self._call("groups", "id", group_id)
        return view.group_record(found[0]) if found else None

    def events(self, limit: int = 100) -> list[dict[str, Any]]:
        """The newest events first: time_ms, kind, text. The last 1000 are kept."""
        return [msgspec.json.decode(text) for text in self._newest("events", limit)]

    def evaluations(self, limit: int = 100) -> list[dict[str, Any]]:
        """The newest results first. The last 1000 are kept."""
        return [msgspec.json.decode(text) for text in self._newest("evaluations", limit)]

    def metrics_history(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Metrics of the newest steps first. The last 1000 are kept."""
        return [msgspec.json.decode(text) for text in self._newest("metrics", limit)]

    def server_time_ms(self) -> int:
        """The server's clock, in milliseconds since 1970."""
        seconds, micros = self._connection.attempt(self._connection.client.time)
        return int(seconds) * 1000 + int(micros) // 1000

    # --- inside -------------------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: str | int | float | bytes) -> list[Any]:
        return self._initialised(self._connection.call(name, [self._keys.policy], arguments))

    def _initialised(self, answer: list[Any]) -> list[Any]:
        if answer and answer[0] == "uninitialised":
            raise NotInitialised(
                f"run {self.run_id!r} is not in Redis at {self._connection.url}. If the server lost its data, restart "
                "the trainer from its checkpoint; else check run.id."
            )
        return answer

    def _tidy(self, *, sweep: bool = False) -> None:
        """Housekeeping after a transition that is done: an error here is not the transition's; the next one tries."""
        with contextlib.suppress(BrokerError, OSError):
            self.collect_payloads(sweep=sweep)

    def _store(self) -> PayloadStore:
        """The place that the run's policy names: all processes of a run agree without being told."""
        if self._chosen is None:
            store, codec = store_of_run(self._connection, self._keys)
            if store is None:
                return RedisPayloadStore(self._connection, self._keys)  # not initialised, as the transition will say
            self._chosen, self._codec = store, codec
        return self._chosen

    def _trainer(self, name: str, epoch: int, *arguments: str | int | float | bytes, asked: int = 0) -> list[Any]:
        answer = self._call(name, epoch, *arguments)
        if answer[0] == "fenced":
            raise Fenced(epoch, int(answer[1]))
        if answer[0] == "version":
            raise VersionMismatch(name, asked, int(answer[1]))
        return answer

    def _hash(self, name: str, command: Literal["hgetall", "hdel"], *fields: str) -> object:
        action = getattr(self._connection.client, command)
        return self._connection.attempt(lambda: action(self._keys.named(name), *fields))

    def _newest(self, name: str, limit: int) -> list[bytes]:
        client = self._connection.client
        found: Any = self._connection.attempt(lambda: client.lrange(self._keys.named(name), 0, limit - 1))
        return list(found)
