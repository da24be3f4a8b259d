"""What a rollout worker asks of the queue: leave to generate a group, and what became of it.

Invariant: a group that was admitted is submitted, failed, dropped or released by its holder, or its lease expires; each
is one atomic transition, and repeating it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from broker import wire
from broker.connection import OutOfMemory
from broker.errors import WrongRun
from broker.handle import RunHandle
from broker.store import Staged, submission
from broker.types import Group, Refused, Ticket, check_group

SubmitResult = Literal["accepted"]


class WorkerCalls(RunHandle):
    """The rollout worker's part of `Broker`."""

    def admit(self, worker: str, engine_id: str) -> Ticket | Refused:
        """Ask for a group to generate on an engine. Renew its lease, then submit, fail or release it."""
        answer = self.admit_many(worker, engine_id, 1)
        return answer if isinstance(answer, Refused) else answer[0]

    def admit_many(self, worker: str, engine_id: str, groups: int) -> tuple[Ticket, ...] | Refused:
        """Ask for up to `groups` groups at once; at least one, or Refused."""
        try:
            return _tickets(self._call("admit", worker, engine_id, groups))
        except OutOfMemory as error:
            return Refused("memory", str(error))

    def submit(self, group: Group, *, stats: Mapping[str, float] | None = None) -> SubmitResult | Refused:
        """Hand a finished group in. stats: added to the counters of the same names. Refused("memory"): try again later.

        Raises InvalidTrajectory, or WrongRun for a group of another run.
        """
        return self.submit_many([group], stats=stats)[0]

    def submit_many(
        self, groups: Sequence[Group], *, stats: Mapping[str, float] | None = None
    ) -> tuple[SubmitResult | Refused, ...]:
        """Hand several groups in, in one round trip; an answer for each. stats: counted once if any of them is new."""
        if not groups:
            return ()
        try:
            return self._submit(groups, stats or {})[0]
        except OutOfMemory as error:
            return (Refused("memory", str(error)),) * len(groups)

    def submit_and_admit(
        self, groups: Sequence[Group], engine_id: str, wanted: int, *, stats: Mapping[str, float] | None = None
    ) -> tuple[tuple[SubmitResult | Refused, ...], tuple[Ticket, ...] | Refused]:
        """`submit_many`, then `admit_many` of `wanted` groups for the same worker, as one atomic change.

        For a loop that asks for its next groups when it hands in the last. groups: at least one, all of one worker;
        else ValueError.
        """
        if len({group.worker for group in groups}) != 1:
            raise ValueError("submit_and_admit takes groups of one worker, at least one; ask alone with admit_many")
        try:
            results, answer = self._submit(groups, stats or {}, (groups[0].worker, engine_id, wanted))
            return results, _tickets(answer)
        except OutOfMemory as error:
            return self.submit_many(groups, stats=stats), Refused("memory", str(error))

    def _submit(
        self, groups: Sequence[Group], stats: Mapping[str, float], admission: tuple[str, str, int] | None = None
    ) -> tuple[tuple[SubmitResult | Refused, ...], list[Any]]:
        """The answer for each group, and that of the admission that follows, if it is asked for."""
        for group in groups:
            check_group(group)
            if group.run != self.run_id:
                raise WrongRun(
                    f"group {group.group_id} belongs to run {group.run!r}, this broker serves {self.run_id!r}"
                )
        store = self._store()
        payloads = [wire.pieces(group, self._codec) for group in groups]  # all, before any is laid aside
        arguments: list[str | int | float] = [len(groups)]
        staged: list[Staged] = []
        for group, payload in zip(groups, payloads, strict=True):
            staged.append(store.stage(group.group_id, payload))
            arguments += submission(group, staged[-1])
        for name, value in stats.items():
            arguments += [name, float(value)]
        keys = [self._keys.prefix, *(s.key for s in staged if s.key)]
        before = [command for s in staged for command in s.commands]
        if admission is None:
            _, answer = self._connection.call_after(before, "submit", keys, arguments)
            answers, tickets = self._initialised(answer), []
        else:
            both = [len(arguments), *arguments, *admission]
            _, answer = self._connection.call_after(before, "submit+admit", keys, both)
            answers, tickets = self._initialised(answer)
        results: list[SubmitResult | Refused] = []
        for answer, of in zip(answers, staged, strict=True):
            results.append("accepted" if answer[0] == "accepted" else Refused(answer[1], answer[2]))
            store.settle(of, answer[0] == "accepted")
        return tuple(results), tickets

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

    def release(self, group_id: int, worker: str, tokens: int = 0) -> bool:
        """Give a group back because the worker stops; not counted as a try. False if it was not held.

        tokens: trainable tokens that were generated for nothing.
        """
        return bool(self._call("fail", group_id, worker, "released", tokens, "again")[0])

    def renew(self, worker: str, group_ids: Sequence[int]) -> tuple[int, ...]:
        """Keep groups for another lease time; returns those still held, the others are to be abandoned."""
        return tuple(map(int, self._call("renew", worker, *group_ids))) if group_ids else ()

    def heartbeat_worker(self, worker: str, stats: Mapping[str, float | int | str]) -> None:
        """Show a worker on the monitor; the server adds heartbeat_ms."""
        self._call("heartbeat", worker, msgspec.json.encode(dict(stats)))


def _tickets(answer: list[Any]) -> tuple[Ticket, ...] | Refused:
    if answer[0] == "refused":
        return Refused(answer[1], answer[2])
    return tuple(Ticket(*map(int, item)) for item in answer[1:])
