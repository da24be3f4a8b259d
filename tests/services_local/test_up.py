"""`lagrange up` as a real process with a real Redis and stand-ins for everything else."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from broker.keys import Keys
from broker.queue import Broker
from configs import load_config
from services.local import session
from services.local.layout import CannotStart
from services.local.open_run import read_beginning
from services.local.plan import only_one, plan_new, prepare
from services.local.session import Session, Settings
from services.local.starting import USUAL
from tests.broker.helpers import WORKER
from tests.broker.helpers import Run as BrokerRun
from tests.conftest import small_config

ROOT = Path(__file__).parents[2]
UP = Path(__file__).with_name("fake_up.py")
LONG_S = 150.0  # what takes longer hangs, even on a machine that is busy with something else
pytestmark = pytest.mark.timeout(400)


def tree(place: Path, **fields: object) -> dict[str, object]:
    """A run of five steps below `place`."""
    return {
        "run": {"id": "r", "steps": 5, "directory": str(place / "runs")},
        "lag": {"max": 1},
        "model": {"tiny": {}},
        "task": {"name": "max-digit"},
        "rollout": {"max_new_tokens": 2, "workers": 2},
        "engine": {"python": sys.executable},
        "trainer": {"optimizer": {"learning_rate": 1e-3}},
        **fields,
    }


class Run:
    """One `up`: its process, the folder of its run, and what it printed."""

    def __init__(self, place: Path, *arguments: str, **fields: object) -> None:
        self.place = place
        self.config = place / "config.yaml"
        self.config.write_text(yaml.safe_dump(tree(place, **fields)))
        self.start(str(self.config), *arguments)

    def start(self, *arguments: str) -> None:
        self.out = self.place / "out.txt"
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(UP), *arguments],
                stdout=out,
                stderr=out,
                cwd=self.place,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @classmethod
    def of(cls, place: Path, process: subprocess.Popen[bytes]) -> Run:
        run = cls.__new__(cls)
        run.place, run.out, run.process = place, place / "out.txt", process
        return run

    @property
    def folder(self) -> Path:
        return self.place / "runs" / "r"

    @property
    def text(self) -> str:
        return self.out.read_text()

    def pids(self, role: str = "") -> list[int]:
        try:
            lines = (self.folder / "pids").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [int(line.split()[1]) for line in lines if line.startswith(role)]

    def redis_pids(self) -> list[int]:
        """Processes whose working directory lies in the run's folder, or that name it in their command."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
                    where = str((entry / "cwd").readlink())
                except OSError:
                    continue
                if str(self.folder) in command or where.startswith(str(self.folder)):
                    found.append(int(entry.name))
        return found

    def finish(self) -> int:
        (self.folder / "go").touch()
        return self.process.wait(timeout=LONG_S)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def until(condition: Callable[[], object], run: Run) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, run.text
        time.sleep(0.02)


def everything_started(run: Run) -> bool:
    return all(run.pids(role) for role in ("engine-0", "weight-sync", "monitor", "trainer", "worker-0", "worker-1"))


def broker_of(run: Run) -> Broker:
    return Broker.of_run(load_config(run.folder / "config.yaml"), None)


def redis_is_gone(run: Run) -> bool:
    return not any(alive(pid) for pid in run.redis_pids())


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*arguments: str, **fields: object) -> Run:
        runs.append(Run(tmp_path, *arguments, **fields))
        return runs[-1]

    yield make
    for run in runs:
        run.process.kill()
        run.process.wait()
        until(partial(redis_is_gone, run), run)


def test_a_finished_trainer_ends_the_run_with_a_report_and_a_ledger(launch: Callable[..., Run]) -> None:
    run = launch("trainer=finish")
    until(lambda: everything_started(run), run)
    assert run.finish() == 0, run.text
    assert json.loads((run.folder / "ledger.json").read_text())["status"] == "finished"
    assert "<svg" in (run.folder / "report.html").read_text()
    assert "Finished" in run.text
    assert f"starting  |  engines starting, log: logs/engine-0.log ({USUAL})" in run.text
    began = read_beginning(run.folder)
    assert began is not None
    assert (began.time_ms > 0, began.metrics) == (True, {})
    assert not [pid for pid in (*run.pids(), *run.redis_pids()) if alive(pid)]


