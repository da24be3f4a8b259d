"""What an operation costs on the server with few and with many groups queued.

    python -m benchmarks.broker.scale [--groups 1000 100000 1000000]      (1000000 takes about 1 GB)

Groups wait in the queue: one that came in through the protocol, and copies of its record in all indexes, made by a
script on the server and due after everything else. Then admission, submission, pull, step, commit and a snapshot are
measured in CPU time of the server (INFO cpu), reading and writing its sockets included, so that a busy machine blurs
them less.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from broker.queue import Broker
from broker.server import EmbeddedServer
from broker.types import Outcome
from tests.broker.helpers import ENGINE, WORKER, Run, finished
from tests.conftest import RUN, small_config

BATCH, TIMES = 16, 20


def server_us(broker: Broker) -> float:
    """Microseconds of CPU that the server has used."""
    used = broker._connection.client.info("cpu")
    return 1e6 * (float(used["used_cpu_user"]) + float(used["used_cpu_sys"]))


COPY = """
local P, record = ARGV[1], cmsgpack.unpack(redis.call('GET', ARGV[1] .. 'group:' .. ARGV[2]))
record.oldest = LATE
local raw, first, times = cmsgpack.pack(record), tonumber(ARGV[3]), tonumber(ARGV[4])
for i = first, first + times - 1 do
  local id = string.format('%.0f', i)
  redis.call('SET', P .. 'group:' .. id, raw)
  redis.call('ZADD', P .. 'ready', LATE, id)
  redis.call('ZADD', P .. 'waiting', record.submitted, id)
  redis.call('ZADD', P .. 'open', i, id)
end
for name, by in pairs({g_ready = 1, g_issued = 1, t_ready = record.tokens, t_issued = record.tokens,
    bytes = record.bytes, ready_ms = record.submitted}) do
  redis.call('HINCRBY', P .. 'ledger', name, string.format('%.0f', by * times))
end
redis.call('HINCRBY', P .. 'ready_hist', 'g:LATE', times)
redis.call('HINCRBY', P .. 'ready_hist', 't:LATE', times * record.tokens)
return redis.call('ZCARD', P .. 'ready')
""".replace("LATE", str(10**8))


def fill(broker: Broker, run: Run, groups: int) -> None:
    """Copy one group until `groups` are ready."""
    ready = broker.snapshot().groups.ready
    (source,) = run.ready(1)
    while (missing := groups - ready - 1) > 0:
        copies: list[str | int] = [broker._keys.prefix, source.group_id, 10**9 + ready, min(10_000, missing)]
        ready = int(broker._connection.client.eval(COPY, 0, *copies)) - 1


def measure(broker: Broker, run: Run) -> dict[str, float]:
    """Microseconds of the server: of a snapshot, and for each group of the other transitions in batches of 16."""
    sums = dict.fromkeys(("admit", "submit", "pull", "step", "commit", "snapshot"), 0.0)

    def timed(name: str, action: Any) -> Any:
        before = server_us(broker)
        answer = action()
        sums[name] += (server_us(broker) - before) / (1 if name == "snapshot" else BATCH) / TIMES
        return answer

    for _ in range(TIMES):
        tickets = timed("admit", lambda: broker.admit_many(WORKER, ENGINE, BATCH))
        groups = [finished(ticket, RUN) for ticket in tickets]
        timed("submit", lambda of=groups: broker.submit_many(of))
        batch = timed("pull", lambda: broker.pull(run.epoch, run.version, BATCH))
        outcomes = [Outcome(d.group_id) for d in batch]
        timed("step", lambda of=outcomes: broker.step(run.epoch, run.version, of, {}, {}))
        run.version += 1
        timed("commit", lambda: broker.commit(run.epoch, run.version))
        timed("snapshot", broker.snapshot)
    return {name: round(us, 1) for name, us in sums.items()}


def main() -> None:
    """Print one JSON object: groups queued -> microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    options, out = parser.parse_args(), {}
    with EmbeddedServer(Path(tempfile.mkdtemp()), password="", append_only=False, max_memory_mb=4096) as server:
        broker = Broker.connect(server.url, RUN, timeout_s=60)
        broker.initialise(
            small_config(
                Path(tempfile.gettempdir()),
                **{"trainer.groups_per_step": BATCH, "redis.max_memory_mb": 4096, "run.steps": 10**9},
            )
        )
        broker.set_max_lag(10**9)
        run = Run(broker).start()
        for groups in sorted(options.groups):
            fill(broker, run, groups)
            out[str(groups)] = measure(broker, run)
        broker.close()
    sys.stdout.write(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
