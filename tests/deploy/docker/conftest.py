"""One Docker engine with our images for all drills of a session."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.docker import environment as env
from tests.deploy.docker.system import KEEP, say


@pytest.fixture(scope="session")
def docker_folder() -> Iterator[Path]:
    """Folder of an engine that runs and has the images; DRILLS_FOLDER, DRILLS_BUILD and DRILLS_KEEP: see drills.py."""
    if lacking := env.missing():
        pytest.skip(f"apt-get install --no-install-recommends {' '.join(lacking)}")
    if os.geteuid() != 0:
        pytest.skip("a Docker engine in its own namespaces needs root")
    folder = Path(os.environ.get("DRILLS_FOLDER", "/tmp/lagrange-docker"))
    made = () if os.environ.get("DRILLS_BUILD") == "0" else (env.make_base, env.fetch_wheels, env.build)
    try:
        for step in (env.start_engine, *made):
            began = time.monotonic()
            step(folder)
            say(f"{step.__name__}: {time.monotonic() - began:.0f} s")
        yield folder
    finally:
        if not KEEP:
            env.stop_engine(folder)
            shutil.rmtree(folder / "context", ignore_errors=True)