def test_ctrl_c_ends_every_process_within_ten_seconds_even_a_stubborn_one(launch: Callable[..., Run]) -> None:
    run = launch("worker-0=stubborn", "monitor=stubborn")
    until(lambda: everything_started(run), run)
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=LONG_S) == 130, run.text
    assert time.monotonic() - began < 10
    assert not [pid for pid in (*run.pids(), *run.redis_pids()) if alive(pid)]
    assert f"--resume {run.folder}" in run.text


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_its_folder(launch: Callable[..., Run]) -> None:
    run = launch("trainer=finish")
    until(lambda: everything_started(run), run)
    model = (run.folder / "model" / "model.safetensors").read_bytes()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=LONG_S) == 130, run.text
    before = len(run.pids("trainer"))
    run.start(f"--resume={run.folder}", "trainer=finish")
    until(lambda: len(run.pids("trainer")) > before, run)
    assert run.finish() == 0, run.text
    assert (run.folder / "model" / "model.safetensors").read_bytes() == model


def test_a_resume_issues_dead_letters_again_only_when_it_is_asked_to_which_the_end_before_it_says(
    launch: Callable[..., Run],
) -> None:
    run = launch("trainer=finish")
    until(lambda: everything_started(run), run)
    with closing(broker_of(run)) as broker:
        letter = BrokerRun(broker).start().admit()
        assert broker.fail(letter.group_id, WORKER, "a reward failed: no number", final=True)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=LONG_S) == 130, run.text
    assert "1 of its prompts are dead letters (the newest for: a reward failed: no number)" in run.text
    assert f"--resume {run.folder} --requeue" in run.text
    for asked, dead in (((), 1), (("--requeue",), 0)):
        before = len(run.pids("trainer"))
        run.start(f"--resume={run.folder}", *asked, "trainer=finish")
        until(lambda before=before: len(run.pids("trainer")) > before, run)  # type: ignore[misc]
        with closing(broker_of(run)) as broker:
            assert len(broker.dead_letters()) == dead
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(timeout=LONG_S) == 130, run.text


@pytest.mark.parametrize("reader", ["head", "terminal"])
def test_a_reader_that_goes_away_stops_the_run_in_order_with_its_report(tmp_path: Path, reader: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree(tmp_path)))
    read, write = os.pipe() if reader == "head" else pty.openpty()
    errors = tmp_path / "out.txt"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(UP), str(tmp_path / "config.yaml")],
            stdout=write,
            stderr=file,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        )
    os.close(write)
    os.set_blocking(read, False)

    def seen_for_a_while() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(read, 65536)
        return everything_started(run)

    run = Run.of(tmp_path, process)
    try:
        until(seen_for_a_while, run)
        os.close(read)
        if reader == "terminal":
            process.send_signal(signal.SIGHUP)  # the kernel's, where it is the controlling terminal
        assert process.wait(timeout=LONG_S) == 130, run.text
        assert run.text == ""
        assert not [pid for pid in (*run.pids(), *run.redis_pids()) if alive(pid)]
        assert json.loads((run.folder / "ledger.json").read_text())["status"] == "stopped"
        assert (run.folder / "report.html").is_file()
    finally:
        process.kill()
        process.wait()
        until(partial(redis_is_gone, run), run)


