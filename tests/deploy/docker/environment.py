"""A Docker engine of the test's own, and the images, without a registry and without touching the machine's network.

    python -m tests.deploy.docker.environment up FOLDER      engine, base image, wheels, images; prints DOCKER_HOST
    python -m tests.deploy.docker.environment down FOLDER    containers, engine and folder are gone

Invariant: dockerd runs in a mount and a network namespace of its own, keeps everything under FOLDER, and is stopped by
its process id. Needs root, and Debian's packages docker.io, iptables, redis-server, python3-venv, libnuma1, libgomp1.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.deploy.docker.base_image import write_base

ROOT = Path(__file__).parents[3]
BASE = "localhost/lagrange-base:test"
REDIS = "localhost/lagrange-redis:test"
IMAGES = {name: f"lagrange/{name}:test" for name in ("service", "trainer", "engine")}
NEEDED = {"dockerd": "docker.io", "iptables": "iptables", "redis-server": "redis-server"}
OWN_NAMESPACES = ("unshare", "--mount", "--net", "--propagation", "private")
START = (
    "ip link set lo up 2>/dev/null; echo $$ > {0}/ns.pid; exec dockerd --data-root {0}/data --exec-root {0}/exec "
    "--pidfile {0}/docker.pid -H unix://{0}/docker.sock --storage-driver overlay2 --ip6tables=false "
    "--log-opt max-size=5m --log-opt max-file=2"
)
UNPINNED = (
    ("torch==2.13.0",),
    ("--no-deps", "torchvision==0.28.0", "sglang==0.5.23"),
    ("--no-deps", "--ignore-requires-python", "megatron-core==0.19.2"),
)


def missing() -> list[str]:
    """Debian packages that have to be installed first."""
    where = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [package for program, package in NEEDED.items() if shutil.which(program, path=where) is None]


def socket_of(folder: Path) -> str:
    """DOCKER_HOST of the engine in `folder`."""
    return f"unix://{folder}/docker.sock"


def docker(folder: Path, *words: str | Path, timeout_s: float = 600, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run `docker` against the engine in `folder`. Raises CalledProcessError with its output."""
    environment = {**os.environ, "DOCKER_HOST": socket_of(folder), "DOCKER_BUILDKIT": "0"}
    command = ["docker", *(str(word) for word in words)]
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
        **more,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done


def start_engine(folder: Path) -> None:
    """Start dockerd; does nothing if it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    if answers(folder):
        return
    for stale in ("docker.pid", "docker.sock"):
        (folder / stale).unlink(missing_ok=True)
    with (folder / "dockerd.log").open("ab") as log:
        subprocess.run(  # which forks: the engine outlives this process, and is nobody's child here
            ["setsid", "--fork", *OWN_NAMESPACES, "bash", "-c", START.format(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"},
            check=True,
            timeout=10,
        )
    end = time.monotonic() + 60
    while not answers(folder):
        if time.monotonic() > end:
            raise RuntimeError(f"dockerd did not come up: {(folder / 'dockerd.log').read_text()[-2000:]}")
        time.sleep(0.2)


def answers(folder: Path) -> bool:
    """Whether the engine in `folder` is there."""
    ask = ["curl", "-fsS", "-m", "2", "--unix-socket", f"{folder}/docker.sock", "http://d/_ping"]
    return subprocess.run(ask, capture_output=True, check=False, timeout=10).returncode == 0


def stop_engine(folder: Path) -> None:
    """End dockerd, its containers and its containerd, and remove the folder's data."""
    file = folder / "ns.pid"
    if file.exists():
        pid = int(file.read_text())
        if _name(pid) == "dockerd":
            os.kill(pid, signal.SIGTERM)
            end = time.monotonic() + 60
            while _name(pid) == "dockerd" and time.monotonic() < end:
                time.sleep(0.2)
            if _name(pid) == "dockerd":
                raise RuntimeError(f"dockerd {pid} still runs after a minute")
    for part in ("data", "exec"):
        shutil.rmtree(folder / part, ignore_errors=True)


def _name(pid: int) -> str:
    """Name of a living process; a zombie counts as gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1]
        return "" if state.startswith("Z") else Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, IndexError):
        return ""


def make_base(folder: Path) -> None:
    """Import the base image from this machine's packages, and Redis on it."""
    done = docker(folder, "images", "-q", BASE).stdout.strip()
    if not done:
        tar = folder / "base.tar"
        with tar.open("wb") as out:
            write_base(out)
        docker(folder, "import", "-c", 'CMD ["python3"]', tar, BASE)
        tar.unlink()
    text = (
        f"FROM {BASE}\nRUN groupadd -r -g 999 redis && useradd -r -u 999 -g 999 redis && mkdir -p /data && "
        'chown 999:999 /data\nVOLUME /data\nCMD ["redis-server"]\n'
    )
    docker(folder, "build", "-q", "-t", REDIS, "-", input=text)


def fetch_wheels(folder: Path) -> Path:
    """All wheels of the images, resolved by the Python that the base image has; fetched once."""
    wheels, done = folder / "wheels", folder / "wheels" / ".complete"
    if done.exists():
        return wheels
    wheels.mkdir(parents=True, exist_ok=True)
    subprocess.run(["/usr/bin/python3", "-m", "venv", folder / "fetch"], check=True, timeout=120)
    pip: list[str | Path] = [folder / "fetch/bin/pip", "download", "--quiet", "--dest", wheels]
    for name in ("base", "trainer", "traces", "sglang"):
        subprocess.run([*pip, "-r", ROOT / f"requirements/{name}.txt"], check=True, timeout=1800)
    for words in UNPINNED:
        subprocess.run([*pip, *words], check=True, timeout=1800)
    done.touch()
    return wheels


def copy_context(folder: Path) -> Path:
    """The build context: the repository's files as they were committed last, and the wheels."""
    wheels, context = fetch_wheels(folder), folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir()
    archive = folder / "context.tar"
    subprocess.run(["git", "archive", "--output", archive, "HEAD"], cwd=ROOT, check=True, timeout=60)
    subprocess.run(["tar", "-xf", archive, "-C", context], check=True, timeout=60)
    archive.unlink()
    for wheel in wheels.glob("*.whl"):
        os.link(wheel, context / "deploy/docker/wheels" / wheel.name)
    return context


def build(folder: Path) -> None:
    """Build our images offline."""
    context = copy_context(folder)
    for name, image in IMAGES.items():
        arguments = ("--build-arg", f"BASE_IMAGE={BASE}", "--build-arg", "PIP_NO_INDEX=1", "-t", image)
        file = context / "deploy/docker" / f"{name}.Dockerfile"
        docker(folder, "build", *arguments, "-f", file, context, timeout_s=1800)


def main(action: str, where: str) -> int:
    """See the module."""
    folder = Path(where).absolute()
    if action == "down":
        stop_engine(folder)
        return 0
    if lacking := missing():
        sys.stderr.write(f"apt-get install --no-install-recommends {' '.join(lacking)}\n")
        return 2
    began = time.monotonic()
    for step in (start_engine, make_base, fetch_wheels, build):
        step(folder)
        sys.stdout.write(f"{time.monotonic() - began:5.0f} s  {step.__name__}\n")
        sys.stdout.flush()
    sys.stdout.write(f"DOCKER_HOST={socket_of(folder)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
