"""The programs and files that the deployment tests share.

Invariant: a program that a pinned development package brings is required; one that only a system package brings
(promtool, prometheus) is asked for with a skip that says how to install it.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = tuple(sorted(path.name for path in (DEPLOY / "kubernetes" / "overlays").iterdir()))
CONFIGS = tuple(
    sorted(path.name for path in (DEPLOY / "configs").iterdir() if path.is_dir() and path.name != "__pycache__")
)
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
GPU_ENVIRONMENT = {
    "LAGRANGE_CONFIG": str(DEPLOY / "configs/qwen3-30b-a3b/config.yaml"),
    "LAGRANGE_ASSETS": "/data/rl",
    "LAGRANGE_TRAINER_GPU_BASE": "base:gpu",
}
Tree = dict[str, Any]


def free_ports(number: int) -> list[int]:
    """Ports of the loopback address, all different, that nobody has at the moment."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def program(name: str) -> str:
    """A program of a package in requirements/dev.txt."""
    path = Path(sys.executable).with_name(name)
    found = str(path) if path.exists() else shutil.which(name)
    assert found, f"{name} is missing: pip install -r requirements/dev.txt"
    return found


def system_program(name: str) -> str:
    """A program of Debian's package prometheus, else skip."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install --no-install-recommends prometheus)")
    return found


def run(*command: str | Path, environment: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Standard output of a command that must succeed within a minute."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **(environment or {})},
        check=False,
    )
    assert done.returncode == 0, f"{command[0]}: {done.stderr[-3000:]}{done.stdout[-3000:]}"
    return done.stdout


@cache
def compose(gpu: bool = False) -> Tree:
    """The resolved compose model, with the observing profile."""
    files = ["-f", "deploy/docker-compose.yml", *(["-f", "deploy/compose.gpu.yaml"] if gpu else [])]
    command = [program("docker-compose"), *files, "--profile", "observe", "config", "--format", "json"]
    tree: Tree = json.loads(run(*command, environment=GPU_ENVIRONMENT if gpu else None))
    return tree


@cache
def manifests(overlay: str) -> tuple[Tree, ...]:
    """The objects that an overlay makes."""
    text = run(program("kubectl"), "kustomize", f"deploy/kubernetes/overlays/{overlay}")
    return tuple(yaml.safe_load_all(text))


def deploy_config(name: str) -> Tree:
    """A configuration of deploy/configs as it is written."""
    tree: Tree = yaml.safe_load((DEPLOY / "configs" / name / "config.yaml").read_text(encoding="utf-8"))
    return tree


def pod_templates(objects: tuple[Tree, ...]) -> list[tuple[str, Tree]]:
    """(name of the object, pod template) of everything that makes pods, RayJobs included."""
    found = []
    for item in objects:
        spec = item.get("spec", {})
        if item["kind"] in ("Deployment", "StatefulSet", "Job"):
            found.append((item["metadata"]["name"], spec["template"]))
        elif item["kind"] == "RayJob":
            cluster = spec["rayClusterSpec"]
            found += [
                (item["metadata"]["name"], group["template"])
                for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
            ]
    return found


def seconds(duration: str) -> float:
    """ "2m0s" as 120."""
    minutes, _, rest = duration.rpartition("m")
    return 60.0 * float(minutes or 0) + float(rest.removesuffix("s") or 0)


def containers(template: Tree) -> list[Tree]:
    """All containers of a pod template, those that run first included."""
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]