def test_a_run_that_is_to_outlive_its_terminal_does(launch: Callable[..., Run]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts it
    try:
        run = launch("trainer=finish")
    finally:
        signal.signal(signal.SIGHUP, before)
    until(lambda: everything_started(run), run)
    run.process.send_signal(signal.SIGHUP)
    assert run.finish() == 0, run.text
    assert "Finished" in run.text


def test_killing_up_leaves_no_orphan_not_even_a_grandchild(launch: Callable[..., Run]) -> None:
    run = launch("engine-0=child", "worker-1=stubborn")
    until(lambda: everything_started(run) and run.pids("grandchild"), run)
    left = [*run.pids(), *run.redis_pids()]
    assert all(alive(pid) for pid in left)
    run.process.kill()
    run.process.wait()
    until(lambda: not [pid for pid in left if alive(pid)], run)


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_the_run_says_so(launch: Callable[..., Run]) -> None:
    run = launch("trainer=finish")
    until(lambda: everything_started(run), run)
    os.kill(run.pids("worker-1")[0], signal.SIGKILL)
    until(lambda: len(run.pids("worker-1")) == 2, run)
    assert run.finish() == 0, run.text
    assert "worker-1 ended (signal 9) and is started again" in run.text


@pytest.mark.slow
def test_a_worker_that_keeps_dying_ends_the_run(launch: Callable[..., Run]) -> None:
    run = launch("worker-0=crash")
    assert run.process.wait(timeout=LONG_S) == 1
    assert len(run.pids("worker-0")) == 3
    assert "worker-0 ended 3 times" in run.text
    assert not [pid for pid in (*run.pids(), *run.redis_pids()) if alive(pid)]


def test_a_fatal_error_of_the_trainer_ends_the_run_with_its_message(launch: Callable[..., Run]) -> None:
    run = launch("trainer=fatal")
    assert run.process.wait(timeout=LONG_S) == 3
    assert "the loss is not finite" in run.text
    assert len(run.pids("trainer")) == 1


def test_an_engine_that_does_not_start_ends_the_run_at_once(launch: Callable[..., Run]) -> None:
    run = launch("engine-0=crash")
    assert run.process.wait(timeout=LONG_S) == 1
    assert "engine-0 did not start" in run.text
    assert len(run.pids("engine-0")) == 1


@pytest.mark.slow
def test_a_second_up_on_the_same_run_is_refused(launch: Callable[..., Run]) -> None:
    run = launch()
    until(lambda: everything_started(run), run)
    second = subprocess.run(
        [sys.executable, str(UP), f"--resume={run.folder}"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert second.returncode == 2
    assert f"another `lagrange up` runs here (process {run.process.pid})" in second.stderr
    assert run.process.poll() is None


def test_a_disk_that_fills_up_ends_the_run_with_words_and_not_with_a_traceback(launch: Callable[..., Run]) -> None:
    run = launch("trainer=finish")
    until(lambda: everything_started(run), run)
    (run.folder / "ledger.json.part").symlink_to("/dev/full")
    assert run.finish() == 0, run.text
    assert "ledger.json cannot be written (No space left on device)" in run.text
    assert "Finished" in run.text
    assert "Traceback" not in run.text


def test_a_lock_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "up.lock").symlink_to("/dev/full")
    with pytest.raises(CannotStart, match="cannot be written"), only_one(tmp_path):
        pass


def test_a_stop_that_is_asked_for_before_redis_answers_starts_nothing_more(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree(tmp_path)))
    plan = plan_new(config, {})
    prepare(plan)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=110)
    stopped = Session(plan, lambda role: ["/no/such/program", role.name], Settings(), terminal, [signal.SIGINT])
    assert stopped.run() == 130
    assert isinstance(terminal.file, io.StringIO)
    frame = terminal.file.getvalue()
    assert "no step yet" in frame
    assert "Ctrl-C" not in frame  # the last frame stays on the screen, where there is nothing to stop any more
    assert [file.name for file in plan.logs.iterdir()] == ["redis.log"]


def test_a_full_disk_is_told_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree(tmp_path)))
    plan = plan_new(config, {})
    prepare(plan)
    out, asked = io.StringIO(), list[int]()

    def free(_: Path) -> int:
        if "no space is left on the disk of" in out.getvalue():
            asked.append(signal.SIGTERM)
        return 0

    monkeypatch.setattr(session, "free_bytes", free)
    idle = (sys.executable, "-c", "import time; time.sleep(600)")
    settings = Settings(look_every_s=0.05, line_every_s=0.05)
    assert Session(plan, lambda _: idle, settings, Console(file=out, width=110), asked).run() == 130
    assert f"no space is left on the disk of {plan.folder}: make room" in out.getvalue()


def test_a_run_that_another_release_wrote_into_redis_is_refused_before_anything_starts(
    launch: Callable[..., Run], redis_url: str, tmp_path: Path
) -> None:
    import redis

    (tmp_path / "runs" / "r" / "checkpoints").mkdir(parents=True)
    with redis.Redis.from_url(redis_url, socket_timeout=5) as client:
        client.hset(Keys("r").policy, mapping={"schema": "1", "run": "r"})
    run = launch(redis={"url": redis_url})
    assert run.process.wait(timeout=LONG_S) == 1
    assert "Redis holds run 'r' with schema 1" in run.text
    assert "Use another run id, or the release that wrote it" in run.text
    assert "Traceback" not in run.text
    assert not run.pids()


def test_a_new_run_under_the_id_of_one_that_redis_holds_is_refused_before_it_touches_that_one(
    launch: Callable[..., Run], redis_url: str, tmp_path: Path
) -> None:
    with closing(Broker.connect(redis_url, "r", timeout_s=5)) as broker:
        broker.initialise(small_config(tmp_path, **{"run.id": "r", "run.steps": 77}))
        run = launch(redis={"url": redis_url})
        assert run.process.wait(timeout=LONG_S) == 2
        assert "holds a run 'r' already" in run.text
        assert "choose another run.id" in run.text
        assert "Traceback" not in run.text
        run.start(f"--resume={run.folder}")  # the refused start had prepared a folder
        assert run.process.wait(timeout=LONG_S) == 2
        assert run.text.count("holds a run 'r' already") == 2
        assert not run.pids()
        assert broker.snapshot().steps_total == 77


def test_a_port_in_use_is_named_before_anything_starts(launch: Callable[..., Run]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = launch(monitor={"port": port})
        assert run.process.wait(timeout=LONG_S) == 2
    assert f"monitor.port: port {port} on 127.0.0.1 is in use" in run.text
    assert not run.folder.exists()
