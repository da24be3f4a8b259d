"""The loop without an engine and without Megatron: a bigram policy, and rollouts drawn from what the trainer published.

Everything else is real: broker, Redis, loss, step logic, metrics, versions on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broker.queue import Broker
from broker.types import (
    PAST_THE_END_MS,
    EngineRecord,
    EngineState,
    Group,
    PromptCursor,
    Refused,
    Ticket,
    Trajectory,
    VersionRun,
)
from configs.schema import RunConfig
from tests.trainer.helpers import OneRank
from trainer.batch import MicroBatch
from trainer.loop import Trainer
from trainer.metrics import JsonLines
from trainer.ports import LossFunction, SavedState

VOCABULARY = 8


class BigramPolicy:
    """logits = table[token]; AdamW. Implements PolicyPort."""

    def __init__(self, learning: bool = True) -> None:
        self.table = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.table], lr=1.0, weight_decay=0.0)
        self.steps = 0
        self.trained: list[list[MicroBatch]] = []
        self.poison: Callable[[int], bool] = lambda step: False
        self.learning = learning

    def _scores(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        every = torch.log_softmax(self.table[batch.token_ids], -1)
        entropy = -(every.exp() * every).sum(-1)
        return every.gather(1, batch.labels[:, None]).squeeze(1), entropy

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Any]:
        with torch.no_grad():
            return [_Scores(*self._scores(b)) for b in micro_batches]

    def reference_log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Any]:
        kept = self.table
        self.table = torch.zeros_like(kept)
        try:
            return self.log_probs(micro_batches)
        finally:
            self.table = kept

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, *, entropy_gradient: bool = False
    ) -> list[dict[str, Tensor]]:
        self.trained.append(list(micro_batches))
        self.optimizer.zero_grad()
        reports = []
        for batch in micro_batches:
            loss, report = loss_function(batch, *self._scores(batch))
            loss.backward()
            reports.append({k: v.detach().clone() for k, v in report.items()})
        if self.poison(self.steps):
            assert self.table.grad is not None
            self.table.grad[0, 0] = float("nan")
        return reports

    def replay_metrics(self) -> Any:
        return type("Replay", (), {"overlap": 0.5})()

    def gradients_finite(self) -> bool:
        assert self.table.grad is not None
        return bool(torch.isfinite(self.table.grad).all())

    def optimizer_step(self, learning_rate: float) -> tuple[float, bool]:
        assert self.table.grad is not None
        self.optimizer.param_groups[0]["lr"] = learning_rate
        if self.learning:
            self.optimizer.step()
        self.steps += 1
        return float(self.table.grad.norm()), True

    def stage_export(self, folder: Path) -> Callable[[], None]:
        data = json.dumps(self.table.detach().tolist()).encode()

        def write() -> None:
            folder.mkdir(parents=True)
            (folder / "table.json").write_bytes(data)
            (folder / "manifest.json").write_text(hashlib.sha256(data).hexdigest())

        return write


class _Scores:
    def __init__(self, log_probs: Tensor, entropy: Tensor) -> None:
        self.log_probs, self.entropy = log_probs, entropy


class MemoryCheckpoints:
    """Checkpoints that outlive a trainer but not the test. Implements CheckpointPort."""

    def __init__(self) -> None:
        self.kept: list[tuple[SavedState, dict[str, Any], Tensor]] = []
        self.policy: BigramPolicy | None = None

    def of(self, policy: BigramPolicy) -> MemoryCheckpoints:
        self.policy = policy
        return self

    def stage(self, state: SavedState) -> Callable[[], None]:
        assert self.policy is not None
        optimizer = json_copy(torch.optim.AdamW.state_dict(self.policy.optimizer))
        table = self.policy.table.detach().clone()
        return lambda: self.kept.append((state, optimizer, table))

    def load_newest(self) -> SavedState | None:
        if not self.kept:
            return None
        assert self.policy is not None
        state, optimizer, table = self.kept[-1]
        self.policy.optimizer.load_state_dict(json_copy(optimizer))
        with torch.no_grad():
            self.policy.table.copy_(table)
        return state

    def take_over(self, epoch: int, step: int) -> None:
        self.kept = [kept for kept in self.kept if kept[0].step <= step]


def json_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: json_copy(v) for k, v in value.items()}
    if isinstance(value, list):
        return [json_copy(v) for v in value]
    return value


class World:
    """Engine, weight-sync and rollout worker in one object, driven by the trainer's own waiting."""

    def __init__(self, config: RunConfig, broker: Broker, *, forced_queue: bool = False, seed: int = 0) -> None:
        self.config, self.broker = config, broker
        self.random = np.random.default_rng(seed)
        self.table = np.zeros((VOCABULARY, VOCABULARY))
        self.version = -1
        self.prompts: int | None = None  # without end
        self.refusals: list[str] = []
        self.reward: Callable[[int, np.ndarray], float] = lambda prompt, answer: float(np.mean(answer == prompt))
        broker.register_engine(EngineRecord("e", "http://e", EngineState.JOINING))

    def sync(self) -> None:
        """The engine takes the newest published version."""
        record = self.broker.published()
        if record is not None and record.version != self.version:
            self.table = np.array(json.loads((Path(record.path) / "table.json").read_text()))
            self.version = record.version
            self.broker.update_engine(EngineRecord("e", "http://e", EngineState.SERVING, record.version))

    def feed(self, most: int = 1000) -> int:
        """Generate groups until admission refuses; how many were submitted."""
        self.sync()
        done = 0
        while done < most:
            ticket = self.broker.admit("w", "e")
            if isinstance(ticket, Refused):
                self.refusals.append(ticket.reason)
                break
            if self.prompts is not None and ticket.prompt_index >= self.prompts:
                now = ticket.lease_deadline_ms - round(1000 * self.config.rollout.lease_s)
                self.broker.release(ticket.group_id, "w")
                self.broker.heartbeat_worker("w", {PAST_THE_END_MS: now})
                break
            try:
                group = self.group(ticket)
            except ValueError as error:  # as of a reward that raises
                self.broker.fail(ticket.group_id, "w", str(error))
                continue
            if self.broker.submit(group) == "accepted":
                done += 1
        return done

    def group(self, ticket: Ticket) -> Group:
        prompt = ticket.prompt_index % (VOCABULARY - 1) + 1
        members = tuple(self.sample(prompt) for _ in range(self.config.rollout.samples_per_prompt))
        return Group(
            run=self.config.run.id,
            group_id=ticket.group_id,
            prompt_index=ticket.prompt_index,
            attempt=ticket.attempt,
            task="t",
            worker="w",
            engine="e",
            samples_wanted=len(members),
            generation_seconds=0.0,
            trajectories=members,
        )

    def sample(self, prompt: int) -> Trajectory:
        token, ids, log_probs = prompt, [], []
        for _ in range(self.config.rollout.max_new_tokens):
            logits = self.table[token]
            every = logits - np.logaddexp.reduce(logits)
            token = int(self.random.choice(VOCABULARY, p=np.exp(every) / np.exp(every).sum()))
            ids.append(token)
            log_probs.append(every[token])
        answer = np.array(ids, np.int32)
        return Trajectory(
            prompt_ids=np.array([prompt], np.int32),
            response_ids=answer,
            log_probs=np.array(log_probs, np.float32),
            loss_mask=np.ones(len(ids), np.bool_),
            versions=(VersionRun(0, len(ids), self.version),),
            reward=self.reward(prompt, answer),
            finish="length",
        )


def trainer_of(
    config: RunConfig,
    broker: Any,
    world: World,
    checkpoints: MemoryCheckpoints,
    *,
    policy: BigramPolicy | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Trainer:
    """A trainer whose waiting makes the world generate."""
    policy = policy or BigramPolicy()

    def feed(_seconds: float) -> None:
        world.feed()

    return Trainer(
        config,
        broker=broker,
        ranks=OneRank(),
        policy=policy,
        checkpoints=checkpoints.of(policy),
        sink=lambda step: JsonLines(config.run.folder / "metrics.jsonl", step),
        route_shape=None,
        stop=stop,
        pause=feed,
        **options,
    )


def records(config: RunConfig) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]


__all__ = ["BigramPolicy", "MemoryCheckpoints", "PromptCursor", "World", "records", "trainer_of"]


class Wrapped:
    """A broker in which some methods are replaced."""

    def __init__(self, inner: Broker, **replaced: Any) -> None:
        self._inner, self._replaced = inner, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._inner, name)
