"""Loads the Lua transitions of broker/lua.

Invariant: the text of a script is fixed by the package's files: common.lua, then a function of fence.lua (transitions
of the trainer) and the transition, then what it noted is written. Scripts may run at the memory limit (they free memory
or write a few bytes), `admit` may not.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path

FOLDER = Path(__file__).parent / "lua"
STANDALONE = frozenset({"initialise"})
FENCED = frozenset(
    {"pull", "reject", "step", "cursor", "commit", "name_version", "publish", "renew_trainer", "return_leased"}
)
FLAGS = {"admit": "", "initialise": "", **dict.fromkeys(("snapshot", "groups", "cursor"), " flags=no-writes")}


@cache
def script(name: str) -> str:
    """Full text of the transition `name`, with its shebang line (Redis 7.0)."""
    parts = ["fence"] if name in FENCED else []
    if name in STANDALONE:
        text = (FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    else:
        common = (FOLDER / "common.lua").read_text(encoding="utf-8")
        body = "\n".join((FOLDER / f"{part}.lua").read_text(encoding="utf-8") for part in (*parts, name))
        text = (
            f"{common}\nlocal function transition()\n{body}\nend\nlocal answer = transition()\nflush()\nreturn answer"
        )
    return f"#!lua{FLAGS.get(name, ' flags=allow-oom')}\n{text}"


@cache
def digest(name: str) -> str:
    """By which EVALSHA knows the transition."""
    return sha1(script(name).encode(), usedforsecurity=False).hexdigest()


def names() -> tuple[str, ...]:
    """All transitions, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.lua") if path.stem not in ("common", "fence")))
