"""Redis that cannot write to its disk: it takes no writes until it can again, which is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from broker.errors import BrokerUnavailable
from broker.queue import Broker
from broker.server import EmbeddedServer
from broker.types import Ticket
from tests.broker.helpers import ENGINE, WORKER, Run, wait_for
from tests.conftest import RUN, ConfigFactory


@pytest.fixture
def full(tmp_path: Path, make_config: ConfigFactory) -> Iterator[tuple[Broker, redis.Redis]]:
    """A run whose server cannot write its file, where a folder stands; and a client of the server."""
    with (
        EmbeddedServer(tmp_path / "redis", password="", append_only=False) as server,
        redis.Redis.from_url(server.url, socket_timeout=20) as client,
    ):
        broker = Broker.connect(server.url, RUN, timeout_s=20)
        broker.initialise(make_config())
        Run(broker).start()
        file = Path(client.config_get("dir")["dir"]) / client.config_get("dbfilename")["dbfilename"]
        (file / "in the way").mkdir(parents=True)
        client.config_set("save", "3600 1")
        client.bgsave()
        wait_for(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        yield broker, client
        broker.close()


def test_a_disk_that_stays_full_is_redis_being_away_and_says_what_to_do(full: tuple[Broker, redis.Redis]) -> None:
    broker = full[0]
    broker._connection.timeout_s = 0.2
    with pytest.raises(BrokerUnavailable, match="Make room"):
        broker.admit(WORKER, ENGINE)
    assert broker.snapshot().groups.closes  # what reads goes on


def test_what_waits_for_a_full_disk_goes_on_when_it_has_room(full: tuple[Broker, redis.Redis]) -> None:
    (broker, client), got = full, list[object]()
    broker._connection.timeout_s = 60
    waiting = threading.Thread(target=lambda: got.append(broker.admit(WORKER, ENGINE)))
    waiting.start()
    refused = client.info("errorstats").get("errorstat_MISCONF", {}).get("count", 0)
    wait_for(lambda: client.info("errorstats").get("errorstat_MISCONF", {}).get("count", 0) > refused)
    assert not got
    client.config_set("save", "")
    waiting.join(60)
    assert isinstance(got[0], Ticket)
