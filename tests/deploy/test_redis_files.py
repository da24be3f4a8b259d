"""deploy/redis started as a container starts it: with a real server, a password from a file, and the limits."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from broker.errors import BrokerUnavailable
from broker.queue import Broker
from broker.server import find_server
from services.deployment import redis_users, write_whole
from tests.conftest import small_config
from tests.deploy.tools import DEPLOY

PASSWORD = "a-password-from-a-file"


@contextmanager
def started(folder: Path, **more: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A server from deploy/redis with its paths moved into `folder`; its port and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {"/etc/lagrange-redis/redis.conf": folder / "redis.conf", "/tmp/redis.conf": folder / "made.conf"}
    text = (DEPLOY / "redis/redis.conf").read_text(encoding="utf-8")
    for theirs, ours in (("port 6379", f"port {port}"), ("dir /data", f"dir {folder}"), ("* -::*", "127.0.0.1")):
        text = text.replace(theirs, ours)
    here["/etc/lagrange-redis/redis.conf"].write_text(text, encoding="utf-8")
    script = (DEPLOY / "redis/start.sh").read_text(encoding="utf-8")
    for path, moved in here.items():
        script = script.replace(path, str(moved))
    (folder / "start.sh").write_text(script, encoding="utf-8")
    (folder / "password").write_text(PASSWORD, encoding="utf-8")
    (folder / "bin").mkdir()
    (folder / "bin/redis-server").symlink_to(find_server())
    environment = {
        "PATH": f"{folder}/bin:/usr/bin:/bin",
        "REDIS_PASSWORD_FILE": str(folder / "password"),
        "REDIS_MAXMEMORY": "64mb",
        **more,
    }
    process = subprocess.Popen(["/bin/sh", str(folder / "start.sh")], env=environment, stdout=subprocess.DEVNULL)
    try:
        yield port, process
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[redis.Redis, subprocess.Popen[bytes]]]:
    with started(tmp_path) as (port, process):
        client = redis.Redis(port=port, password=PASSWORD, socket_timeout=5)
        yield client, process
        client.close()


def answered(client: redis.Redis) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            assert time.monotonic() < end
            time.sleep(0.05)
        else:
            return


def test_it_wants_the_password_keeps_everything_and_is_bounded(
    server: tuple[redis.Redis, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    client, process = server
    answered(client)
    assert client.config_get("maxmemory")["maxmemory"] == str(64 << 20)
    assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    assert client.config_get("appendonly")["appendonly"] == "yes"
    stranger = redis.Redis(port=client.connection_pool.connection_kwargs["port"], socket_timeout=5)
    with pytest.raises(redis.AuthenticationError):
        stranger.ping()
    stranger.close()
    arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
    assert PASSWORD.encode() not in arguments
    assert (tmp_path / "made.conf").stat().st_mode & 0o077 == 0


def test_its_health_check_fails_with_a_wrong_password(
    server: tuple[redis.Redis, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed (Debian: apt-get install redis-tools)")
    client, _ = server
    answered(client)
    port = client.connection_pool.connection_kwargs["port"]
    script = (DEPLOY / "redis/healthy.sh").read_text(encoding="utf-8").replace("redis-cli", f"redis-cli -p {port}")
    (tmp_path / "healthy.sh").write_text(script, encoding="utf-8")

    def healthy() -> int:
        environment = {**os.environ, "REDIS_PASSWORD_FILE": str(tmp_path / "password")}
        command = ["/bin/sh", str(tmp_path / "healthy.sh")]
        return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=20).returncode

    assert healthy() == 0
    (tmp_path / str(client.config_get("dbfilename")["dbfilename"]) / "in the way").mkdir(parents=True)
    client.config_set("save", "3600 1")
    client.bgsave()
    end = time.monotonic() + 20
    while client.info("persistence")["rdb_last_bgsave_status"] != "err":
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(redis.ResponseError, match="MISCONF"):  # as with a full disk
        client.ping()
    assert healthy() == 0
    client.config_set("save", "")  # else it refuses to end
    (tmp_path / "password").write_text("another", encoding="utf-8")
    assert healthy() != 0


def test_with_users_each_signs_in_by_name_and_the_health_check_needs_no_password(tmp_path: Path) -> None:
    (tmp_path / "passwords").mkdir()
    (tmp_path / "passwords/redis_worker_password").write_text(PASSWORD, encoding="utf-8")
    write_whole(tmp_path / "users.acl", redis_users(tmp_path / "passwords"))
    with started(tmp_path, REDIS_USERS_FILE=str(tmp_path / "users.acl")) as (port, _):
        client = redis.Redis(port=port, username="worker", password=PASSWORD, socket_timeout=5)
        answered(client)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.flushall()
        client.close()
        stranger = redis.Redis(port=port, socket_timeout=5)
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()
        stranger.close()
        if shutil.which("redis-cli") is None:
            pytest.skip("redis-cli is not installed (Debian: apt-get install redis-tools)")
        script = (DEPLOY / "redis/healthy.sh").read_text(encoding="utf-8").replace("redis-cli", f"redis-cli -p {port}")
        (tmp_path / "healthy.sh").write_text(script, encoding="utf-8")
        command, environment = ["/bin/sh", str(tmp_path / "healthy.sh")], dict(os.environ)
        environment["REDIS_USERS_FILE"] = str(tmp_path / "users.acl")
        assert subprocess.run(command, env=environment, check=False, timeout=20).returncode == 0


def test_with_users_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    """Redis 7.0 loads its append-only file with the rights of the default user, which nobody can sign in as."""
    (tmp_path / "passwords").mkdir()
    (tmp_path / "passwords/redis_trainer_password").write_text(PASSWORD, encoding="utf-8")
    write_whole(tmp_path / "users.acl", redis_users(tmp_path / "passwords"))
    with started(tmp_path, REDIS_USERS_FILE=str(tmp_path / "users.acl")) as (port, _):
        with redis.Redis(port=port, username="trainer", password=PASSWORD, socket_timeout=5) as client:
            answered(client)
        broker = Broker.connect(f"redis://127.0.0.1:{port}", "r", user="trainer", password=PASSWORD, timeout_s=5)
        broker.initialise(small_config(tmp_path, **{"run.id": "r"}))
        epoch = broker.attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch
        broker.close()
    (tmp_path / "bin/redis-server").unlink()
    (tmp_path / "bin").rmdir()
    with started(tmp_path, REDIS_USERS_FILE=str(tmp_path / "users.acl")) as (port, _):
        with redis.Redis(port=port, username="trainer", password=PASSWORD, socket_timeout=5) as client:
            answered(client)
        broker = Broker.connect(f"redis://127.0.0.1:{port}", "r", user="trainer", password=PASSWORD, timeout_s=5)
        assert broker.snapshot().epoch == epoch
        broker.close()


def certificates(folder: Path) -> Path:
    """What deploy/tls/make.sh makes, with Redis' certificate under the names of a Kubernetes TLS secret."""
    folder.mkdir()
    subprocess.run([DEPLOY / "tls/make.sh", folder], check=True, capture_output=True, timeout=60)
    for kind in ("crt", "key"):
        shutil.copy(folder / f"redis.{kind}", folder / f"tls.{kind}")
    return folder


def test_with_certificates_it_speaks_tls_alone_and_the_broker_checks_who_it_is(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (Debian: apt-get install openssl)")
    if "redis-server" not in find_server().name:
        pytest.skip("the embedded server was built without TLS (Debian: apt-get install redis-server)")
    folder = certificates(tmp_path / "tls")
    with started(tmp_path, REDIS_TLS_FOLDER=str(folder)) as (port, _):
        url = f"rediss://localhost:{port}/0"
        end = time.monotonic() + 20
        while True:
            try:
                broker = Broker.connect(f"{url}?ssl_ca_certs={folder}/ca.crt", "r", password=PASSWORD, timeout_s=2)
                break
            except BrokerUnavailable:
                assert time.monotonic() < end
        broker.initialise(small_config(tmp_path, **{"run.id": "r"}))
        assert broker.snapshot().run == "r"
        broker.close()
        for wrong in (url, f"redis://localhost:{port}/0"):
            with pytest.raises(BrokerUnavailable):
                Broker.connect(wrong, "r", password=PASSWORD, timeout_s=1)
