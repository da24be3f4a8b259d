"""`lagrange trainer`: starts the ranks; each joins, builds the model and runs the loop.

Invariant: the process ends with one clear message and a code that says whether starting it again can help: 0 finished,
by the last step or the end of the data set; 1 try again (the run resumes from its checkpoint); 2 configuration; 3 the
run cannot go on; 4 Redis cannot be reached; 143 stopped on request: who looks at the code alone would take an evicted
trainer that ends with 0 for one that is done. Nothing but rank 0 writes to Redis, save that a group which cannot be
used is rejected by the ranks that have read it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from broker.errors import BrokerError, BrokerUnavailable, Fenced
from broker.logs import configure_logs
from broker.queue import Broker
from broker.traces import NO_TRACES, Traces, open_traces
from broker.types import PromptCursor
from configs.load import ConfigError, load_config, save_config
from configs.schema import RunConfig
from configs.secrets import REDIS_PASSWORD, read_secret
from trainer.background import Worker
from trainer.chooser import Doorbell
from trainer.launch import AGAIN, STOPPED, run_ranks
from trainer.losses.catalogue import loss_settings, warnings

if TYPE_CHECKING:  # they import torch
    from trainer.loop import Trainer
    from trainer.megatron.policy import PolicyModel
    from trainer.ports import SavedState

log = structlog.get_logger()

USAGE, FATAL, NO_REDIS = 2, 3, 4


def run(config: RunConfig) -> int:
    """Start all ranks on this machine and wait for them; returns the exit code."""
    configure_logs(config.run.id, "trainer")
    try:
        _check(config)
        config.run.folder.mkdir(parents=True, exist_ok=True)
        file = config.run.folder / "trainer-config.yaml"
        save_config(config, file)
        return run_ranks(config, "trainer.main", ["--config", str(file)])
    except (ConfigError, OSError) as error:
        log.error("cannot start", problem=str(error))
        return USAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank, as the launcher starts it."""
    parser = argparse.ArgumentParser(prog="python -m trainer.main")
    parser.add_argument("--config", type=Path, required=True)
    config = load_config(parser.parse_args(arguments).config)
    return rank_main(config)


def rank_main(config: RunConfig) -> int:
    """Run one rank to its end; returns the exit code."""
    from trainer.progress import RunFailed  # imports torch

    rank = int(os.environ.get("RANK", "0"))
    configure_logs(config.run.id, "trainer" if rank == 0 else f"trainer-{rank}")
    try:
        _check(config)
        if config.trainer.device == "cuda":
            prepare_for_gpu(os.environ)
        if rank == 0:
            for warning in warnings(loss_settings(config)):
                log.warning("loss", problem=warning)
        traces = open_traces(config, "trainer") if rank == 0 else NO_TRACES
        with _stop_on_signal(rank) as stop, closing(traces):
            end = _train(config, stop, traces)
    except ConfigError as error:
        log.error("cannot start", problem=str(error))
        return USAGE
    except (RunFailed, Fenced) as error:
        log.error("the trainer ends", problem=str(error))
        return FATAL
    except BrokerUnavailable as error:
        log.error("the trainer ends", problem=str(error))
        return NO_REDIS
    except (BrokerError, OSError) as error:
        log.error("the trainer ends and can be started again", problem=str(error))
        return AGAIN
    log.info("the trainer ends", how=end)
    return 0 if end == "finished" else STOPPED


def prepare_for_gpu(environment: MutableMapping[str, str]) -> None:
    """Set what CUDA and PyTorch read when they start; what the environment says itself stays."""
    # Kernels start in the order of their calls: an exchange before the product that hides it.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:  # the same under its older name
        # Micro-batches differ in size, which leaves gaps in memory that no other one fits.
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _check(config: RunConfig) -> None:
    if not config.run.id:
        raise ConfigError("run.id is empty: start the run with `lagrange up`, or name it.")
    if config.redis.url is None:
        raise ConfigError("redis.url is not set. Set it, or start the run with `lagrange up`.")
    if config.model.path is None:
        raise ConfigError("model.path is not set: `lagrange up` makes the tiny model and sets it.")
    loss_settings(config)  # raises ConfigError


