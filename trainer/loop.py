"""The training loop: choose a batch, train it, record the step, publish, keep.

Invariants. 1: right before the update every trained token's lag is checked against the bound; a violation stops the
trainer. 2: a group's effect reaches the weights at most once in the history that survives: the step is recorded after
the update and committed after the checkpoint that holds it (`keeper`), and the checkpoint names the groups consumed
since the one before. 6: a fenced trainer ends at its next word with the broker, before it can publish or commit. A loss
or gradient that is not finite ends the run before the update, with the batch saved and its groups back in the queue.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import structlog
import torch

from broker.logs import bind_version
from broker.traces import NO_TRACES, Traces
from broker.types import Delivery, Group, Outcome, Refused
from configs.schema import RunConfig
from trainer.background import Background, Inline
from trainer.batch import RouteShape
from trainer.chooser import Choice, Chooser, EndOfPrompts, PromptsEnded, no_first_step, share_choice
from trainer.data import (
    Share,
    fetch_share,
    is_filtered,
    lacks_routes,
    reward_sums,
    samples_of,
    tokens_beyond,
    tokens_by_lag,
)
from trainer.failed_batch import save_failed_batch
from trainer.keeper import Keeper
from trainer.losses.catalogue import LossSettings, loss_settings
from trainer.losses.sat import Gate
from trainer.ports import CheckpointPort, MetricsSink, PolicyPort, Ranks, TrainerBroker
from trainer.progress import Progress, RunFailed, share_numbers
from trainer.quantile import SumCounts, alone
from trainer.timing import Stopwatch
from trainer.traced import Step, contexts_of, write_spans
from trainer.update import Moment, NotFinite, Updater

log = structlog.get_logger()

End = Literal["finished", "stopped"]


class Trainer:
    """One rank of the trainer; every rank runs the same methods in the same order."""

    def __init__(
        self,
        config: RunConfig,
        *,
        broker: TrainerBroker,
        ranks: Ranks,
        policy: PolicyPort,
        checkpoints: CheckpointPort,
        sink: Callable[[int], MetricsSink],
        route_shape: RouteShape | None,
        vocabulary: int | None = None,
        background: Background | None = None,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
        traces: Traces = NO_TRACES,
    ) -> None:
        """sink: makes the sink of metrics, given the step that the run resumes from; used on the main rank alone.
        route_shape: given when routing is replayed. vocabulary: of the model, None: token ids are not checked.
        background: where weights and checkpoints are written; default: in the step. stop: whether the process was asked
        to end. pause: between two looks at the queue, so many seconds or less. traces: where the main rank's spans go;
        the caller closes them."""
        self.config = config
        self.settings: LossSettings = loss_settings(config)
        self.broker, self.ranks, self.policy, self.checkpoints = broker, ranks, policy, checkpoints
        self.route_shape, self.vocabulary = route_shape, vocabulary
        self.progress = Progress()
        self._traces = traces
        self._make_sink = sink
        self._sink: MetricsSink | None = None
        self._stop, self._clock, self._wall, self._pause = stop, clock, wall, pause
        self._began = clock()
        self._keeper = Keeper(
            config,
            broker=broker,
            ranks=ranks,
            policy=policy,
            checkpoints=checkpoints,
            background=background or Inline(),
        )
        self._sum: SumCounts = ranks.sum_over_data if ranks.data_size > 1 else alone
        self._updater = Updater(
            config, self.settings, ranks=ranks, policy=policy, route_shape=route_shape, sum_over=self._sum
        )
        self._watch = Stopwatch(clock)

    def run(self) -> End:
        """Train to the end of the run or of its data set, or until asked to stop. Raises RunFailed, or an error of the
        broker."""
        try:
            self.attach()
            try:
                while self.progress.step < self.config.run.steps:
                    if not self.step():
                        self._save_on_stop()
                        return "stopped"
            except PromptsEnded:
                self._say_prompts_ended()
            self.finish()
            return "finished"
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the writer and of the sink of metrics; no record is lost without it."""
        self._keeper.close()
        if self._sink is not None:
            self._sink.close()

    # --- begin and end ------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Load the newest checkpoint, take the run over, and publish what is held under a version of its own."""
        p = self.progress
        saved = self.checkpoints.load_newest()
        if saved is not None:
            p.step = p.checkpointed = saved.step
            p.consumed = list(saved.consumed)
            if saved.extra.get("gate"):
                p.gate = Gate(*saved.extra["gate"])
        p.began = float(saved.extra.get("began", self._wall())) if saved else self._wall()
        self._began = self._clock() - max(0.0, self._wall() - p.began)
        named: list[int] = []
        if self.ranks.is_main:
            state = self.broker.attach_trainer(
                checkpoint_step=p.step,
                checkpoint_version=max(saved.version if saved else -1, self._keeper.newest_on_disk()),
                consumed=p.consumed,
                cursor=saved.cursor if saved else None,
            )
            self.checkpoints.take_over(state.epoch, p.step)  # whoever wrote there is fenced by now
            self._keeper.remove_unfinished()
            named = [state.epoch, self.broker.name_version(state.epoch)]
            self._sink = self._make_sink(p.step)
            log.info("attached", epoch=state.epoch, step=p.step, version=named[1], returned=state.returned)
        p.epoch, p.version = share_numbers(self.ranks, named)
        p.consumed = []  # attaching made them durable
        bind_version(p.version)
        self._keeper.publish(p, self._watch)
        self._watch = Stopwatch(self._clock)

    def finish(self) -> None:
        """Publish and keep the last weights, export the model, and say that the run is finished."""
        p = self.progress
        if p.published != p.version:
            self._keeper.publish(p, self._watch)
        if p.checkpointed != p.step:
            self._keeper.checkpoint(p, self._watch)
        self._keeper.export_final()
        if self.ranks.is_main:
            self.broker.set_status("finished")

    def _say_prompts_ended(self) -> None:
        """Raises RunFailed, on every rank with the same words, if the first step had not enough groups. Collective."""
        p, config = self.progress, self.config
        seen = self.broker.snapshot(detail=1) if self.ranks.is_main else None
        if p.step == 0:
            why = no_first_step(seen, config.trainer.groups_per_step).encode() if seen is not None else None
            raise RunFailed(self.ranks.broadcast_bytes(why).decode())
        if seen is not None:
            left = {"groups_left_over": seen.groups.ready, "dead_letters": seen.dead_letters}
            log.warning("the data set has ended", steps=p.step, of=config.run.steps, **left)

    def _save_on_stop(self) -> None:
        p = self.progress
        if p.step > p.checkpointed:
            self._keeper.checkpoint(p, self._watch)
        self._keeper.wait()
        if self.ranks.is_main:
            self.broker.return_leased(p.epoch)
            log.info("stopped", step=p.step, checkpoint=p.checkpointed)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Train one batch; False if the trainer was asked to stop before its update. Raises PromptsEnded."""
        p, watch = self.progress, self._watch
        chosen = self._choose(watch)
        if chosen is None:
            return False
        choice, share, groups = chosen
        fetched_ns, fetched = int(1e9 * self._wall()), watch.total
        bound = self._check_bound(groups)
        with watch.measure("pack_s"):
            samples = samples_of(groups, self.settings, self.ranks)
            filtered = self._filtered(choice.deliveries, share, groups)
        try:
            record, p.gate = self._updater.train(samples, Moment(p.step, p.version, bound, p.gate), watch)
        except NotFinite as error:
            self._fail(error, groups)
        record |= self._batch_facts(choice, groups, filtered)
        lags = self._sum(tokens_by_lag(groups, p.version, bound + 1)).tolist()
        traced = self.config.traces.endpoint is not None
        contexts = contexts_of(choice, share, groups, self._sum) if traced else []
        self._record(choice, filtered, {i: int(n) for i, n in enumerate(lags) if n}, record, watch)
        if any(contexts) and self.ranks.is_main:
            write_spans(self._traces, contexts, choice, filtered, self._done(watch, fetched_ns, fetched))
        return True

    def _done(self, watch: Stopwatch, fetched_ns: int, fetched: float) -> Step:
        """The step that was just recorded, for its spans. fetched: seconds of the watch at fetched_ns."""
        p = self.progress
        published = p.version if p.published == p.version else -1
        ended_ns = fetched_ns + int(1e9 * (watch.total - fetched))  # the system's clock may be set during a step
        return Step(p.step, p.version, published, p.epoch, watch.seconds, fetched_ns, ended_ns)

    def _choose(self, watch: Stopwatch) -> tuple[Choice, Share, list[Group]] | None:
        """A batch that every rank could read; groups that cannot be read are rejected and the rest is chosen anew."""
        p = self.progress
        while True:
            with watch.measure("wait_s"):
                choice = share_choice(self.ranks, self._chooser().next if self.ranks.is_main else None)
            if choice is None:
                return None
            with watch.measure("fetch_s"):
                share = fetch_share(self.broker, choice.deliveries, self.ranks, self.route_shape, self.vocabulary)
                bad = torch.zeros(len(choice.deliveries), dtype=torch.int64)
                for index in share.indexes:
                    bad[index] = int(choice.deliveries[index].group_id in share.problems)
                spoilt = bool(self._sum(bad).any())
            for group_id, why in share.problems.items():
                log.error("group rejected", group=group_id, why=why)
                self.broker.reject(p.epoch, group_id, why)
            if not spoilt:
                groups = [g for g in share.groups if g is not None]
                self._check_routes(groups)
                return choice, share, groups
            self.ranks.barrier()  # all rejections are recorded before the rest goes back
            if self.ranks.is_main:
                self.broker.return_leased(p.epoch)

    def _chooser(self) -> Chooser:
        return Chooser(
            pull=self._pull,
            now_ms=self.broker.server_time_ms,
            asked=self.broker.checkpoint_asked,
            stop=self._stop,
            ended=EndOfPrompts(self.broker.snapshot, self.config.trainer.groups_per_step),
            clock=self._clock,
            pause=self._pause,
            patience_s=min(self.config.trainer.collective_timeout_s / 3, 5.0),
            give_up_s=self.config.trainer.lease_s,
        )

    def _pull(self) -> tuple[Delivery, ...] | Refused:
        self._keeper.check()  # a version that cannot be written would be waited for without end
        return self.broker.pull(self.progress.epoch, self.progress.version, self.config.trainer.groups_per_step)

    def _check_bound(self, groups: Sequence[Group]) -> int:
        """Invariant 1, the last check before the update; returns the bound that holds for this batch."""
        p, bound = self.progress, self.config.lag.max
        if self._count(tokens_beyond(groups, p.version, bound)):
            # An operator may have raised the bound while the run goes on, and lowered it since: the broker knows.
            seen = self.broker.snapshot() if self.ranks.is_main else None
            current = [max(seen.max_lag, seen.pull_max_lag)] if seen else []
            bound = max(bound, *share_numbers(self.ranks, current))
            beyond = self._count(tokens_beyond(groups, p.version, bound))
            if beyond:
                if self.ranks.is_main:
                    self.broker.return_leased(p.epoch)
                raise RunFailed(
                    f"{beyond} tokens of the batch at version {p.version} are beyond the bound of {bound} versions, or "
                    "newer than the trainer: the queue broke its promise. Nothing was trained; please report this."
                )
        return bound

    def _fail(self, error: NotFinite, groups: Sequence[Group]) -> NoReturn:
        p = self.progress
        folder = self.config.run.folder / f"failed-batch-{p.step + 1}"
        facts = {
            "why": str(error),
            "step": p.step + 1,
            "version": p.version,
            "groups": [g.group_id for g in groups],
            "losses": [float(r["loss"]) for r in error.reports],
        }
        try:
            save_failed_batch(folder, self.ranks.data_rank, groups, error.batches, reports=error.reports, facts=facts)
            kept = f"The batch is in {folder}."
        except OSError as problem:
            kept = f"The batch could not be saved ({problem})."
        self.ranks.barrier()
        if self.ranks.is_main:
            self.broker.return_leased(p.epoch)
        raise RunFailed(
            f"step {p.step + 1}: {error}. Nothing of it is kept and its groups are back in the queue. {kept} Lower "
            "trainer.optimizer.learning_rate, or look at the batch, then resume from the last checkpoint."
        ) from error

    def _check_routes(self, groups: Sequence[Group]) -> None:
        needed = self.route_shape is not None and self.config.trainer.routing_replay == "required"
        if self._count(int(needed and lacks_routes(groups))):
            if self.ranks.is_main:
                self.broker.return_leased(self.progress.epoch)
            raise RunFailed(
                "trainer.routing_replay is required, but trajectories come without a routing trace. Start the engine "
                "with --enable-return-routed-experts, or set trainer.routing_replay: available."
            )

    def _filtered(self, deliveries: Sequence[Delivery], share: Share, groups: Sequence[Group]) -> list[bool]:
        flags = torch.zeros(len(deliveries), dtype=torch.int64)
        for index, group in zip(share.indexes, groups, strict=True):
            flags[index] = int(is_filtered(group))
        return [bool(f) for f in self._sum(flags).tolist()]

    def _batch_facts(self, choice: Choice, groups: Sequence[Group], filtered: Sequence[bool]) -> dict[str, Any]:
        n, total, squares, lengths = self._sum(reward_sums(groups)).tolist()
        variance = max(squares - total * total / n, 0.0) / (n - 1) if n > 1 else 0.0
        waits = [choice.now_ms - d.submitted_ms for d in choice.deliveries]
        return {
            "reward_mean": total / n if n else None,
            "reward_std": math.sqrt(variance),
            "response_tokens": sum(d.response_tokens for d in choice.deliveries),
            "total_tokens": sum(d.total_tokens for d in choice.deliveries),
            "response_length_mean": lengths / n if n else None,
            "groups": len(choice.deliveries),
            "groups_filtered": sum(filtered),
            "wait_reason": choice.reason,
            "queue_wait_ms_mean": sum(waits) / len(waits) if waits else 0.0,
            **self._traces.counts(),
        }

    # --- after the update ---------------------------------------------------------------------------------------------

    def _record(
        self, choice: Choice, filtered: Sequence[bool], lags: dict[int, int], record: dict[str, Any], watch: Stopwatch
    ) -> None:
        p = self.progress
        for delivery in choice.deliveries:
            lag = str(p.version - delivery.oldest_version)
            entry = record["by_lag"].setdefault(lag, {"tokens": 0, "log_ratio_abs": None, "gate_rate": None, "q": None})
            entry["groups"] = entry.get("groups", 0) + 1
        for entry in record["by_lag"].values():
            entry.setdefault("groups", 0)
        record |= {"step": p.step + 1, "version": p.version + 1, "time_s": self._clock() - self._began}
        if self.ranks.is_main:
            outcomes = [Outcome(d.group_id, f) for d, f in zip(choice.deliveries, filtered, strict=True)]
            shown = record | watch.seconds | self._speed(record, watch)
            self.broker.step(p.epoch, p.version, outcomes, lags, shown)
        p.consumed.extend(d.group_id for d in choice.deliveries)
        p.step, p.version = p.step + 1, p.version + 1
        bind_version(p.version)
        p.began = self._wall() - record["time_s"]  # for a checkpoint; the system's clock may have been set meanwhile
        publish, save = self._keeper.due(p, choice.asked)
        if publish:
            self._keeper.publish(p, watch)
        if self._sink is not None:  # before the checkpoint: a step that survives has its record
            self._sink.write(record | watch.seconds | self._speed(record, watch))
        self._watch = Stopwatch(self._clock)  # a checkpoint counts for the step that waits for it
        if save:
            self._keeper.checkpoint(p, self._watch)

    def _speed(self, record: dict[str, Any], watch: Stopwatch) -> dict[str, float]:
        seconds = watch.total
        return {"step_s": seconds, "tokens_per_s": record["total_tokens"] / seconds if seconds > 0 else 0.0}

    def _count(self, value: int) -> int:
        return int(self._sum(torch.tensor([value], dtype=torch.int64)).sum())
