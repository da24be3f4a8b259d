"""Loads the Lua transitions of broker/lua.

Invariant: the text of a script is fixed by the package's files: common.lua, then a function of fence.lua (transitions
of the trainer) and the transition, then what it noted is written. Two transitions make one script, as "step+pull": the
second sees what the first did, and both together are one atomic change. Scripts may run at the memory limit (they free
memory or write a few bytes), `admit` may not.
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
TOGETHER = ("submit+admit", "step+pull")
PARTS = frozenset({"common", "fence", "both"})  # of scripts


@cache
def script(name: str) -> str:
    """Full text of the transition `name`, or of two of them with a + between, with its shebang line (Redis 7.0)."""
    if name in STANDALONE:
        return f"#!lua{FLAGS[name]}\n{_file(name)}"
    parts = name.split("+")
    flags = "" if any(FLAGS.get(part) == "" for part in parts) else FLAGS.get(name, " flags=allow-oom")
    functions = "\n".join(_function(to, part) for to, part in zip(("first", "second"), parts, strict=False))
    end = _file("both") if len(parts) == 2 else "local answer = first(ARGV)\nflush()\nreturn answer"
    return f"#!lua{flags}\n{_file('common')}\n{functions}\n{end}"


def _function(name: str, transition: str) -> str:
    fence = _file("fence") if transition in FENCED else ""
    return f"local function {name}(ARGV)\n{fence}\n{_file(transition)}\nend"


def _file(name: str) -> str:
    return (FOLDER / f"{name}.lua").read_text(encoding="utf-8")


@cache
def digest(name: str) -> str:
    """By which EVALSHA knows the transition."""
    return sha1(script(name).encode(), usedforsecurity=False).hexdigest()


def names() -> tuple[str, ...]:
    """All scripts, in alphabetical order."""
    single = (path.stem for path in FOLDER.glob("*.lua") if path.stem not in PARTS)
    return tuple(sorted((*single, *TOGETHER)))
