"""`lagrange rollout`: admission -> prompt -> samples -> reward -> one atomic submission, many groups at a time.

Invariant: each ticket that this worker holds ends in exactly one of submit, fail and release, or its lease expires and
the broker issues the prompt again. No failure of an engine, a reward, a prompt or Redis ends the worker: it ends when
the run is finished, or when it is told to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from broker.traces import NO_TRACES, Span, Traces
from broker.types import (
    PAST_THE_END_MS,
    EngineRecord,
    Group,
    InvalidTrajectory,
    Refused,
    Ticket,
    Trajectory,
    all_equal,
    check_group,
)
from configs.schema import RunConfig
from rollout.admission import UNAVAILABLE, Admission, Admitted
from rollout.agents.endpoint import Endpoint
from rollout.agents.play import play_agents
from rollout.agents.types import AgentTask
from rollout.checkpoint import Checkpoint
from rollout.client import EngineClient, Sampling
from rollout.codec import Codec
from rollout.counters import Counters
from rollout.curriculum import Curriculum
from rollout.engines import EnginePool
from rollout.environments.play import play_group
from rollout.environments.turns import Turns
from rollout.environments.types import EnvironmentTask
from rollout.ports import RolloutBroker
from rollout.prompts import BadPrompt, PastTheEnd, Prompts
from rollout.rewards import Judge, ThreadJudge, rewarded
from rollout.rewards.shaping import Shaping
from rollout.samples import SampleLog
from rollout.sampling import Draw, NoEngine, Unanswerable, draw_group
from rollout.tasks import Prompt, Task
from rollout.threads import in_thread

LOG = structlog.get_logger()
T = TypeVar("T")
RELEASE_S = 3.0  # SIGTERM ends the worker within 5 s; so long it may take to hand its tickets back


@dataclass(slots=True)
class Held:
    """A ticket in work, and the task that works on it. draw: what it has so far, None before it has begun.
    submitting: the group may be the queue's already."""

    task: asyncio.Task[None]
    draw: Draw | None = None
    submitting: bool = False

    @property
    def tokens(self) -> int:
        """Sampled so far; what a request that is cut off had sampled is not known."""
        return self.draw.tokens if self.draw is not None else 0


