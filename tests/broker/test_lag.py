"""The rules of the bound, without Redis: no waste while leases hold, and never a token beyond the bound."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from broker import lag


def simulate(data: st.DataObject, *, steps: int, wait_for_stragglers: bool) -> tuple[int, int, list[int]]:
    """Admissions, submissions in any order and steps, at random; engines serve the last published version.

    Returns groups gone stale, deadlines of lemma 2 that were broken, and the lags that were trained.
    """
    groups_per_step, interval = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    max_lag = data.draw(st.integers(interval - 1, interval + 3))
    version = engine = stale = broken = 0
    generating: list[int] = []
    ready: list[tuple[int, int]] = []
    lags: list[int] = []
    for serial in range(steps):
        what = data.draw(st.sampled_from(["admit", "admit", "submit", "submit", "pull", "load"]))
        in_flight = len(generating) + len(ready)
        if what == "admit" and not lag.why_not_admit(
            version=version,
            in_flight=in_flight,
            engine_version=engine,
            max_lag=max_lag,
            groups_per_step=groups_per_step,
            steps_left=10**9,
        ):
            generating.append(engine)
        elif what == "submit" and generating:
            admitted = generating.pop(data.draw(st.integers(0, len(generating) - 1)))
            ready.append((serial, data.draw(st.integers(admitted, engine))))
        elif what == "load":
            engine = version - version % interval
        elif what == "pull":
            stale += sum(lag.is_stale(oldest, version, max_lag) for _, oldest in ready)
            ready = [(i, o) for i, o in ready if not lag.is_stale(o, version, max_lag)]
            late = lag.straggler_deadline(
                version=version,
                ready=[o for _, o in ready],
                generating=generating,
                max_lag=max_lag,
                groups=groups_per_step,
                groups_per_step=groups_per_step,
            )
            if len(ready) >= groups_per_step and not (wait_for_stragglers and late is not None):
                batch = set(lag.choose_batch(ready, groups_per_step))
                lags += [version - oldest for i, oldest in ready if i in batch]
                ready = [(i, o) for i, o in ready if i not in batch]
                version += 1
        due = [lag.deadline(o, max_lag) for o in (*generating, *(o for _, o in ready))]
        broken += lag.slack(due, version, groups_per_step) < 0
    assert all(0 <= x <= max_lag for x in lags)
    return stale, broken, lags


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_group_goes_stale_while_leases_hold_and_the_trainer_waits_for_stragglers(data: st.DataObject) -> None:
    stale, broken, _ = simulate(data, steps=100, wait_for_stragglers=True)
    assert (stale, broken) == (0, 0)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_the_bound_holds_without_waiting_too(data: st.DataObject) -> None:
    simulate(data, steps=100, wait_for_stragglers=False)


def test_waiting_is_what_prevents_waste() -> None:
    # max_lag 1, one group a step: a slow group of version 0 at version 1 must be trained now
    assert lag.straggler_deadline(version=1, ready=[1], generating=[0], max_lag=1, groups=1, groups_per_step=1) == 1
    assert lag.straggler_deadline(version=1, ready=[0], generating=[0], max_lag=1, groups=1, groups_per_step=1) is None
    assert lag.straggler_deadline(version=0, ready=[0], generating=[0], max_lag=1, groups=1, groups_per_step=1) is None


def test_nobody_waits_for_what_is_too_late_already() -> None:
    assert lag.straggler_deadline(version=5, ready=[5], generating=[0], max_lag=1, groups=1, groups_per_step=1) is None


def test_a_bound_of_zero_admits_one_batch_of_the_newest_version() -> None:
    def why(in_flight: int, engine: int) -> str | None:
        return lag.why_not_admit(
            version=3, in_flight=in_flight, engine_version=engine, max_lag=0, groups_per_step=2, steps_left=9
        )

    assert [why(0, 3), why(1, 3), why(2, 3), why(0, 2)] == [None, None, "bound", "deadline"]
