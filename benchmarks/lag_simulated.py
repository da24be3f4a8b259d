"""What the bound is worth in speed where generation costs this machine nothing: SIMULATED latency, a real pipeline.

    python -m benchmarks.lag_simulated [bounds] [steps] [rounds]      (0,1,2,4 20 2)

Two times are made up and slept: an engine's token takes TOKEN_S, however many run beside it, and a training step takes
STEP_S. A response ends with probability 1/30 after each token, at 128 at the latest. All between the two is real:
Redis, admission, worker, queue, bound, the trainer's loop and loss, versions on disk, weight sync. So the gain is what
Lagrange makes of the overlap that these times allow, not what a GPU gives. Prints as benchmarks/lag.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import torch

from benchmarks.lag import Figures, compare, figures
from broker.queue import Broker
from broker.server import EmbeddedServer
from configs.schema import RunConfig
from rollout.tasks import make_task
from services.local.metrics import read_metrics
from services.weight_sync.engine_client import Timeouts
from tests.rollout.helpers import make_worker, tiny_folder, working
from tests.trainer.helpers import OneRank
from tests.trainer.sim import BigramPolicy, MemoryCheckpoints
from tests.weight_sync.live import World, syncing, write_version
from trainer.batch import MicroBatch
from trainer.loop import Trainer
from trainer.metrics import JsonLines
from trainer.ports import LossFunction

TOKEN_S, STEP_S = 0.02, 1.0
VOCABULARY = 32  # of the tiny model; token 2 ends a response
RUN_S = 300.0


class SleepingPolicy(BigramPolicy):
    """A step takes STEP_S; the weights that it exports are random ones for each version."""

    def __init__(self) -> None:
        super().__init__(learning=False)
        self.table = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.table])

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, *, entropy_gradient: bool = False
    ) -> list[dict[str, torch.Tensor]]:
        """As the parent, STEP_S later."""
        time.sleep(STEP_S)
        return super().forward_backward(micro_batches, loss_function, entropy_gradient=entropy_gradient)

    def stage_export(self, folder: Path) -> Callable[[], None]:
        """A version's folder, v000001, as a trainer writes it; there is no final model."""
        version = folder.name.removeprefix("v")

        def write() -> None:
            if version.isdecimal():
                write_version(folder.parent, int(version))

        return write


def configuration(bound: int, steps: int, folder: Path, url: str) -> RunConfig:
    """Four samples in each of eight groups a step, and concurrent groups for a bound of up to 4."""
    fields = {
        "run": {"id": "run", "steps": steps, "directory": str(folder)},
        "redis": {"url": url},
        "lag": {"max": bound},
        "model": {"tiny": {}},
        "task": {"name": "copy"},
        "rollout": {"samples_per_prompt": 4, "concurrent_groups": 40, "max_new_tokens": 128},
        "trainer": {"groups_per_step": 8, "optimizer": {"learning_rate": 1e-6}},
    }
    return RunConfig.model_validate(fields)


async def pipeline(config: RunConfig, url: str, model: Path) -> None:
    """One run: the trainer in a thread, everything else in this loop."""
    brokers = [Broker.connect(url, config.run.id, timeout_s=10.0) for _ in range(3)]
    brokers[0].initialise(config)
    policy = SleepingPolicy()
    trainer = Trainer(
        config,
        broker=brokers[0],
        ranks=OneRank(),
        policy=policy,
        checkpoints=MemoryCheckpoints().of(policy),
        sink=lambda step: JsonLines(config.run.folder / "metrics.jsonl", step),
        route_shape=None,
        vocabulary=VOCABULARY,
    )
    world = World(config.run.folder, url, brokers[1], 0)
    with world.stack:
        world.add_engine("engine-0", token_seconds=TOKEN_S, answer=response)
        worker = make_worker(config, brokers[2], model, task=make_task("copy", 0))
        async with syncing(world, timeouts=Timeouts()), working(worker):
            await asyncio.wait_for(asyncio.to_thread(trainer.run), RUN_S)
    for broker in brokers:
        broker.close()


def response(_prompt: Sequence[int], source: random.Random) -> list[int]:
    """Token ids; the engine stops at the first 2."""
    return [source.randrange(2, VOCABULARY) for _ in range(128)]


def measure(bound: int, steps: int, folder: Path) -> Figures:
    """One run in `folder`."""
    with EmbeddedServer(folder, append_only=False, password="") as redis:
        config = configuration(bound, steps, folder, redis.url)
        asyncio.run(pipeline(config, redis.url, tiny_folder(folder)))
    return figures(read_metrics(config.run.folder / "metrics.jsonl"), os.getloadavg()[0])


def main(bounds: str = "0,1,2,4", steps: str = "20", rounds: str = "2") -> None:
    """Run and print."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    compare(measure, bounds, int(steps), int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
