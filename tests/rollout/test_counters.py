"""What a worker counts, and how often its log is told of what fails."""

from __future__ import annotations

from broker.types import NEWEST
from rollout.counters import TELL_EVERY_S, Counters
from rollout.sampling import PROBLEM, told_on


def test_a_failure_is_told_at_once_and_then_once_in_a_while_with_how_many_there_were() -> None:
    now = 0.0
    counters = Counters(clock=lambda: now)
    told = []
    for second in range(round(2.5 * TELL_EVERY_S)):
        now = float(second)
        told.append(counters.fail("reward_failures", f"problem {second}"))
    assert [count for count in told if count] == [1, TELL_EVERY_S, TELL_EVERY_S]
    assert counters.totals() == counters.take() == {"reward_failures": len(told)}
    assert counters.newest() == {f"reward_failures{NEWEST}": f"problem {len(told) - 1}"}
    assert counters.fail("episode_failures", "another") == 1


def test_what_is_told_of_an_exception_is_short_and_can_be_written() -> None:
    told = told_on(ValueError("\udcff" + "x" * 1000))
    assert told.startswith("?x")
    assert len(told) == PROBLEM
