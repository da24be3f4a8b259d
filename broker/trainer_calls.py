"""What the trainer asks of the queue: batches, steps, commits, and names for its weights.

Invariant: every call carries the epoch that `attach_trainer` gave and raises Fenced once a newer one exists. A step and
its commit are two calls; what lies between is made durable, or trained again, by the next attachment.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from broker import snapshot as view
from broker.changes import Changes
from broker.errors import Fenced, NotLeased, VersionMismatch
from broker.handle import RunHandle
from broker.types import Batch, Delivery, Outcome, PromptCursor, Refused, TrainerState, VersionRecord


class TrainerCalls(RunHandle):
    """The trainer's part of `Broker`."""

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
        answer = self._trainer("pull", epoch, version, groups, uuid.uuid4().hex, 0, asked=version)
        return Refused(answer[1], answer[2]) if answer[0] == "refused" else _deliveries(answer)

    def pull_batch(self, epoch: int, version: int, groups: int) -> Batch | Refused:
        """`pull`, then `fetch`; with what comes next, for `step_and_pull`.

        Raises CorruptPayload when the batch is leased and a payload cannot be read: reject it, and return_leased.
        """
        answer = self._trainer("pull", epoch, version, groups, uuid.uuid4().hex, groups, asked=version)
        return self._batch(answer, {})

    def listen_for_batches(self, heard: Callable[[str], None]) -> Changes:
        """Call `heard`, in another thread, when groups arrived and a step's are ready; see broker/changes.py."""
        return Changes(self._connection, self._keys.named("batches"), heard)

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
        answer = self._trainer("step", epoch, version, *_step(outcomes, lag_tokens, metrics), asked=version)
        if answer[0] == "not-leased":
            raise NotLeased(int(answer[1]))
        self._tidy()

    def step_and_pull(
        self,
        epoch: int,
        version: int,
        outcomes: Sequence[Outcome],
        lag_tokens: Mapping[int, int],
        metrics: Mapping[str, object],
        groups: int,
        ahead: Sequence[int] = (),
    ) -> Batch | Refused:
        """`step`, then `pull_batch` of `groups` groups at the next version, as one atomic change.

        For a trainer of one rank that takes its next batch when it has done one. ahead: `Batch.ahead` of the last one;
        payloads of these come in the same round trip. Errors as of `step`: then nothing is pulled; or as of
        `pull_batch`: then the step is recorded.
        """
        first = (epoch, version, *_step(outcomes, lag_tokens, metrics))
        second = (epoch, version + 1, groups, uuid.uuid4().hex, groups)
        before = [self._store().asks(ahead)] if ahead else []
        arguments = [len(first), *first, *second]
        found, answer = self._connection.call_after(before, "step+pull", [self._keys.prefix], arguments)
        stepped, pulled = self._initialised(answer)
        if self._allowed(stepped, "step", epoch, version)[0] == "not-leased":
            raise NotLeased(int(stepped[1]))
        self._tidy()
        return self._batch(pulled, dict(zip(ahead, found[0], strict=True)) if ahead else {})

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

    def _batch(self, answer: list[Any], ahead: Mapping[int, Any]) -> Batch | Refused:
        """ahead: by group id what Redis said to `PayloadStore.asks`, of some groups."""
        if answer[0] == "refused":
            return Refused(answer[1], answer[2])
        deliveries = _deliveries(answer)
        ids = [d.group_id for d in deliveries]
        came = self._store().found([ahead.get(i) for i in ids])
        payloads = {i: data for i, data in zip(ids, came, strict=True) if data is not None}
        missing = [i for i in ids if i not in payloads]
        payloads.update(zip(missing, self.fetch_bytes(missing), strict=True))
        return Batch(deliveries, tuple(self._decoded(ids, [payloads[i] for i in ids])), tuple(map(int, answer[1])))

    def _trainer(self, name: str, epoch: int, *arguments: str | int | float | bytes, asked: int = 0) -> list[Any]:
        return self._allowed(self._call(name, epoch, *arguments), name, epoch, asked)

    def _allowed(self, answer: list[Any], name: str, epoch: int, asked: int) -> list[Any]:
        if answer[0] == "fenced":
            raise Fenced(epoch, int(answer[1]))
        if answer[0] == "version":
            raise VersionMismatch(name, asked, int(answer[1]))
        return answer


def _deliveries(answer: list[Any]) -> tuple[Delivery, ...]:
    return tuple(Delivery(*map(int, item)) for item in answer[2:])


def _step(
    outcomes: Sequence[Outcome], lag_tokens: Mapping[int, int], metrics: Mapping[str, object]
) -> list[str | int | bytes]:
    """What lua/step.lua wants to know beyond epoch and version."""
    flat = [item for o in outcomes for item in (o.group_id, int(o.filtered))]
    lags = [item for lag, tokens in lag_tokens.items() for item in (lag, tokens)]
    return [msgspec.json.encode(dict(metrics)), len(outcomes), *flat, *lags]