class Worker:
    """One rollout worker; `run` is its whole life."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        *,
        broker: RolloutBroker,
        task: Task,
        codec: Codec,
        checkpoint: Checkpoint,
        connect: Callable[[str], EngineClient],
        judge: Judge | None = None,
        samples: SampleLog | None = None,
        traces: Traces = NO_TRACES,
    ) -> None:
        """name: unique in the run, it holds the leases. connect: base URL -> client of an engine.

        judge: computes the rewards; None: threads. samples: where some groups are written down for people.
        traces: where spans of its groups go; the caller closes them.
        """
        self.name, self.config, self.counters = name, config, Counters()
        self._broker, self._task, self._codec = broker, task, codec
        self._prompts = Prompts(task, codec)
        self._samples, self._traces = samples, traces
        self._judge = judge or ThreadJudge(task, config.rollout.reward_timeout_s)
        self._shaping = Shaping.of(config.task.shaping, config.rollout.max_new_tokens)
        self._context = checkpoint.context
        self._broker_s = 3 * config.redis.timeout_s
        self._sampling = Sampling(config.rollout.temperature, config.rollout.max_new_tokens, checkpoint.stop_ids)
        self._pool = EnginePool(broker, connect, self._broker_s)
        self._admission = Admission(
            name, config, broker=broker, pool=self._pool, prompts=self._prompts, counters=self.counters
        )
        self._endpoint = Endpoint()
        self._curriculum = Curriculum(config.task.curriculum, config.run.seed, broker, self._broker_s)
        self._held: dict[int, Held] = {}
        self._past_the_end_ms = -1

    async def run(self, stop: asyncio.Event) -> None:
        """Work until the run is finished or `stop` is set, then hand back what is still held."""
        heart = asyncio.create_task(self._beat_forever())
        work = asyncio.create_task(self._work())
        told: asyncio.Task[object] = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({work, told, heart}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # a fault of ours ends the worker, loudly
            if heart.done():
                heart.result()
        finally:
            for task in (work, told, heart):
                task.cancel()
            await asyncio.wait({work, told, heart}, timeout=1.0)
            await self._hand_back()
            await self._endpoint.close()
            await self._judge.close()
            await self._pool.close()

    async def _work(self) -> None:
        """Take tickets until the run is finished, and see the last groups through."""
        while (admitted := await self._admission.next()) is not None:
            task = asyncio.create_task(self._group(admitted))
            self._held[admitted.ticket.group_id] = Held(task)
            task.add_done_callback(partial(self._done, admitted.ticket.group_id))
        if self._held:
            await asyncio.wait([held.task for held in self._held.values()])

    def _done(self, group_id: int, task: asyncio.Task[None]) -> None:
        self._held.pop(group_id, None)  # not renewed any more: after a fault the lease expires, the prompt comes again
        self._admission.ended()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counters.add("worker_faults")
            LOG.error("a group ended by a fault of the worker", group=group_id, exc_info=error)

    # --- one group

    async def _group(self, admitted: Admitted) -> None:
        """From ticket to submit, fail or release, as a trace."""
        ticket, engine, asked_ns = admitted.ticket, admitted.engine, admitted.asked_ns
        facts = {"group": ticket.group_id, "prompt": ticket.prompt_index, "attempt": ticket.attempt}
        with self._traces.begin("group", began_ns=asked_ns, engine=engine.engine_id, **facts) as span:
            span.child("admit", began_ns=asked_ns, version=ticket.engine_version).end()
            await self._work_on(ticket, engine, span)

    async def _work_on(self, ticket: Ticket, engine: EngineRecord, span: Span) -> None:
        """From ticket to submit, fail or release. span: told why the group was not submitted."""
        rollout, began = self.config.rollout, time.monotonic()
        draw: Draw | None = None
        try:
            prompt, prompt_ids = self._prompts.of(ticket.prompt_index)
            if not await self._curriculum.wants(prompt_ids, ticket.prompt_index):
                self.counters.add("prompts_passed_over")
                await self._again(partial(self._broker.drop, ticket.group_id, self.name))
                span.end("passed over by the curriculum")
                return
            draw = self._held[ticket.group_id].draw = self._draw(prompt_ids, ticket.engine_version, span)
            trajectories = await self._trajectories(prompt, draw, engine.engine_id)
            self.counters.add("samples_rewarded", len(trajectories))
            if len(trajectories) < rollout.min_samples:
                why = f"{len(trajectories)} of {rollout.samples_per_prompt} samples, {rollout.min_samples} needed"
                # Tokens of episodes that were played to their end are in no slot of the draw.
                played = 0 if draw.slots else sum(int(t.loss_mask.sum()) for t in trajectories)
                await self._fail(ticket, f"{why}; {draw.last_error or 'no reward'}", draw.tokens + played, span)
                return
            group = Group(
                run=self.config.run.id,
                group_id=ticket.group_id,
                prompt_index=ticket.prompt_index,
                attempt=ticket.attempt,
                task=self._task.name,
                worker=self.name,
                engine=engine.engine_id,
                samples_wanted=rollout.samples_per_prompt,
                generation_seconds=time.monotonic() - began,
                trajectories=trajectories,
                trace=span.context,
            )
            check_group(group)
            await self._deliver(group, prompt_ids, span)
        except NoEngine as error:
            LOG.warning("group handed back", group=ticket.group_id, reason=str(error))
            tokens = draw.tokens if draw else 0
            await self._again(partial(self._broker.release, ticket.group_id, self.name, tokens=tokens))
            span.end(str(error))
        except PastTheEnd as error:
            if self._past_the_end_ms < 0:
                LOG.info("the data set has ended", prompt=ticket.prompt_index, detail=str(error))
            self._past_the_end_ms = ticket.lease_deadline_ms - round(1000 * rollout.lease_s)
            await self._again(partial(self._broker.release, ticket.group_id, self.name))
            span.end(str(error))
        except (BadPrompt, Unanswerable) as error:
            await self._fail(ticket, str(error), draw.tokens if draw else 0, span, final=True)
        except InvalidTrajectory as error:
            await self._fail(ticket, str(error), draw.tokens if draw else 0, span)

    async def _deliver(self, group: Group, prompt_ids: tuple[int, ...], span: Span) -> None:
        """Learn from a complete group, note it for people, and submit it, or drop it if it has no gradient."""
        rewards = [t.reward for t in group.trajectories]
        await self._curriculum.learns(prompt_ids, rewards)
        if self._samples is not None:
            try:
                self._samples.note(group, self._pool.newest)
            except OSError:  # a full disk must not cost the group
                self.counters.add("groups_not_noted")
        if self.config.task.drop_equal_groups and all_equal(rewards):
            self.counters.add("groups_dropped_equal")
            await self._again(partial(self._broker.drop, group.group_id, self.name, tokens=group.response_tokens))
            span.end("all rewards are equal")
            return
        with span.child("submit") as submission:
            refused = await self._submit(group)
            submission.end(refused)
        span.end(refused)

    def _draw(self, prompt_ids: tuple[int, ...], at_least: int, span: Span) -> Draw:
        rollout = self.config.rollout
        return Draw(
            prompt_ids,
            self._sampling,
            rollout.generation_tries,
            at_least,
            self.counters,
            rollout.interrupted,
            rollout.max_versions,
            span=span,
            part_tokens=rollout.part_tokens if rollout.interrupted == "continue" else 0,
            stall_s=rollout.stall_timeout_s,
        )

    async def _trajectories(self, prompt: Prompt, draw: Draw, engine_id: str) -> tuple[Trajectory, ...]:
        """Samples with their rewards: of one turn each, of the task's environment, or of its agent."""
        rollout, patience_s = self.config.rollout, self.config.lag.straggler_wait_s
        samples, turns = rollout.samples_per_prompt, Turns(self._pool, engine_id, draw, self._context, patience_s)
        if isinstance(self._task, AgentTask):
            endpoint = self._endpoint
            return await play_agents(self._task, prompt, samples, endpoint=endpoint, turns=turns, codec=self._codec)
        if isinstance(self._task, EnvironmentTask):
            ids, step_s = draw.prompt_ids, rollout.reward_timeout_s
            return await play_group(self._task, prompt, ids, samples, turns=turns, step_s=step_s, codec=self._codec)
        await draw_group(draw, rollout.samples_per_prompt, self._pool, engine_id, patience_s)
        with draw.span.child("reward", samples=len(draw.samples)):
            judge, shaping, name = self._judge, self._shaping, self._task.name
            return await rewarded(judge, prompt, draw, codec=self._codec, shaping=shaping, name=name)

    async def _submit(self, group: Group) -> str:
        """Hand the group in, again while Redis is away or full; the lease ends the trying, not we.

        The word of a refusal, "" if it was accepted.
        """
        self._held[group.group_id].submitting = True
        began, uncertain = time.monotonic(), False
        wait = 0.05
        while True:
            stats = self.counters.take()
            try:
                answer = await self._ask(partial(self._broker.submit, group, stats=stats))
            except UNAVAILABLE as error:
                self.counters.put_back(stats)
                answer, uncertain = Refused("unavailable", str(error)), True
            else:
                if not isinstance(answer, Refused):
                    return ""
                self.counters.put_back(stats)
            if answer.reason not in ("memory", "unavailable"):
                break
            await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)
            self.counters.add("submit_wait_seconds", time.monotonic() - began)
            began = time.monotonic()
        # After a lost answer "closed" most likely means that the first submission had arrived.
        name = "submissions_uncertain" if uncertain and answer.reason == "closed" else f"submissions_{answer.reason}"
        self.counters.add(name)
        LOG.warning("group not accepted", group=group.group_id, reason=answer.reason, detail=answer.detail)
        return answer.reason

    async def _fail(self, ticket: Ticket, reason: str, tokens: int, span: Span, *, final: bool = False) -> None:
        LOG.warning("group failed", group=ticket.group_id, prompt=ticket.prompt_index, reason=reason, final=final)
        self.counters.add("failed_groups")
        broken = partial(self._broker.fail, ticket.group_id, self.name, reason[:500], tokens=tokens, final=final)
        span.end(reason)
        await self._again(broken)

    async def _again(self, call: Callable[[], object]) -> None:
        """Repeat a call while Redis is away; when the lease is lost the heartbeat cancels this task."""
        wait = 0.1
        while True:
            try:
                await self._ask(call)
                return
            except UNAVAILABLE:
                await asyncio.sleep(wait)
                wait = min(2 * wait, 2.0)

    # --- leases

    async def _beat_forever(self) -> None:
        """Renew leases and say that we live; abandon what is no longer ours."""
        every = min(self.config.rollout.lease_s / 4, 2.0)
        while True:
            ids = tuple(self._held)
            try:
                kept = set(await self._ask(partial(self._broker.renew, self.name, ids))) if ids else set()
                stats: dict[str, float | int | str] = {**self.counters.totals(), **self.counters.newest()}
                stats |= {**self._traces.counts(), "groups_in_work": len(ids)}
                if self._past_the_end_ms >= 0:
                    stats[PAST_THE_END_MS] = self._past_the_end_ms
                await self._ask(partial(self._broker.heartbeat_worker, self.name, stats))
            except UNAVAILABLE as error:
                LOG.warning("no heartbeat", detail=str(error))
            else:
                for group_id in set(ids) - kept:
                    if (held := self._held.get(group_id)) is not None and not held.submitting:
                        held.task.cancel()
                        self.counters.add("leases_lost")
            await asyncio.sleep(every)

    async def _hand_back(self) -> None:
        """Give back every ticket that is still held, within RELEASE_S."""
        held = dict(self._held)
        for one in held.values():
            one.task.cancel()
        asking = self._admission.asking
        if waiting := {*(one.task for one in held.values()), *([asking] if asking else [])}:
            await asyncio.wait(waiting, timeout=1.0)
        tokens = {group_id: one.tokens for group_id, one in held.items()}
        if (ticket := self._admission.left_behind()) is not None:
            tokens.setdefault(ticket.group_id, 0)
        calls = [in_thread(partial(self._broker.release, id_, self.name, n), RELEASE_S) for id_, n in tokens.items()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        lost = sum(isinstance(result, BaseException) for result in results)
        if tokens:
            LOG.info("tickets handed back", tickets=results.count(True), left_to_expire=lost)

    async def _ask(self, call: Callable[[], T]) -> T:
        return await in_thread(call, self._broker_s)
