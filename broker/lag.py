"""The rules of the lag bound as pure functions; docs/lag-bound.md proves what they guarantee.

Invariant: broker/lua decides exactly as these functions do (tests/broker holds the two against each other).
Notation: v = the trainer's version, B = groups per step, n = groups in flight (generating, ready or leased),
e = version of the engine that will sample, D = deadline of a group: the last version at which it may be trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def deadline(oldest_version: int, max_lag: int) -> int:
    """Last trainer version at which a group whose oldest token is of `oldest_version` may be trained."""
    return oldest_version + max_lag


def is_stale(oldest_version: int, version: int, max_lag: int) -> bool:
    """Whether training the group at `version` would exceed the bound."""
    return version - oldest_version > max_lag


def why_not_admit(
    *, version: int, in_flight: int, engine_version: int, max_lag: int, groups_per_step: int, steps_left: int
) -> str | None:
    """Rule A. None if a group may be started; else which limit holds: "bound", "deadline" or "end".

    n < (max_lag + 1) B bounds the work in flight; v + floor(n / B) - e <= max_lag says that even if everything in
    flight is trained first, this group is trained in time; n < steps_left B starts nothing that no step will need.
    """
    if in_flight >= (max_lag + 1) * groups_per_step:
        return "bound"
    if version + in_flight // groups_per_step - engine_version > max_lag:
        return "deadline"
    if in_flight >= steps_left * groups_per_step:
        return "end"
    return None


def choose_batch(ready: Iterable[tuple[int, int]], groups: int) -> list[int]:
    """Rule P, order: ids of the `groups` ready groups with the earliest deadline. ready: (group id, oldest version)."""
    return [group_id for group_id, _ in sorted(ready, key=lambda item: (item[1], item[0]))[:groups]]


def straggler_deadline(
    *, version: int, ready: Sequence[int], generating: Sequence[int], max_lag: int, groups: int, groups_per_step: int
) -> int | None:
    """Rule P, waiting: the first deadline D that pulling now would break, or None.

    ready: oldest versions of ready groups, none stale. generating: versions at admission of groups being generated.
    D breaks if more than (D - v) B groups due by D are still generating, which is all that the steps after this one can
    train by D, while this batch would take groups due after D. Groups whose deadline has passed are not waited for.
    """
    for due in range(version, version + max_lag + 2):
        room = (due - version) * groups_per_step
        if len(generating) <= room:
            return None
        late = sum(version <= deadline(e, max_lag) <= due for e in generating)
        if late > room and sum(deadline(o, max_lag) <= due for o in ready) < groups:
            return due
    return None


def slack(deadlines: Iterable[int], version: int, groups_per_step: int) -> int:
    """Smallest (D - v + 1) B - N(D) over all D >= v, N(D) = groups in flight with deadline <= D; B without groups.

    Lemma 2: never negative while nothing but admissions and steps happened.
    """
    due = sorted(deadlines)
    least = groups_per_step
    for count, at in enumerate(due, start=1):
        least = min(least, (max(at, version) - version + 1) * groups_per_step - count)
    return least
