"""TLS by configuration: Redis' certificate is checked, monitor and weight-sync speak HTTPS alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from broker.errors import BrokerUnavailable
from broker.queue import Broker
from broker.sentinel import parse
from broker.server import find_server
from configs import ConfigError, load_config
from configs.schema import ServiceSection
from services.deployment import redis_users, write_whole
from services.http import check_certificate
from tests.conftest import small_config
from tests.deploy.test_redis_files import PASSWORD, certificates, started
from tests.deploy.tools import DEPLOY, ROOT, Tree, compose, program, run

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A throw-away authority, and the certificate that it gave to localhost: ca.crt, tls.crt, tls.key."""
    return certificates(tmp_path_factory.mktemp("authority") / "tls")


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("another") / "tls")


def test_a_configuration_names_who_may_have_signed_redis_certificate(
    tmp_path: Path, authority: Path, another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "redis-server" not in find_server().name:
        pytest.skip("the embedded server was built without TLS (Debian: apt-get install redis-server)")
    (tmp_path / "passwords").mkdir()
    for role in ("trainer", "worker"):
        (tmp_path / f"passwords/redis_{role}_password").write_text(PASSWORD, encoding="utf-8")
    write_whole(tmp_path / "users.acl", redis_users(tmp_path / "passwords"))
    monkeypatch.setenv("LAGRANGE_REDIS_USER", "trainer")
    with started(tmp_path, REDIS_TLS_FOLDER=str(authority), REDIS_USERS_FILE=str(tmp_path / "users.acl")) as (port, _):

        def config(**redis: Any) -> Any:
            settings = {"url": f"rediss://localhost:{port}/0", "timeout_s": 1.0, **redis}
            return small_config(tmp_path, **{f"redis.{name}": value for name, value in settings.items()})

        end = time.monotonic() + 100
        while True:
            try:
                broker = Broker.of_run(config(ca_file=authority / "ca.crt", timeout_s=10.0), PASSWORD)
                break
            except BrokerUnavailable:
                assert time.monotonic() < end
        broker.initialise(config(ca_file=authority / "ca.crt"))
        assert broker.snapshot().step == 0
        broker.close()
        with pytest.raises(BrokerUnavailable, match="certificate verify failed"):
            Broker.of_run(config(ca_file=another / "ca.crt"), PASSWORD)
        with pytest.raises(BrokerUnavailable, match="certificate verify failed"):
            Broker.of_run(config(), PASSWORD)
        with pytest.raises(BrokerUnavailable):  # another name than the certificate's
            Broker.of_run(config(url=f"rediss://127.0.0.1:{port}/0", ca_file=authority / "ca.crt"), PASSWORD)
        with pytest.raises(BrokerUnavailable):
            Broker.of_run(config(url=f"redis://localhost:{port}/0"), PASSWORD)


def test_sentinels_are_asked_over_tls_too() -> None:
    watched, plain = parse("rediss+sentinel://a:1,b/service/2"), parse("redis+sentinel://a:1,b/service/2")
    assert watched is not None
    assert plain is not None
    assert (watched.tls, plain.tls) == (True, False)
    assert watched.sentinels == plain.sentinels


@pytest.mark.parametrize("command", ["monitor", "weight-sync"])
def test_a_service_with_a_certificate_speaks_https_alone_and_its_health_check_knows(
    tmp_path: Path, redis_url: str, authority: Path, another: Path, command: str
) -> None:
    tree = yaml.safe_load((DEPLOY / "configs/tiny/config.yaml").read_text(encoding="utf-8"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    tree["redis"]["url"], tree["run"]["directory"] = redis_url, str(tmp_path / "runs")
    files = {"cert_file": str(authority / "tls.crt"), "key_file": str(authority / "tls.key")}
    tree[command.replace("-", "_")] |= {"host": "127.0.0.1", "port": port, **files}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    broker = Broker.of_run(load_config(file), None)
    broker.initialise(load_config(file))
    broker.close()
    environment = {**os.environ, "LAGRANGE_API_TOKEN": "token-of-the-test", "LAGRANGE_CONFIG": str(file)}
    words = [sys.executable, "-m", "services", command, "--config", str(file)]
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        answer, end = None, time.monotonic() + 120
        while answer is None:
            assert process.poll() is None
            assert time.monotonic() < end
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"https://localhost:{port}/readyz", verify=trust(authority), timeout=5)
            time.sleep(0.05)
        assert answer.status_code in (200, 503)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://localhost:{port}/healthz", verify=trust(another), timeout=5)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{port}/healthz", timeout=5)
        done = subprocess.run(
            [sys.executable, DEPLOY / "docker/probe.py", command],
            env=environment,
            cwd=ROOT,
            timeout=60,
            check=False,
            capture_output=True,
        )
        assert done.returncode == 0 or b"503" in done.stderr
    finally:
        process.terminate()
        assert process.wait(20) == 0


def trust(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority / "ca.crt"))


def test_what_cannot_be_used_is_said_at_once(tmp_path: Path, authority: Path, another: Path) -> None:
    check_certificate(ServiceSection.model_validate({}))
    good = {"cert_file": authority / "tls.crt", "key_file": authority / "tls.key"}
    check_certificate(ServiceSection.model_validate(good))
    for wrong in ({"key_file": another / "tls.key"}, {"cert_file": tmp_path / "nowhere"}):
        with pytest.raises(ConfigError, match="cannot be used"):
            check_certificate(ServiceSection.model_validate({**good, **wrong}))
    for half in ("monitor.cert_file", "weight_sync.key_file"):
        with pytest.raises(ConfigError, match=rf"{half}.* belong together"):
            load_config(ROOT / "configs" / "local.yaml", {half: authority / "tls.crt"})
    with pytest.raises(ConfigError, match="nothing is encrypted"):
        load_config(
            ROOT / "configs" / "local.yaml", {"redis.url": "redis://redis:6379", "redis.ca_file": authority / "ca.crt"}
        )


def test_the_authority_signed_all_three_and_is_kept(authority: Path) -> None:
    before = {file.name: file.read_bytes() for file in authority.iterdir()}
    for name in ("redis", "weight-sync", "monitor"):
        run("openssl", "verify", "-CAfile", authority / "ca.crt", "-verify_hostname", name, authority / f"{name}.crt")
    run(DEPLOY / "tls/make.sh", authority)
    assert {file.name: file.read_bytes() for file in authority.iterdir()} == before
    assert authority.stat().st_mode & 0o077 == 0
    assert (authority / "ca.key").stat().st_mode & 0o077 == 0


def test_compose_gives_certificates_to_who_needs_them() -> None:
    tree = tls_compose()["services"]
    for name in ("redis", "weight-sync", "monitor"):
        mounted = {s["target"].rsplit("/", 1)[-1]: s["source"] for s in tree[name]["secrets"]}
        wanted = {"tls.crt": f"tls_{name}_crt".replace("-", "_"), "tls.key": f"tls_{name}_key".replace("-", "_")}
        assert {key: mounted.get(key) for key in wanted} == wanted
        assert mounted["ca.crt"] == "tls_ca"
    for name in ("init", "trainer", "engine", "rollout"):
        sources = {s["source"] for s in tree[name]["secrets"]}
        assert {source for source in sources if source.startswith("tls_")} == {"tls_ca"}
        assert sources >= {s["source"] for s in compose()["services"][name]["secrets"]}
    assert tree["redis"]["environment"]["REDIS_TLS_FOLDER"] == "/run/secrets"


def tls_compose() -> Tree:
    """The compose file with TLS, resolved."""
    files = ("-f", "deploy/docker-compose.yml", "-f", "deploy/compose.tls.yaml")
    text = run(
        program("docker-compose"),
        *(*files, "config", "--format", "json"),
        environment={"LAGRANGE_CONFIG": str(DEPLOY / "configs/tiny/config.yaml")},
    )
    tree: Tree = json.loads(text)
    return tree
