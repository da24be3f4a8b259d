"""The life cycle of one engine as a pure state machine: what happened goes in, the next state and command come out.

Invariants (held for every order of events by tests/weight_sync/test_lifecycle.py):
- SERVING means that the last load that was sent was verified afterwards: weights' name and checksum read back.
- Whatever is not known to have succeeded counts as the worse outcome: the confirmed version is dropped and a full load
  follows.
- `maybe_paused` is set before a pause is sent and cleared only by a continue that was confirmed; while it is set, the
  next command that can be given is Continue, unless the engine is on its way to a load.
- A pause lasts for the load alone, and a load that the engine carries out under its own lock has none; what runs from
  then until Verify has ended carries no version.
- Newest wins: the version to load is chosen when the way to it begins, never queued.
- What a load brings is called `unverified-N` by the engine until Verify has read it back; only then it gets the name N.
  The engine stamps each token with the name, so a token of weights that nobody verified can never pass for one of N.

    joining --> loading ----> verifying --> serving --> (pausing) --> updating --> verifying --> serving
                   \\______________\\____________\\____________\\___________/
                                  quarantined <-> gone      (any failure; back to loading after a wait)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from broker.types import EngineRecord, EngineState


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits. drain: let running requests end before a load (else abort them). locked: a load is one request, which the
    engine carries out under its own lock, so that it need not be paused. tries: failed tries in a row before the waits
    begin. back_off_s, back_off_max_s: those waits, doubled each time. misses: probes without an answer that make an
    engine unusable (a refused connection does at once). gone_after_s: silence after which it is gone."""

    drain: bool = True
    locked: bool = True
    tries: int = 3
    back_off_s: float = 1.0
    back_off_max_s: float = 30.0
    misses: int = 3
    gone_after_s: float = 30.0
    join_patience_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Life:
    """What weight-sync knows of one engine. version: the confirmed one, -1: none. target: the version of the last load.
    verified: false for a SERVING engine that a predecessor of this process confirmed, until it was read back again.
    failures: loads in a row that failed. Times are seconds of a monotonic clock."""

    state: EngineState
    version: int = -1
    checksum: str = ""
    detail: str = ""
    target: int = -1
    verified: bool = True
    maybe_paused: bool = False
    failures: int = 0
    misses: int = 0
    silent_since: float | None = None
    retry_at: float = 0.0


# --- commands


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the engine what it serves."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Hold new requests back and abort running ones. drain: give those time to end first."""

    drain: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Load this version, flush the cache. drain: let running requests end first, else they are aborted."""

    version: int
    drain: bool = False


@dataclass(frozen=True, slots=True)
class Verify:
    """Read back name and checksum of the weights, then give them the version's name."""

    version: int


@dataclass(frozen=True, slots=True)
class Continue:
    """Let it answer requests again."""


Command = Probe | Pause | Load | Verify | Continue

# --- events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time to look at the engine."""


@dataclass(frozen=True, slots=True)
class Newer:
    """A newer version was staged: an engine that serves needs no look before it is updated."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The probe was answered. weights: the engine's name of what it serves; paused: it says so (None: unknown)."""

    weights: str
    paused: bool | None = None


@dataclass(frozen=True, slots=True)
class Silent:
    """The probe was not answered. refused: nobody listens there. expired: its supervisor is silent, too."""

    refused: bool = False
    expired: bool = False


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The last command is known to have been carried out. checksum: what Verify read."""

    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last command failed, or nobody knows whether it did."""

    detail: str


@dataclass(frozen=True, slots=True)
class Rejoined:
    """Its supervisor registered it again: another process, with weights that nobody confirmed."""


Event = Tick | Newer | Answered | Silent | Succeeded | Failed | Rejoined


