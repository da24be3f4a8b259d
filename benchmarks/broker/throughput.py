"""Payloads through the broker against the raw server, as ratios of one run: rate and CPU time per message.

    python -m benchmarks.broker.throughput [--rounds 9] [--messages 40] [--folder /dev/shm/lagrange-benchmark]

One producer process, one consumer process, one embedded server, TCP on loopback. Every round measures all ways one
after the other, from the moment when both processes are connected; a figure is the median over the rounds. A message is
a trajectory. The broker does the whole protocol for each group: admission, submission, pull, fetch with checksum, step
and, after every eighth step, commit; raw ways move the same bytes. No weights are published: version 0 is sampled from,
under a bound that lets it. Files that a round left to be written over (broker/spares.py) are there in the next one, as
in a run that is under way.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import redis

from broker import wire
from broker.queue import Broker
from broker.server import EmbeddedServer
from broker.types import (
    Batch,
    EngineRecord,
    EngineState,
    Group,
    Outcome,
    Refused,
    Ticket,
    Trajectory,
    VersionRecord,
    VersionRun,
)
from tests.conftest import RUN, small_config

CONTEXT = multiprocessing.get_context("fork")
ENGINE, WORKER, CHECKPOINT_EVERY = "engine", "worker", 8
POLL_S = 0.002
# tokens, layers x top-k, groups in a batch, samples in a group
LARGE, SMALL = (8192, (48, 8), 4, 1), (1000, None, 16, 1)
ONE_GROUP, OF_4, OF_16 = (1000, None, 1, 16), (1000, None, 16, 4), (1000, None, 16, 16)
Case = tuple[int, tuple[int, int] | None, int, int]
Ready = Callable[[], None]  # called by a process once it is connected; returns when the other is, too
Work = Callable[[Ready], None]


def trajectory(tokens: int, routing: tuple[int, int] | None) -> Trajectory:
    """One sample: an eighth of it is the prompt; 8 B a token and one for each route."""
    generator, prompt = np.random.default_rng(0), tokens // 8
    response = tokens - prompt
    return Trajectory(
        generator.integers(0, 150_000, prompt, dtype=np.int32),
        generator.integers(0, 150_000, response, dtype=np.int32),
        -generator.random(response, dtype=np.float32),
        np.ones(response, np.bool_),
        (VersionRun(0, response, 0),),
        1.0,
        "stop",
        None if routing is None else generator.integers(0, 128, (tokens - 1, *routing)).astype(np.uint8),
    )


def group(ticket_id: int, prompt: int, sample: Trajectory, samples: int = 1) -> Group:
    return Group(RUN, ticket_id, prompt, 0, "benchmark", WORKER, ENGINE, samples, 0.0, (sample,) * samples)


def broker_producer(url: str, sample: Trajectory, samples: int, batch: int, messages: int, ready: Ready) -> None:
    broker, sent = Broker.connect(url, RUN, timeout_s=60), 0
    tickets: tuple[Ticket, ...] | Refused = Refused("", "")
    ready()
    while sent < messages:
        if isinstance(tickets, Refused):
            tickets = broker.admit_many(WORKER, ENGINE, min(batch, messages - sent))
        if isinstance(tickets, Refused):
            time.sleep(POLL_S)
            continue
        sent += len(tickets)
        groups = [group(t.group_id, t.prompt_index, sample, samples) for t in tickets]
        if sent < messages:
            answers, tickets = broker.submit_and_admit(groups, ENGINE, min(batch, messages - sent))
        else:
            answers = broker.submit_many(groups)
        assert all(answer == "accepted" for answer in answers), answers


def broker_consumer(url: str, epoch: int, batch: int, messages: int, ready: Ready) -> None:
    broker, version, got = Broker.connect(url, RUN, timeout_s=60), 0, 0
    held: Batch | Refused = Refused("", "")
    ready()
    while got < messages:
        if isinstance(held, Refused):
            held = broker.pull_batch(epoch, version, min(batch, messages - got))
        if isinstance(held, Refused):
            time.sleep(POLL_S)
            continue
        assert held.groups[0].trajectories[0].response_ids[0] >= 0
        got += len(held.groups)
        outcomes = [Outcome(g.group_id) for g in held.groups]
        if got < messages:
            held = broker.step_and_pull(epoch, version, outcomes, {}, {}, min(batch, messages - got), held.ahead)
        else:
            broker.step(epoch, version, outcomes, {}, {})
        version += 1
        if version % CHECKPOINT_EVERY == 0 or got == messages:
            broker.commit(epoch, version)


def connected(url: str) -> redis.Redis:
    client = redis.Redis.from_url(url)
    client.ping()
    return client


def raw_producer(url: str, data: bytes, batch: int, messages: int, ready: Ready) -> None:
    client = connected(url)
    ready()
    for start in range(0, messages, batch):
        names = [f"raw:{i}" for i in range(start, min(start + batch, messages))]
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.set(name, data)
        pipe.rpush("names", *names)
        pipe.execute()


def raw_consumer(url: str, batch: int, messages: int, ready: Ready) -> None:
    client, got = connected(url), 0
    ready()
    while got < messages:
        names: Any = client.lpop("names", batch)
        if not names:
            time.sleep(POLL_S)
            continue
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.get(name)
        pipe.unlink(*names)
        assert all(pipe.execute())
        got += len(names)


def stream_producer(url: str, data: bytes, batch: int, messages: int, ready: Ready) -> None:
    client = connected(url)
    ready()
    for start in range(0, messages, batch):
        pipe = client.pipeline(transaction=False)
        for _ in range(start, min(start + batch, messages)):
            pipe.xadd("stream", {"data": data})
        pipe.execute()


def stream_consumer(url: str, batch: int, messages: int, ready: Ready) -> None:
    client, got = connected(url), 0
    ready()
    while got < messages:
        found: Any = client.xreadgroup("group", "consumer", {"stream": ">"}, count=batch, block=1000)
        for _, entries in found or ():
            ids = [entry for entry, _ in entries]
            pipe = client.pipeline(transaction=False)
            pipe.xack("stream", "group", *ids)
            pipe.xdel("stream", *ids)
            pipe.execute()
            got += len(ids)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(server: EmbeddedServer, messages: int, produce: Work, consume: Work) -> dict[str, float]:
    """Messages a second, and milliseconds of CPU per message of producer, consumer and server together."""
    assert server.process is not None
    begin, works = CONTEXT.Barrier(3), (produce, consume)
    used: Any = CONTEXT.Array("d", 2)
    ended: Any = CONTEXT.Array("d", 2)

    def run(i: int) -> None:
        def ready() -> None:
            begin.wait(60)
            used[i] = -time.process_time()

        works[i](ready)
        used[i] += time.process_time()
        ended[i] = time.monotonic()

    both = [CONTEXT.Process(target=run, args=(i,)) for i in range(2)]
    for process in both:
        process.start()
    begin.wait(60)
    served, began = cpu_of(server.process.pid), time.monotonic()
    for process in both:
        process.join(600)
        assert process.exitcode == 0
    cpu = cpu_of(server.process.pid) - served + sum(used)
    return {"rate": messages / (max(ended) - began), "cpu_ms": 1000 * cpu / messages}


def through_broker(server: EmbeddedServer, case: Case, messages: int, folder: Path | None = None) -> dict[str, float]:
    tokens, routing, batch, samples = case
    groups = messages // samples
    sample = trajectory(tokens, routing)
    broker = Broker.connect(server.url, RUN, timeout_s=60)
    broker._connection.client.flushall()
    settings: dict[str, Any] = {"run.steps": 10**6, "trainer.groups_per_step": batch, "redis.max_memory_mb": 2048}
    if folder is not None:
        settings |= {"redis.payloads": "folder", "redis.payload_folder": str(folder)}
    broker.initialise(small_config(Path(tempfile.gettempdir()), **settings))
    broker.set_max_lag(10**6)
    epoch = broker.attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch
    broker.publish(epoch, VersionRecord(broker.name_version(epoch), 0, "path", "sum"))
    broker.register_engine(EngineRecord(ENGINE, "http://engine", EngineState.SERVING, 0))
    found = measure(
        server,
        messages,
        lambda ready: broker_producer(server.url, sample, samples, batch, groups, ready),
        lambda ready: broker_consumer(server.url, epoch, batch, groups, ready),
    )
    assert broker.snapshot().groups.durable == groups
    broker.close()
    return found


def raw(server: EmbeddedServer, case: Case, messages: int, stream: bool) -> dict[str, float]:
    tokens, routing, batch, _ = case
    data = wire.encode(group(1, 1, trajectory(tokens, routing)))
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        if stream:
            client.xgroup_create("stream", "group", mkstream=True)
    produce, consume = (stream_producer, stream_consumer) if stream else (raw_producer, raw_consumer)
    return measure(
        server,
        messages,
        lambda ready: produce(server.url, data, batch, messages, ready),
        lambda ready: consume(server.url, batch, messages, ready),
    )


def main() -> None:
    """Print one JSON object: each way's medians, then the ratios that the targets are about."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--messages", type=int, default=40, help="large ones in each round; 40 times as many small ones, 160 in groups"
    )
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/lagrange-benchmark"), help="of payloads in files")
    options = parser.parse_args()
    large, small = options.messages, 40 * options.messages
    rounds: list[dict[str, dict[str, float]]] = []
    with EmbeddedServer(Path(tempfile.mkdtemp()), password="", append_only=False, max_memory_mb=2048) as server:
        for _ in range(options.rounds):
            rounds.append(
                {
                    "3.2 MB raw SET/GET": raw(server, LARGE, large, stream=False),
                    "3.2 MB broker, Redis": through_broker(server, LARGE, large),
                    "3.2 MB broker, folder": through_broker(server, LARGE, large, options.folder),
                    "8 KB raw stream": raw(server, SMALL, small, stream=True),
                    "8 KB broker, groups of 1": through_broker(server, SMALL, small),
                    "8 KB broker, one group of 16": through_broker(server, ONE_GROUP, small),
                    "8 KB broker, 16 groups of 4": through_broker(server, OF_4, 4 * small),
                    "8 KB broker, 16 groups of 16": through_broker(server, OF_16, 4 * small),
                }
            )
    shutil.rmtree(options.folder / RUN, ignore_errors=True)
    medians = {
        way: {unit: statistics.median(r[way][unit] for r in rounds) for unit in ("rate", "cpu_ms")} for way in rounds[0]
    }
    out: dict[str, Any] = {way: {u: round(x, 3) for u, x in figures.items()} for way, figures in medians.items()}
    for name, over, under in (
        ("3.2 MB: broker / raw (target 0.5)", "3.2 MB broker, Redis", "3.2 MB raw SET/GET"),
        ("3.2 MB: folder / Redis (target 2)", "3.2 MB broker, folder", "3.2 MB broker, Redis"),
        ("8 KB: groups of 1 / raw stream (target 0.6)", "8 KB broker, groups of 1", "8 KB raw stream"),
        ("8 KB: one group of 16 / raw stream (target 0.6)", "8 KB broker, one group of 16", "8 KB raw stream"),
        ("8 KB: 16 groups of 4 / raw stream (target 0.6)", "8 KB broker, 16 groups of 4", "8 KB raw stream"),
        ("8 KB: 16 groups of 16 / raw stream (target 0.6)", "8 KB broker, 16 groups of 16", "8 KB raw stream"),
    ):
        rates = [r[over]["rate"] / r[under]["rate"] for r in rounds]
        costs = [r[under]["cpu_ms"] / r[over]["cpu_ms"] for r in rounds]
        out[name] = {"rate": round(statistics.median(rates), 3), "cpu": round(statistics.median(costs), 3)}
    sys.stdout.write(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
