"""A control plane without machines: etcd, kube-apiserver, kube-controller-manager and kube-scheduler on loopback.

Invariant: listens on 127.0.0.1 alone, keeps everything in its folder, and leaves no process behind, whichever way the
test ends. No kubelet: objects are admitted, stored, turned into Pods and placed on Nodes that a test invents; nothing
of them runs.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from services.local.processes import Processes, explain_log
from tests.deploy.tools import Tree, free_ports, program

START_S = 120.0
ANSWER_S = 60.0
# Not these: what asks a cloud or machines for something, and tokens, which no pod of ours gets.
CONTROLLERS = ("*", *(f"-{name}" for name in ("serviceaccount-token", "nodeipam", "nodelifecycle", "route", "service")))


class Refused(Exception):
    """The server did not take it; the message is its own."""


@dataclass(frozen=True)
class Cluster:
    """The control plane, as somebody with kubectl sees it."""

    folder: Path

    def kubectl(self, *words: str | Path, objects: tuple[Tree, ...] = ()) -> str:
        """Standard output of kubectl; `objects` are its standard input. Raises Refused."""
        done = subprocess.run(
            [program("kubectl"), *(str(word) for word in words)],
            input=yaml.safe_dump_all(objects) if objects else None,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "KUBECONFIG": str(self.folder / "kubeconfig")},
            check=False,
        )
        if done.returncode:
            raise Refused(done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def apply(self, *objects: Tree, dry: bool = False) -> list[str]:
        """Apply with every check of the server; "kind/name" of each object that it took. Raises Refused."""
        mode = ("--dry-run=server",) if dry else ()
        return self.kubectl("apply", "--validate=strict", *mode, "-o", "name", "-f", "-", objects=objects).split()

    def refusal(self, *objects: Tree) -> str:
        """What the server says against these objects; nothing if it would take them."""
        try:
            self.apply(*objects, dry=True)
        except Refused as error:
            return str(error)
        return ""

    def get(self, kind: str, *words: str) -> list[Tree]:
        """Objects of a kind in the run's namespace."""
        found: list[Tree] = json.loads(self.kubectl("-n", "lagrange", "get", kind, "-o", "json", *words))["items"]
        return found


@contextmanager
def cluster(programs: Path, folder: Path) -> Iterator[Cluster]:
    """A new and empty control plane from the folder `programs` (build.py). Raises RuntimeError with a log's end."""
    folder.mkdir(parents=True, exist_ok=True)
    store, peers, api = free_ports(3)
    token = secrets.token_hex(16)
    _write(folder / "tokens.csv", f"{token},admin,admin,system:masters\n")
    _write(folder / "kubeconfig", yaml.safe_dump(_access(f"https://127.0.0.1:{api}", token)))
    key = folder / "accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=ANSWER_S)
    commands = {
        "etcd": (
            "etcd",
            *("--data-dir", f"{folder}/etcd", "--unsafe-no-fsync", "--log-level", "error"),
            *("--listen-client-urls", f"http://127.0.0.1:{store}"),
            *("--advertise-client-urls", f"http://127.0.0.1:{store}"),
            *("--listen-peer-urls", f"http://127.0.0.1:{peers}"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peers}"),
            *("--initial-cluster", f"default=http://127.0.0.1:{peers}"),
        ),
        "kube-apiserver": (
            f"{programs}/kube-apiserver",
            *("--etcd-servers", f"http://127.0.0.1:{store}", "--endpoint-reconciler-type", "none"),
            *("--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--secure-port", str(api)),
            *("--cert-dir", f"{folder}/certs", "--service-cluster-ip-range", "10.0.0.0/24"),
            *("--authorization-mode", "RBAC", "--token-auth-file", f"{folder}/tokens.csv"),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--service-account-key-file", str(key), "--service-account-signing-key-file", str(key)),
            *("--enable-admission-plugins", "PodSecurityPolicy"),
            *("--disable-admission-plugins", "TaintNodesByCondition"),  # nobody would take the taint from a new Node
        ),
        "kube-controller-manager": (
            f"{programs}/kube-controller-manager",
            *("--kubeconfig", f"{folder}/kubeconfig", "--leader-elect=false", "--controllers", ",".join(CONTROLLERS)),
            *("--bind-address", "127.0.0.1", "--secure-port", "0", "--port", "0"),
        ),
        "kube-scheduler": (
            f"{programs}/kube-scheduler",
            *("--kubeconfig", f"{folder}/kubeconfig", "--leader-elect=false"),
            *("--bind-address", "127.0.0.1", "--secure-port", "0", "--port", "0"),
        ),
    }
    processes = Processes(folder)
    made = Cluster(folder)
    try:
        for name in ("etcd", "kube-apiserver"):
            processes.start(name, commands[name])
        _until_ready(made, processes)
        for name in ("kube-controller-manager", "kube-scheduler"):
            processes.start(name, commands[name])
        yield made
    finally:
        processes.stop(tuple(reversed(commands)), budget_s=10.0)
        processes.close()


def _until_ready(made: Cluster, processes: Processes) -> None:
    end = time.monotonic() + START_S
    while True:
        for child in processes.children.values():
            if child.exit_code() is not None:
                raise RuntimeError(f"{child.name} ended: {explain_log(child.log)}")
        try:
            made.kubectl("get", "--raw", "/readyz")
        except (Refused, subprocess.TimeoutExpired) as error:
            if time.monotonic() > end:
                raise RuntimeError(f"no API server within {START_S:.0f} s: {error}") from error
            time.sleep(0.2)
        else:
            return


def _access(server: str, token: str) -> Tree:
    """A kubeconfig. The server makes its certificate itself, on loopback: nobody checks it."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "clusters": [{"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": token}}],
    }


def _write(file: Path, text: str) -> None:
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")