def _train(config: RunConfig, stop: Callable[[], bool], traces: Traces) -> str:
    from trainer.batch import RouteShape  # imports torch
    from trainer.loop import Trainer  # imports torch
    from trainer.megatron.parallel import parallel
    from trainer.megatron.policy import PolicyModel
    from trainer.sinks import sinks_of

    assert config.redis.url is not None
    assert config.model.path is not None
    broker = Broker.of_run(config, read_secret(REDIS_PASSWORD))
    with parallel(config) as ranks:
        if ranks.is_main:
            broker.initialise(config)
        policy = PolicyModel.create(config, ranks, config.model.path)
        shape = policy.shape
        replay = config.trainer.routing_replay != "off" and shape.experts > 0
        if not replay and config.trainer.routing_replay != "off" and ranks.is_main:
            log.warning("no routing replay", problem="the model has no experts; the run goes on without it")
        gc.freeze()  # imports and model stay: no collection need look at them again
        doorbell = Doorbell()
        trainer = Trainer(
            config,
            broker=broker,
            ranks=ranks,
            policy=policy,
            checkpoints=Checkpoints(config, policy),
            sink=lambda step: sinks_of(config, step),
            route_shape=RouteShape(shape.layers, shape.top_k, shape.experts, shape.moe_layers) if replay else None,
            vocabulary=shape.vocabulary,
            background=Worker(),
            stop=stop,
            pause=doorbell.pause,
            traces=traces,
        )
        if not ranks.is_main:
            return trainer.run()
        with (
            closing(broker.listen_for_batches(doorbell.ring)),
            _keep_alive(broker, trainer, config.trainer.lease_s / 3),
        ):
            return trainer.run()


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """`CheckpointPort` over trainer.megatron.checkpoint, in the run's folder."""

    config: RunConfig
    policy: PolicyModel

    @property
    def root(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.config.run.folder / "checkpoints"

    def stage(self, state: SavedState) -> Callable[[], object]:
        """See the port."""
        from trainer.megatron.checkpoint import TrainingState, stage_checkpoint

        kept = TrainingState(
            step=state.step,
            version=state.version,
            consumed=state.consumed,
            prompt_cursor=state.cursor.next_index,
            config_hash=config_hash(self.config),
            extra={**state.extra, "open": list(state.cursor.open)},
            epoch=state.epoch,
        )
        keep = self.config.trainer.checkpoint.keep
        return stage_checkpoint(self.policy, self.root, kept, keep=keep)

    def load_newest(self) -> SavedState | None:
        """See the port."""
        from trainer.megatron.checkpoint import latest_on_all, load_checkpoint
        from trainer.ports import SavedState

        # One rank looks for all: reading every checksum on each would take as long as loading, and ranks must agree.
        folder = latest_on_all(self.policy.parallel, self.root)
        if folder is None:
            return None
        state = load_checkpoint(self.policy, folder)
        if state.config_hash != config_hash(self.config):
            log.warning("resumed under another configuration", checkpoint=str(folder))
        cursor = PromptCursor(state.prompt_cursor, tuple(state.extra.get("open", ())))
        return SavedState(state.step, state.version, state.consumed, cursor, state.extra, state.epoch)

    def take_over(self, epoch: int, step: int) -> None:
        """See the port."""
        from trainer.megatron.checkpoint import take_over

        take_over(self.root, epoch, step)


def config_hash(config: RunConfig) -> str:
    """SHA-256 of what decides how weights evolve: model, task, rollout, loss, optimizer and lag."""
    parts = [config.model, config.task, config.lag, config.rollout, config.trainer.loss, config.trainer.optimizer]
    return hashlib.sha256("\n".join(part.model_dump_json() for part in parts).encode()).hexdigest()


@contextmanager
def _stop_on_signal(rank: int) -> Iterator[Callable[[], bool]]:
    """True once SIGTERM or SIGINT came; the other ranks follow rank 0 and ignore both."""
    asked = threading.Event()

    def handle(number: int, _: object) -> None:
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {n: signal.signal(n, handle if rank == 0 else signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _keep_alive(broker: Broker, trainer: Trainer, interval_s: float) -> Iterator[None]:
    """Renew the trainer's lease while a long step computes; on the rank that holds it."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(interval_s):
            epoch = trainer.progress.epoch
            if epoch < 0:
                continue
            try:
                broker.renew_trainer(epoch)
            except BrokerError as error:  # the loop meets the same error at its next word with the broker
                log.warning("lease not renewed", problem=str(error))

    thread = threading.Thread(target=renew, name="trainer-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=10)


if __name__ == "__main__":
    raise SystemExit(main())
