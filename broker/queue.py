"""The queue: every transition of a group, from admission to a durable step, and the registry of versions and engines.

Invariant: each method is one atomic script (broker/lua), so the ledger closes between any two of them; the lag bound
is checked at `admit`, `submit` and `pull`. Nothing is decided here: the rules are in the scripts and, as pure
functions, in broker/lag.py. Synchronous and thread-safe; async callers use asyncio.to_thread. Any method may raise
BrokerUnavailable.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from broker import snapshot as view
from broker.connection import Connection
from broker.errors import BrokerError, SchemaMismatch
from broker.memory import keep_large_buffers
from broker.registry import RegistryCalls
from broker.trainer_calls import TrainerCalls
from broker.types import Steered
from broker.watch import WatchCalls
from broker.worker_calls import WorkerCalls
from configs.schema import RunConfig
from configs.secrets import redis_user

SCHEMA = "4"
Command = Literal["lag", "pause", "resume", "drain", "checkpoint", "evaluate"]


class Broker(WorkerCalls, TrainerCalls, RegistryCalls, WatchCalls):
    """A process' handle on one run, in parts by who calls them; here: set-up and steering."""

    @classmethod
    def connect(
        cls,
        url: str,
        run_id: str,
        *,
        password: str | None = None,
        timeout_s: float = 10.0,
        user: str | None = None,
        ca_file: Path | None = None,
    ) -> Broker:
        """Open a handle and see that the server answers; raises BrokerUnavailable after `timeout_s` seconds."""
        keep_large_buffers()
        connection = Connection(url, password=password, timeout_s=timeout_s, user=user, ca_file=ca_file)
        connection.attempt(connection.client.ping)
        return cls(connection, run_id)

    @classmethod
    def of_run(cls, config: RunConfig, password: str | None, *, timeout_s: float | None = None) -> Broker:
        """`connect` to the server that a run's configuration names, as the user that the environment names, if any."""
        redis = config.redis
        return cls.connect(
            redis.url or "",
            config.run.id,
            password=password,
            timeout_s=redis.timeout_s if timeout_s is None else timeout_s,
            user=redis_user(),
            ca_file=redis.ca_file,
        )

    def close(self) -> None:
        """Close the connections; the run is untouched."""
        self._connection.close()

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
            "max_bytes": config.redis.payload_bytes,
            "payloads": config.redis.payloads,
            "payload_folder": str(config.redis.payload_folder or ""),
            "compression": config.redis.compression,
        }
        flat = [item for pair in settings.items() for item in pair]
        answer = self._connection.call("initialise", [self._keys.prefix], [SCHEMA, self.run_id, *flat])
        if answer[0] == "schema":
            raise SchemaMismatch(
                f"Redis holds run {answer[2]!r} with schema {answer[1]} under the keys of {self.run_id!r} "
                f"(schema {SCHEMA}). Use another run id, or the release that wrote it."
            )

    def set_status(self, status: Literal["starting", "running", "draining", "finished", "stopped"]) -> None:
        """Say where the run is; `draining` stops admission, `finished` and `stopped` tell workers to end."""
        self._call("set_policy", "status", status)
        if status in ("finished", "stopped"):
            with contextlib.suppress(BrokerError, OSError):  # housekeeping
                self._store().end()

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
        return view.steered(self._call("steer", command, value, why, "" if expected is None else expected))
