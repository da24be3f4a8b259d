"""The tiny system in a real Docker engine with what is optional: TLS, payloads as files in memory, weights by delta.

    make test-docker        or        python -m pytest tests/deploy/docker/override_drills.py -s

The run's fields are those that docs/deploy tells people to write; the authority is made for the drill and thrown away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.docker.system import PATIENCE_S, System, project, say
from tests.deploy.tools import ROOT, Tree

pytestmark = pytest.mark.timeout(3600)
# In a container, as a process there could try: how each attempt ends.
ATTEMPTS = """
import json, redis, ssl, urllib.request
from redis.exceptions import ConnectionError as Lost
password = open("/run/secrets/redis_password", encoding="utf-8").read().strip()
def signed_in(**how):
    try:
        return str(redis.Redis(host="redis", username="worker", password=password, socket_timeout=10, **how).ping())
    except Lost as error:
        return "untrusted" if "CERTIFICATE_VERIFY_FAILED" in str(error) else "refused"
def answered(url, trust=None):
    context = ssl.create_default_context(cafile=trust) if url.startswith("https") else None
    try:
        return str(urllib.request.urlopen(url, timeout=10, context=context).status)
    except OSError as error:
        return "untrusted" if "CERTIFICATE_VERIFY_FAILED" in str(error) else "refused"
ours = "/run/secrets/ca.crt"
print(json.dumps({
    "redis": [signed_in(), signed_in(ssl=True), signed_in(ssl=True, ssl_ca_certs=ours)],
    **{name: [answered(f"http://{at}"), answered(f"https://{at}"), answered(f"https://{at}", ours)]
       for name, at in (("monitor", "monitor:8020/healthz"), ("weight-sync", "weight-sync:8010/healthz"))},
}))
"""


METRICS = """
import ssl, urllib.request
trust = ssl.create_default_context(cafile="/run/secrets/ca.crt")
print(urllib.request.urlopen("https://weight-sync:8010/metrics", timeout=10, context=trust).read().decode())
"""


def fields() -> Tree:
    """What the documentation tells people to write into the run's configuration."""
    made: Tree = {"weights": {"transport": "delta"}}
    for page in ("tls", "sizing"):
        text = (ROOT / f"docs/deploy/{page}.md").read_text(encoding="utf-8")
        (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
        for section, values in yaml.safe_load(block).items():
            made.setdefault(section, {}).update(values)
    return made


@pytest.fixture(scope="module")
def system(docker_folder: Path) -> Iterator[System]:
    """A project that is up, with both overrides."""
    with project(docker_folder, fields(), ("compose.tls.yaml", "compose.payloads.yaml")) as running:
        yield running


def test_it_trains(system: System) -> None:
    say(f"step 5 after {system.until('step 5', lambda: system.step() >= 5, 2 * PATIENCE_S):.0f} s")
    system.sound()


def test_nothing_is_answered_in_plain_text_or_without_trust_in_the_authority(system: System) -> None:
    said = json.loads(system.compose("exec", "-T", "rollout", "python3", "-c", ATTEMPTS))
    assert said == {
        "redis": ["refused", "untrusted", "True"],
        "monitor": ["refused", "untrusted", "200"],
        "weight-sync": ["refused", "untrusted", "200"],
    }


def test_no_container_but_its_own_gets_a_services_key(system: System) -> None:
    for service in ("redis", "weight-sync", "monitor"):
        assert system.compose("exec", "-T", service, "ls", "/run/secrets/tls.key").split()
    for service in ("trainer", "engine", "rollout"):
        listed = system.compose("exec", "-T", service, "ls", "/run/secrets").split()
        assert "ca.crt" in listed
        assert not [name for name in listed if name.startswith("tls")]


def test_payloads_are_files_in_memory_that_workers_write_and_the_trainer_removes(system: System) -> None:
    folder = "/var/lib/lagrange-payloads"
    for service in ("rollout", "trainer"):
        assert system.compose("exec", "-T", service, "stat", "-f", "-c", "%T", folder).strip() == "tmpfs"

    def files() -> set[str]:
        return set(system.compose("exec", "-T", "trainer", "ls", f"{folder}/tiny").split())

    system.until("a payload", files)
    first = files()
    system.until("its removal", lambda: not first & files())


def test_engines_load_the_copy_on_their_own_host(system: System) -> None:
    listed = system.compose("exec", "-T", "engine", "sh", "-c", "ls -d /dev/shm/lagrange/tiny/*/v*")
    assert 1 <= len(listed.split()) <= 2
    text = system.compose("exec", "-T", "rollout", "python3", "-c", METRICS)
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    (updates,) = (float(value) for name, value in found.items() if "_engine_updates_total{" in name)
    # With a version a second a copy may be replaced by its successor before it is loaded: then the published files are.
    assert float(found["lagrange_weight_sync_transport_fallbacks_total"]) < updates / 2


@pytest.mark.parametrize("service", ["redis", "weight-sync", "trainer"])
def test_it_recovers_from_kill_9_of(system: System, service: str) -> None:
    system.recovers(service)
