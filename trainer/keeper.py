"""What outlives a step: published versions and checkpoints, written beside the training.

Invariants. A version is announced after its weights are whole on disk, a step is committed after the checkpoint that
holds it is durable, and both happen in the order of the steps. The step itself waits for one copy of the weights to
memory, and for the write before if that has not ended. What a checkpoint says is what was true when it was staged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from broker import delta
from broker.types import PromptCursor, VersionRecord
from configs.schema import RunConfig
from trainer import versions
from trainer.background import Background, Job
from trainer.ports import CheckpointPort, PolicyPort, Ranks, SavedState, TrainerBroker
from trainer.progress import Progress
from trainer.timing import Stopwatch

PATIENCE_S = 20.0
"""How long a trainer that ends with an error waits for the write under way, in seconds."""


class Keeper:
    """Publishes and saves for one rank. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        config: RunConfig,
        *,
        broker: TrainerBroker,
        ranks: Ranks,
        policy: PolicyPort,
        checkpoints: CheckpointPort,
        background: Background,
    ) -> None:
        self._config, self._broker, self._ranks = config, broker, ranks
        self._policy, self._checkpoints = policy, checkpoints
        self._background = background
        self._weights = config.run.folder / "weights"

    def newest_on_disk(self) -> int:
        """The largest version that has a folder of weights, -1: none. No engine was ever told of a larger one."""
        return max(versions.versions_on_disk(self._weights), default=-1)

    def remove_unfinished(self) -> None:
        """Delete the weights that a trainer that died was writing, which may be as large as all others."""
        for root in (self._config.run.folder, self._weights):
            versions.remove_unfinished(root)

    def due(self, progress: Progress, asked: int = -1) -> tuple[bool, bool]:
        """Whether this version is to be published, and this step to be saved; both at the last step.

        asked: the step at which an operator asked for a checkpoint, -1 for none.
        """
        last = progress.step == self._config.run.steps
        interval = self._config.trainer.checkpoint.interval_steps
        publish = progress.version - progress.published >= self._config.weights.publish_interval
        save = progress.step - progress.checkpointed >= interval or asked > progress.checkpointed
        return last or publish, last or save

    def publish(self, progress: Progress, watch: Stopwatch) -> None:
        """Copy this version now; it is written and announced later, and versions that nobody needs are removed."""
        epoch, version, step = progress.epoch, progress.version, progress.step
        folder = versions.folder_of(self._weights, version)

        def announce() -> None:
            if self._config.weights.transport == "delta":
                versions.write_delta(self._weights, version)
            record = VersionRecord(version, step, str(folder.absolute()), delta.checksum_of(folder))
            self._broker.publish(epoch, record)
            limits = self._config.weights
            versions.remove_old(self._broker, self._weights, limits.keep, limits.update_timeout_s)

        with watch.measure("export_s"):
            self._background.submit("export", lambda: self._written(folder, announce))
        progress.published = version

    def _written(self, folder: Path, then: Callable[[], None] = lambda: None) -> Job:
        write = self._policy.stage_export(folder)

        def job() -> None:
            if self._ranks.is_main:
                versions.remove_leftover(folder)  # the writing begins with a word of the main rank
            write()
            if self._ranks.is_main:
                then()

        return job

    def checkpoint(self, progress: Progress, watch: Stopwatch) -> None:
        """Copy this step's state now; later it is saved, then committed: from there on its groups are durable."""
        p, gate = progress, progress.gate
        kept = [gate.quantile, gate.scale] if gate is not None and math.isfinite(gate.quantile) else None
        cursor = self._broker.prompt_cursor(p.epoch, p.step) if self._ranks.is_main else PromptCursor()
        state = SavedState(p.step, p.version, tuple(p.consumed), cursor, {"gate": kept, "began": p.began}, p.epoch)
        epoch = p.epoch

        def prepare() -> Job:
            write = self._checkpoints.stage(state)

            def job() -> None:
                write()
                if self._ranks.is_main:
                    self._broker.commit(epoch, state.step)

            return job

        with watch.measure("checkpoint_s"):
            # At most one checkpoint is under way: when this one is staged, the one before is committed, so the groups
            # since then are all that it has to name.
            self._background.submit("checkpoint", prepare)
        p.checkpointed, p.consumed = p.step, []

    def export_final(self) -> None:
        """Write the weights to <run>/model-final and wait for everything."""
        self._background.submit("export", lambda: self._written(self._config.run.folder / "model-final"))
        self.wait()

    def check(self) -> None:
        """Raise the error of a write that failed."""
        self._background.check()

    def wait(self) -> None:
        """Until all is written, announced and committed; raises the error of what failed."""
        self._background.wait()

    def close(self) -> None:
        """Give the write under way a moment; begin none."""
        self._background.close(PATIENCE_S)
