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
from broker.types import Delivery, Outcome, PromptCursor, Refused, TrainerState, VersionRecord


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
        answer = self._trainer("pull", epoch, version, groups, uuid.uuid4().hex, asked=version)
        if answer[0] == "refused":
            return Refused(answer[1], answer[2])
        return tuple(Delivery(*map(int, item)) for item in answer[1:])

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

    def _trainer(self, name: str, epoch: int, *arguments: str | int | float | bytes, asked: int = 0) -> list[Any]:
        answer = self._call(name, epoch, *arguments)
        if answer[0] == "fenced":
            raise Fenced(epoch, int(answer[1]))
        if answer[0] == "version":
            raise VersionMismatch(name, asked, int(answer[1]))
        return answer
