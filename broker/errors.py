"""What can go wrong between a process and the queue, each as its own exception with a message that says what to do.

Invariant: no exception of redis-py leaves the broker; whoever catches `BrokerError` has caught everything.
"""

from __future__ import annotations


class BrokerError(Exception):
    """Base of all errors of the broker."""


class NotAllowed(BrokerError):
    """The user of this process may not do that in Redis; nothing was changed that others rely on."""


class BrokerUnavailable(BrokerError):
    """The server does not answer, refuses the password, or is still loading; worth trying again later."""


class NotInitialised(BrokerError):
    """The run's policy is not in Redis: never written, or the server lost its data (flushed, or replaced)."""


class SchemaMismatch(BrokerError):
    """Data of another schema version, or settings of another run under this run's keys."""


class WrongRun(BrokerError):
    """A payload that belongs to another run."""


class CorruptPayload(BrokerError):
    """A payload that is missing, truncated, or fails its checksum; the trainer rejects the group and goes on."""

    def __init__(self, group_id: int, why: str) -> None:
        super().__init__(f"payload of group {group_id}: {why}")
        self.group_id = group_id
        self.why = why


class Fenced(BrokerError):
    """A newer trainer holds the run; this one must stop. holder: the newer epoch."""

    def __init__(self, epoch: int, holder: int) -> None:
        super().__init__(
            f"epoch {epoch} is fenced: a trainer with epoch {holder} has attached to this run. Stop this one."
        )
        self.epoch = epoch
        self.holder = holder


class VersionMismatch(BrokerError):
    """The trainer's version or step does not continue what is recorded; it must attach again from its checkpoint."""

    def __init__(self, what: str, asked: int, recorded: int) -> None:
        super().__init__(f"{what}: {asked} does not continue the recorded {recorded}. Attach again from a checkpoint.")
        self.asked = asked
        self.recorded = recorded


class NotLeased(BrokerError):
    """A step names a group that is not leased to the trainer (or names it twice); nothing was changed."""

    def __init__(self, group_id: int) -> None:
        super().__init__(f"group {group_id} is not leased to this trainer; the step was not recorded.")
        self.group_id = group_id
