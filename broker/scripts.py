"""Loads the Lua transitions of broker/lua.

Invariant: the text of a script is fixed at import of the package's files: common.lua, then fence.lua for transitions of
the trainer, then the transition. Scripts may run at the memory limit (they free memory or write a few bytes), `admit`
may not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "lua"
STANDALONE = frozenset({"initialise"})
FENCED = frozenset({"pull", "reject", "step", "commit", "name_version", "publish", "renew_trainer", "return_leased"})
FLAGS = {"admit": "", "initialise": "", "snapshot": " flags=no-writes"}


@cache
def script(name: str) -> str:
    """Full text of the transition `name`, with its shebang line (Redis 7.0)."""
    parts = [] if name in STANDALONE else ["common"]
    if name in FENCED:
        parts.append("fence")
    text = "\n".join((FOLDER / f"{part}.lua").read_text(encoding="utf-8") for part in (*parts, name))
    return f"#!lua{FLAGS.get(name, ' flags=allow-oom')}\n{text}"


def names() -> tuple[str, ...]:
    """All transitions, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.lua") if path.stem not in ("common", "fence")))
