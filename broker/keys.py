"""Names of all keys of a run in Redis.

Invariant: every key of a run starts with `lagrange:{run}:`; the braces make the run id the hash tag, so a run lives
in one slot of a cluster and its transitions can be scripts.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of the run `run`; broker/lua/common.lua describes what each holds."""

    run: str

    @property
    def prefix(self) -> str:
        """What all keys of the run start with. Every script gets it as its first key and derives the others from it."""
        return f"lagrange:{{{self.run}}}:"

    @property
    def policy(self) -> str:
        """The hash of the run's settings, step, version and status."""
        return self.named("policy")

    def named(self, name: str) -> str:
        """The key `name` of this run."""
        return self.prefix + name

    def group(self, group_id: int | str) -> str:
        """Record of a group that is not closed."""
        return self.named(f"group:{group_id}")

    def payload(self, group_id: int) -> str:
        """Bytes of an accepted group."""
        return self.named(f"payload:{group_id}")

    def staged(self, group_id: int) -> str:
        """A fresh key for bytes on their way in; it expires by itself if the submission never comes."""
        return self.named(f"staged:{group_id}:{secrets.token_hex(6)}")
