"""How a process that we start finds our packages.

Invariant: it finds them wherever they are, without a look into the current folder: whoever starts it keeps that out
(`python -P`, PYTHONSAFEPATH), so that no file there takes the place of a module.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def module_path() -> dict[str, str]:
    """The PYTHONPATH of such a process: ours, after the place of our packages if they are not installed."""
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))  # an empty one is the current folder
    try:
        metadata.distribution("lagrange-rl")
    except metadata.PackageNotFoundError:
        paths.insert(0, str(ROOT))
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} if paths else {}
