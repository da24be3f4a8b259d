"""A real SGLang server for the integration tests of a session: started by `rollout.engine`, as in a run.

tests/conftest.py knows the fixture `real_engine`; a test that uses it has the mark `engine`. One server serves all;
a test that loads other weights puts the first ones back (`RealEngine.load`).
The interpreter is .venv-sglang/bin/python of the repository, or what LAGRANGE_TEST_ENGINE_PYTHON names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from broker.queue import Broker
from broker.server import EmbeddedServer
from broker.types import EngineRecord, EngineState
from configs.load import save_config
from configs.schema import RunConfig, TinyModel
from rollout.checkpoint import Checkpoint, read_checkpoint
from rollout.client import EngineClient
from services.local.tiny_model import write_tiny_model

START_S = 420.0  # 25 to 40 s on a quiet machine, minutes on one that is overloaded
KEY = "key-of-the-tests"
RUN_ENGINE = (
    "import sys; from pathlib import Path; from configs.load import load_config; from rollout.engine import main; "
    "sys.exit(main(load_config(Path(sys.argv[1])), int(sys.argv[2])))"
)


@dataclass(frozen=True, slots=True)
class RealEngine:
    """A running engine. folder: of its checkpoint; key: its API key; supervisor: of `lagrange engine`."""

    url: str
    folder: Path
    checkpoint: Checkpoint
    key: str
    config: RunConfig
    broker: Broker
    supervisor: subprocess.Popen[bytes]

    @property
    def headers(self) -> dict[str, str]:
        """For requests of one's own."""
        return {"Authorization": f"Bearer {self.key}"}

    def client(self, timeout_s: float = 60.0) -> EngineClient:
        """A client; close it."""
        return EngineClient(self.url, self.checkpoint, api_key=self.key, timeout_s=timeout_s)

    def post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        """Send a request, for control endpoints."""
        return httpx.post(self.url + path, json=body, headers=self.headers, timeout=60, trust_env=False)

    def load(self, folder: Path, version: int) -> None:
        """Load a checkpoint's weights under a version, as weight-sync does on an idle engine."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer = self.post("/update_weights_from_disk", body)
        assert answer.json()["success"], answer.text

    def record(self) -> EngineRecord:
        """What the registry says of it."""
        return next(r for r in self.broker.engines() if r.engine_id == "engine-0")


def engine_python() -> Path:
    """Interpreter of the engine's environment; skips the test if there is none."""
    named = os.environ.get("LAGRANGE_TEST_ENGINE_PYTHON")
    path = Path(named) if named else Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"
    if not path.exists():
        pytest.skip(f"{path} is missing: `make setup` makes it")
    return path


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until a condition holds; fails the test after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def launch_engine(
    directory: Path, redis_url: str, tiny: TinyModel | None = None, **engine: object
) -> tuple[RunConfig, Broker, subprocess.Popen[bytes]]:
    """Start `lagrange engine` with a tiny model, and do not wait for it."""
    from tests.conftest import small_config  # conftest imports this module

    folder = directory / "model"
    write_tiny_model(tiny or TinyModel(), 0, folder)
    config = small_config(
        directory,
        **{
            "model": {"path": folder},
            "redis.url": redis_url,
            "run.id": f"engine-{directory.name}",
            "engine": {"python": engine_python(), "max_total_tokens": 20000, "start_timeout_s": START_S, **engine},
        },
    )
    config.run.folder.mkdir(parents=True, exist_ok=True)
    save_config(config, config.run.folder / "config.yaml")
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    return config, broker, supervise(config, 0)


def supervise(config: RunConfig, index: int) -> subprocess.Popen[bytes]:
    """Start `lagrange engine` number `index` of a run whose configuration was saved."""
    with (config.run.folder / "supervisor.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", RUN_ENGINE, str(config.run.folder / "config.yaml"), str(index)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LAGRANGE_ENGINE_API_KEY": KEY},
        )


def start_engine(directory: Path, redis_url: str, tiny: TinyModel | None = None, **engine: object) -> RealEngine:
    """`lagrange engine` with a tiny model, ready and JOINING; `stop_engine` ends it. engine: fields of that section."""
    config, broker, supervisor = launch_engine(directory, redis_url, tiny, **engine)
    try:
        wait_until(
            lambda: bool(broker.engines()) or supervisor.poll() is not None, START_S, "the engine does not start"
        )
        assert supervisor.poll() is None, (config.run.folder / "supervisor.log").read_text()
        record = broker.engines()[0]
        assert record.state is EngineState.JOINING
    except BaseException:
        supervisor.kill()
        supervisor.wait(10)
        raise
    folder = directory / "model"
    return RealEngine(record.url, folder, read_checkpoint(folder), KEY, config, broker, supervisor)


def stop_engine(engine: RealEngine) -> None:
    """End the supervisor as `lagrange up` does."""
    if engine.supervisor.poll() is None:
        engine.supervisor.send_signal(signal.SIGTERM)
        try:
            engine.supervisor.wait(10)
        except subprocess.TimeoutExpired:
            engine.supervisor.kill()
            engine.supervisor.wait(10)
    engine.broker.close()


@pytest.fixture(scope="session")
def engine_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of its own: the other tests empty theirs."""
    with EmbeddedServer(tmp_path_factory.mktemp("engine-redis"), append_only=False, password="") as server:
        yield server.url


@pytest.fixture(scope="session")
def real_engine(tmp_path_factory: pytest.TempPathFactory, engine_redis: str) -> Iterator[RealEngine]:
    """One engine for the whole session, on the tiny model."""
    engine = start_engine(tmp_path_factory.mktemp("engine"), engine_redis)
    yield engine
    stop_engine(engine)
