"""Who may do what in Redis: a user for each role of a run, as an access control list. Pure.

Invariant: a role writes no key that its own transitions do not write. Redis checks every command of a script against
the rights of whoever calls it, so what a role may do is a matter of keys, whichever script it sends: the policy is
written by trainer and monitor alone, versions, steps and commits by the trainer, the registry of engines by
weight-sync and engines. Nobody may flush, configure or look into what is not of a run. docs/deploy/threat-model.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, get_args

from broker.errors import BrokerError

Role = Literal["worker", "trainer", "weight-sync", "engine", "monitor", "evaluator", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
# Nobody can sign in as it, but it keeps all rights: Redis 7.0 loads its append-only file as the default user, and would
# drop every transaction in it that this user may not run.
DEFAULT = "user default off resetpass ~* &* +@all"
CHECK = "check"  # a user without a password that may only PING: for health checks of the server

# What a snapshot shows is read by all: none of it is a secret among the processes of a run.
SHOWN = (
    *("policy", "cursor", "ledger", "counters", "events", "metrics", "evaluations", "evaluator"),
    *("ready_hist", "lag_hist", "by_hist", "wait_hist", "engines", "versions", "workers"),
    *("generating", "admitted_hist", "ready", "waiting", "waiting:*", "leased", "trained", "dead", "dead_order"),
)
# What the life of a group up to the queue changes (broker/lua/common.lua).
GROUPS = (
    *("ledger", "counters", "events", "group:*", "payload:*", "generating", "admitted_hist", "ready", "waiting"),
    *("waiting:*", "retained", "open", "reissue", "tries", "dead", "dead_order", "ready_hist", "by_hist", "freed"),
)
READ = (
    *("get", "mget", "pttl", "hget", "hmget", "hgetall", "hexists", "hkeys", "hvals", "hlen", "llen", "lrange"),
    *("zcard", "zcount", "zscore", "zrange", "zrevrange", "zrangebyscore", "time"),
)
WRITE = (
    *("set", "mset", "rename", "persist", "del", "unlink", "hset", "hdel", "hincrby", "hincrbyfloat"),
    *("lpush", "rpush", "lpop", "ltrim", "zadd", "zrem", "zpopmin", "publish"),
)
CONNECTION = ("ping", "select", "evalsha", "script|load", "subscribe", "unsubscribe")


@dataclass(frozen=True, slots=True)
class Rights:
    """writes, reads: names of keys, reading being part of writing. commands: beyond those of every role."""

    writes: tuple[str, ...]
    reads: tuple[str, ...] = SHOWN
    commands: tuple[str, ...] = ()


RIGHTS: Mapping[Role, Rights] = {
    "worker": Rights((*GROUPS, "staged:*", "cursor", "workers", "workers_seen", "pass_rates")),
    "trainer": Rights(
        (
            *(*GROUPS, "policy", "cursor", "versions", "leased", "trained", "step_lags"),
            *("lag_hist", "wait_hist", "metrics"),
        )
    ),
    "weight-sync": Rights(("engines", "events", "counters", "holder:*")),
    "engine": Rights(("engines", "events", "counters")),
    "monitor": Rights(
        ("policy", "evaluator", "events", "counters", "dead", "dead_order", "open", "reissue", "tries"),
        (*SHOWN, "group:*"),
    ),
    "evaluator": Rights(("evaluator", "evaluations", "events", "counters")),
    "operator": Rights(
        ("*",),
        commands=(
            *("scan", "type", "exists", "strlen", "memory|usage", "info", "client|list", "slowlog|get"),
            *("script|kill", "acl|load", "acl|log", "bgsave", "lastsave", "sync", "psync", "replconf"),
        ),
    ),
}


class BadPassword(BrokerError):
    """A password cannot be one; the message says whose."""


def users(passwords: Mapping[Role, str], run: str = "*") -> str:
    """Redis' ACL file: the users of `passwords`, one that may only PING, and the default user switched off.

    run: the run whose keys they are, "*": of every run of the server. Only digests of the passwords are in it.
    """
    lines = [_line(role, password, f"lagrange:{{{run}}}:") for role, password in passwords.items()]
    return "\n".join((DEFAULT, f"user {CHECK} on nopass -@all +ping", *lines)) + "\n"


def _line(role: Role, password: str, prefix: str) -> str:
    if len(password) < 16:
        raise BadPassword(f"the password of {role} has {len(password)} characters. Make one of 16 or more.")
    rights = RIGHTS[role]
    reads = [name for name in rights.reads if name not in rights.writes]
    words = [
        *("user", role, "on", f"#{sha256(password.encode()).hexdigest()}"),
        *("resetchannels", f"&{prefix}changes", f"&{prefix}batches"),
        *(f"~{prefix}{name}" for name in ("", *rights.writes)),
        *(f"%R~{prefix}{name}" for name in reads),
        *("-@all", *(f"+{command}" for command in (*CONNECTION, *READ, *WRITE, *rights.commands))),
    ]
    return " ".join(words)
