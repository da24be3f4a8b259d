"""An engine that serves an evaluation alone: no registry knows it, so no update reaches it while it answers.

Invariant: what it serves changes only by `load`, which nobody calls during an evaluation; it ends with the context, and
what is done with it ends with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from configs.schema import RunConfig
from rollout.cancellable import cancellable
from rollout.client import EngineBusy, EngineClient, EngineDropped, EngineTimeout, EngineUnreachable
from rollout.command import UNCONFIRMED_VERSION
from rollout.engine import Plan, make_plan
from rollout.process import ServerProcess

T = TypeVar("T")
INDEX = 900  # of the engine among those on this machine: its log and key file have names of their own


class EngineFailed(Exception):
    """The engine of the evaluation did not start, or did not load a version."""


@dataclass(frozen=True, slots=True)
class EvaluationEngine:
    """An engine that serves."""

    client: EngineClient
    plan: Plan
    server: ServerProcess

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives. Raises EngineFailed, and cancels it, if the engine ends before."""
        working, ended = asyncio.create_task(work), asyncio.create_task(self.server.wait())
        try:
            await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineFailed(f"the engine ended with code {ended.result()}; its log is {self.plan.log}")
            return working.result()
        finally:
            for task in (working, ended):
                task.cancel()
            await asyncio.wait({working, ended})


@asynccontextmanager
async def evaluation_engine(config: RunConfig, version: int) -> AsyncIterator[EvaluationEngine]:
    """Start an engine on config.model.path that says it serves `version`. Raises EngineFailed, ConfigError."""
    alone = config.engine.model_copy(update={"port": 0, "host": "127.0.0.1"})
    plan = make_plan(config.model_copy(update={"engine": alone}), INDEX)
    argv = tuple(str(version) if word == UNCONFIRMED_VERSION else word for word in plan.launch.argv)
    server = await ServerProcess.start(replace(plan.launch, argv=argv), plan.log, plan.key)
    client = EngineClient(plan.url, plan.checkpoint, api_key=plan.key, timeout_s=config.rollout.generation_timeout_s)
    try:
        await _until_healthy(client, server, config.engine.start_timeout_s, plan)
        yield EvaluationEngine(client, plan, server)
    finally:
        await client.close()
        await server.stop()
        if plan.key_file is not None:
            plan.key_file.unlink(missing_ok=True)


@cancellable
async def load(plan: Plan, folder: Path, version: int, timeout_s: float) -> None:
    """Load a published version's weights. Raises EngineFailed if the engine does not confirm it."""
    headers = {"Authorization": f"Bearer {plan.key}"} if plan.key else {}
    body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
    try:
        async with httpx.AsyncClient(headers=headers, timeout=timeout_s, trust_env=False) as http:
            answer = await http.post(f"{plan.url}/update_weights_from_disk", json=body)
            done = answer.status_code == 200 and bool(answer.json().get("success"))
            info = (await http.get(f"{plan.url}/model_info")).json()
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        raise EngineFailed(f"version {version} was not loaded: {type(error).__name__}: {error}") from error
    if not done or str(info.get("weight_version")) != str(version):
        raise EngineFailed(f"version {version} was not loaded: {answer.text[:300]}")


async def _until_healthy(client: EngineClient, server: ServerProcess, timeout_s: float, plan: Plan) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if server.exit_code is not None:
            raise EngineFailed(f"the engine ended with code {server.exit_code}; its log is {plan.log}")
        try:
            await client.healthy()
            return
        except (EngineUnreachable, EngineBusy, EngineDropped, EngineTimeout):
            await asyncio.sleep(0.25)
    raise EngineFailed(f"the engine did not answer within {timeout_s:g} s; its log is {plan.log}")