def takeover(record: EngineRecord, now: float) -> Life:
    """What a weight-sync process that just started believes of a registered engine.

    A SERVING engine was confirmed and stays so until it is read back at the first look; one that was half-way may be
    paused and may have any weights.
    """
    if record.state is EngineState.SERVING and record.version >= 0:
        return Life(record.state, record.version, record.checksum, record.detail, record.version, verified=False)
    if record.state is EngineState.JOINING:
        return Life(record.state)
    if record.state is EngineState.GONE:
        return Life(record.state, maybe_paused=True, silent_since=now)
    return Life(EngineState.QUARANTINED, detail=f"found {record.state} at start-up", maybe_paused=True, retry_at=now)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a step depends on besides the engine. now: seconds. wanted: the version to bring it to now, if any."""

    policy: Policy
    now: float
    wanted: int | None


def step(  # noqa: PLR0911 - one line for each pair of command and event reads best
    life: Life, event: Event, at: Moment, last: Command | None = None
) -> tuple[Life, Command | None]:
    """The next state, and the command to carry out in it (None: wait for the next tick).

    last: the command that `event` answers. The caller makes the new state visible in the registry before it carries the
    command out.
    """
    match event, last:
        case Rejoined(), _:
            joined = Life(EngineState.JOINING, maybe_paused=life.maybe_paused, detail="registered again")
            return joined, Continue() if life.maybe_paused else None
        case Newer(), _ if _may_update(life, at):
            return _begin(life, at, at.wanted)
        case Tick() | Newer(), _:
            return life, Probe()
        case Silent(), _:
            return _silent(life, event, at), None
        case Answered(), _:
            return _answered(life, event, at)
        case Succeeded(), Pause():
            return _load(life, drain=False)
        case Succeeded(), Load():
            life = replace(life, state=EngineState.VERIFYING)
            return life, Continue() if life.maybe_paused else Verify(life.target)
        case _, Verify():
            return _verified(life, event, at)
        case _, Continue():
            return _continued(life, event, at)
    return _fail(life, _detail(event), at)


def _silent(life: Life, event: Silent, at: Moment) -> Life:
    since = at.now if life.silent_since is None else life.silent_since
    life = replace(life, misses=life.misses + 1, silent_since=since)
    lost = event.refused or life.misses >= at.policy.misses
    if life.state is EngineState.SERVING and lost:
        what = "refuses connections" if event.refused else f"did not answer {life.misses} probes"
        return replace(
            life,
            state=EngineState.QUARANTINED,
            version=-1,
            checksum="",
            detail=what,
            retry_at=at.now,
            maybe_paused=True,
        )
    patience = at.policy.join_patience_s if life.state is EngineState.JOINING else at.policy.gone_after_s
    over = event.expired or at.now - since >= patience
    if life.state in (EngineState.QUARANTINED, EngineState.JOINING) and over:
        return replace(life, state=EngineState.GONE, version=-1, detail=f"silent for {at.now - since:.0f} s")
    return life


def _answered(life: Life, event: Answered, at: Moment) -> tuple[Life, Command | None]:
    life = replace(life, misses=0, silent_since=None)
    if life.state is EngineState.GONE:
        life = replace(life, state=EngineState.JOINING, version=-1, failures=0, retry_at=at.now, detail="answers again")
    if life.maybe_paused or event.paused:
        return replace(life, maybe_paused=True), Continue()
    if life.state is EngineState.SERVING:
        if event.weights != str(life.version):
            what = f"serves {event.weights[:80]!r} instead of {life.version}"
            life = replace(
                life, state=EngineState.QUARANTINED, version=-1, checksum="", detail=what, retry_at=at.now, failures=0
            )
        elif not life.verified:
            return life, Verify(life.version)
        elif _may_update(life, at):
            return _begin(life, at, at.wanted)
        else:
            return life, None
    if at.wanted is None or not _due(life, at, at.wanted):
        return life, None
    return _begin(replace(life, state=EngineState.LOADING, version=-1, checksum=""), at, at.wanted)


def _may_update(life: Life, at: Moment) -> bool:
    serves = life.state is EngineState.SERVING and life.verified and not life.maybe_paused
    return serves and at.wanted is not None and at.wanted > life.version


def _due(life: Life, at: Moment, wanted: int) -> bool:
    if life.state is EngineState.JOINING or at.now >= life.retry_at:
        return True
    quarantined_at = life.retry_at - _back_off(life.failures, at.policy)
    return wanted > life.target and at.now >= quarantined_at + at.policy.back_off_s


def _begin(life: Life, at: Moment, wanted: int | None) -> tuple[Life, Command]:
    life = replace(life, target=-1 if wanted is None else wanted)
    if at.policy.locked:
        return _load(life, at.policy.drain)
    state = EngineState.PAUSING if life.state is EngineState.SERVING else life.state
    return replace(life, state=state, maybe_paused=True, detail=f"pausing for version {wanted}"), Pause(at.policy.drain)


def _load(life: Life, drain: bool) -> tuple[Life, Command]:
    serves = life.state in (EngineState.SERVING, EngineState.PAUSING)
    state = EngineState.UPDATING if serves else EngineState.LOADING
    what = "draining, then loading" if drain else "loading"
    return replace(life, state=state, detail=f"{what} version {life.target}"), Load(life.target, drain)


def _verified(life: Life, event: Event, at: Moment) -> tuple[Life, Command | None]:
    if not isinstance(event, Succeeded):
        return _fail(life, _detail(event), at)
    return _serve(replace(life, checksum=event.checksum, verified=True)), None


def _continued(life: Life, event: Event, at: Moment) -> tuple[Life, Command | None]:
    if isinstance(event, Succeeded):
        life = replace(life, maybe_paused=False)
        return life, Verify(life.target) if life.state is EngineState.VERIFYING else None
    if life.state in (EngineState.JOINING, EngineState.GONE):
        return life, None
    return _quarantine(life, _detail(event), at), None


def _serve(life: Life) -> Life:
    return replace(life, state=EngineState.SERVING, version=life.target, detail="", failures=0, misses=0, retry_at=0.0)


def _fail(life: Life, detail: str, at: Moment) -> tuple[Life, Command | None]:
    """A step on the way to a version failed: not routable, continue if it may be paused, and try again later."""
    life = _quarantine(life, detail, at)
    return life, Continue() if life.maybe_paused else None


def _quarantine(life: Life, detail: str, at: Moment) -> Life:
    failures = life.failures + 1
    return replace(
        life,
        state=EngineState.QUARANTINED,
        version=-1,
        checksum="",
        verified=True,
        failures=failures,
        detail=detail[:300],
        retry_at=at.now + _back_off(failures, at.policy),
    )


def _back_off(failures: int, policy: Policy) -> float:
    """Seconds until the next try after this many failures in a row: none while tries remain, then doubling."""
    if failures < policy.tries:
        return 0.0
    return float(min(policy.back_off_max_s, policy.back_off_s * 2.0 ** min(failures - policy.tries, 30)))


def _detail(event: Event) -> str:
    return event.detail if isinstance(event, Failed) else f"unexpected {type(event).__name__}"
