"""deploy/redis started as a container starts it: with a real server, a password from a file, and the limits."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from broker.server import find_server
from tests.deploy.tools import DEPLOY

PASSWORD = "a-password-from-a-file"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[redis.Redis, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {"/etc/redis/redis.conf": tmp_path / "redis.conf", "/tmp/redis.conf": tmp_path / "made.conf"}
    text = (DEPLOY / "redis/redis.conf").read_text(encoding="utf-8")
    text = (
        text.replace("port 6379", f"port {port}").replace("dir /data", f"dir {tmp_path}").replace("* -::*", "127.0.0.1")
    )
    here["/etc/redis/redis.conf"].write_text(text, encoding="utf-8")
    script = (DEPLOY / "redis/start.sh").read_text(encoding="utf-8")
    for theirs, ours in here.items():
        script = script.replace(theirs, str(ours))
    (tmp_path / "start.sh").write_text(script, encoding="utf-8")
    (tmp_path / "password").write_text(PASSWORD, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/redis-server").symlink_to(find_server())
    environment = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "REDIS_PASSWORD_FILE": str(tmp_path / "password"),
        "REDIS_MAXMEMORY": "64mb",
    }
    process = subprocess.Popen(["/bin/sh", str(tmp_path / "start.sh")], env=environment, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port, password=PASSWORD, socket_timeout=5)
    try:
        yield client, process
    finally:
        client.close()
        process.terminate()
        process.wait(10)


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
    (tmp_path / "password").write_text("another", encoding="utf-8")
    assert healthy() != 0
