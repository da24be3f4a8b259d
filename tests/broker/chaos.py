"""Light workers and a trainer as real processes over the real broker, to be killed at any instant.

What they did is on disk: each worker's acknowledged groups, and the trainer's checkpoint with the history that it goes
on from. A checkpoint is written aside, synced and renamed, as a real one is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from broker.errors import BrokerError, BrokerUnavailable, Fenced
from broker.queue import Broker
from broker.types import Delivery, EngineRecord, EngineState, Outcome, PromptCursor, Refused, VersionRecord
from tests.broker.helpers import ENGINE, finished
from tests.conftest import RUN

GROUPS, SAVE_EVERY = 2, 3
PAUSE_S = 0.005


def worker(url: str, folder: Path, index: int) -> None:
    """Generates until killed; a line of `worker-<index>` for each group that was acknowledged."""
    name, chance = f"worker-{index}", random.Random(os.getpid())
    with (folder / name).open("a", encoding="utf-8") as log:
        while True:
            with contextlib.suppress(BrokerError), contextlib.closing(Broker.connect(url, RUN, timeout_s=1)) as broker:
                while True:
                    answer = broker.admit(f"{name}-{os.getpid()}", ENGINE)
                    if isinstance(answer, Refused):
                        time.sleep(PAUSE_S)
                        continue
                    time.sleep(chance.random() * PAUSE_S)
                    group = finished(answer, RUN, worker=f"{name}-{os.getpid()}")
                    if broker.submit(group) == "accepted":
                        log.write(f"{answer.group_id}\n")
                        log.flush()
            time.sleep(PAUSE_S)


class Trainer:
    """history: (group id, prompt, lag) of every group trained in the history that it holds."""

    def __init__(self, broker: Broker, folder: Path, max_lag: int) -> None:
        self.broker, self.file, self.max_lag = broker, folder / "checkpoint", max_lag
        saved = json.loads(self.file.read_text()) if self.file.exists() else None
        self.history: list[list[int]] = saved["history"] if saved else []
        self.step: int = saved["step"] if saved else 0
        consumed: list[int] = saved["consumed"] if saved else []
        self.cursor = PromptCursor(saved["next"], tuple(saved["open"])) if saved else PromptCursor()
        state = broker.attach_trainer(
            checkpoint_step=self.step,
            checkpoint_version=saved["version"] if saved else -1,
            consumed=consumed,
            cursor=self.cursor if saved else None,
        )
        self.epoch = state.epoch
        self.consumed: list[int] = []
        self.version = broker.name_version(self.epoch)
        self.publish()

    def publish(self) -> None:
        """Publish, and play the engine that loads it."""
        self.broker.publish(self.epoch, VersionRecord(self.version, self.step, "weights", "sum"))
        self.broker.register_engine(EngineRecord(ENGINE, "http://engine", EngineState.SERVING, self.version))

    def work(self) -> None:
        """One step, if a batch is there."""
        batch = self.broker.pull(self.epoch, self.version, GROUPS)
        if isinstance(batch, Refused):
            time.sleep(PAUSE_S)
            return
        self.train(batch)
        if self.step % SAVE_EVERY == 0:
            self.save()

    def train(self, batch: Sequence[Delivery]) -> None:
        """The effect on the weights comes first, as in a real trainer; a crash may follow at any point."""
        lags: dict[int, int] = {}
        for group in self.broker.fetch([d.group_id for d in batch]):
            lag = self.version - (self.version if group.oldest_version is None else group.oldest_version)
            lags[lag] = lags.get(lag, 0) + group.response_tokens
            self.history.append([group.group_id, group.prompt_index, lag])
            self.consumed.append(group.group_id)
        self.broker.step(self.epoch, self.version, [Outcome(d.group_id) for d in batch], lags, {})
        self.step, self.version = self.step + 1, self.version + 1
        self.publish()

    def save(self) -> None:
        """A durable checkpoint, then the commit."""
        self.cursor = self.broker.prompt_cursor(self.epoch, self.step)
        state = {
            "step": self.step,
            "version": self.version,
            "consumed": self.consumed,
            "next": self.cursor.next_index,
            "open": self.cursor.open,
            "history": self.history,
        }
        aside = self.file.with_suffix(".aside")
        with aside.open("w", encoding="utf-8") as out:
            json.dump(state, out)
            out.flush()
            os.fsync(out.fileno())
        aside.rename(self.file)
        self.broker.commit(self.epoch, self.step)
        self.consumed = []


def trainer(url: str, folder: Path, max_lag: int) -> None:
    """Trains until the file `stop` is there; starts again from its checkpoint whenever the queue says so."""
    while not (folder / "done").exists():
        with (
            contextlib.suppress(BrokerUnavailable),
            contextlib.closing(Broker.connect(url, RUN, timeout_s=1)) as broker,
        ):
            try:
                held = Trainer(broker, folder, max_lag)
                while not (folder / "stop").exists():
                    held.work()
                held.save()
                broker.return_leased(held.epoch)
                (folder / "done").touch()
            except Fenced:
                return  # a newer one runs
            except BrokerError as error:
                with (folder / "trainer.log").open("a", encoding="utf-8") as log:
                    log.write(f"{type(error).__name__}: {error}\n")
        time.sleep(PAUSE_S)
