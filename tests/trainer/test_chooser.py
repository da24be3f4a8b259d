"""The trainer does not poll an empty queue all the time: it is told when a batch may be there, and looks in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from broker.errors import BrokerUnavailable
from broker.types import PAST_THE_END_MS, Delivery, Refused
from trainer.chooser import LONGEST_PAUSE_S, Chooser, Doorbell, EndOfPrompts, Message


class Queue:
    """Refuses until time `opens`, then gives one group. Time passes in pauses alone."""

    def __init__(self, opens: float, error: BrokerUnavailable | None = None) -> None:
        self.now, self.opens, self.error = 0.0, opens, error
        self.pauses: list[float] = []
        self.ended: Callable[[], bool] = lambda: False

    def pull(self) -> tuple[Delivery, ...] | Refused:
        if self.now >= self.opens:
            return (Delivery(1, 0, 0, 0, 1, 1, 1, 1, 0),)
        if self.error is not None:
            raise self.error
        return Refused("starved", "")

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def next(self, patience_s: float = 60.0, give_up_s: float = 30.0) -> Message:
        return Chooser(
            pull=self.pull,
            now_ms=lambda: 0,
            asked=lambda: -1,
            stop=lambda: False,
            ended=self.ended,
            clock=lambda: self.now,
            pause=self.pause,
            patience_s=patience_s,
            give_up_s=give_up_s,
        ).next()


def test_a_batch_that_was_waited_for_comes_with_the_reason() -> None:
    message = Queue(opens=2.0).next()
    assert (message.kind, message.reason) == ("batch", "starved")
    assert Queue(opens=0.0).next().reason == ""


def test_pauses_grow_to_a_limit_so_that_a_lost_message_costs_little() -> None:
    queue = Queue(opens=5.0)
    queue.next()
    assert queue.pauses == sorted(queue.pauses)
    assert queue.pauses[-1] == LONGEST_PAUSE_S


def test_a_round_ends_with_a_word_to_the_other_ranks() -> None:
    queue = Queue(opens=100.0)
    assert queue.next(patience_s=3.0).kind == "wait"
    assert queue.now < 3.0 + 2 * LONGEST_PAUSE_S


def test_a_round_in_which_the_prompts_ended_is_the_last_one() -> None:
    queue = Queue(opens=100.0)
    queue.ended = lambda: True
    assert queue.next(patience_s=3.0).kind == "ended"
    queue = Queue(opens=1.0)
    queue.ended = lambda: True
    assert queue.next(patience_s=3.0).kind == "batch"  # what is there is taken first


def test_a_server_that_does_not_answer_ends_nothing() -> None:
    def away() -> bool:
        raise BrokerUnavailable("redis://x", "no answer")

    queue = Queue(opens=100.0)
    queue.ended = away
    assert queue.next(patience_s=3.0).kind == "wait"


def looks(*seen: tuple[int, int, int, int]) -> list[bool]:
    """What `EndOfPrompts` says, look by look, of (now, groups generating, groups ready, past_the_end_ms)."""
    coming = iter(seen)

    def snapshot() -> Any:
        now, generating, ready, said = next(coming)
        groups = SimpleNamespace(generating=generating, ready=ready)
        return SimpleNamespace(time_ms=now, groups=groups, workers={"w": {PAST_THE_END_MS: said}, "old": {}})

    ended = EndOfPrompts(snapshot, 3)
    return [ended() for _ in seen]


def test_the_prompts_have_ended_when_one_was_missing_while_nothing_was_under_way() -> None:
    assert looks((100, 0, 2, 90), (200, 0, 2, 90), (300, 0, 2, 250)) == [False, False, True]
    assert looks((100, 0, 2, 90), (200, 1, 2, 190), (300, 0, 2, 250)) == [False, False, False]  # it may come back
    assert looks((100, 0, 2, 90), (200, 0, 3, 190), (300, 0, 2, 250)) == [False, False, False]  # that is a step
    assert looks((100, 0, 2, -1), (200, 0, 2, -1)) == [False, False]


def test_a_server_that_stays_away_is_an_error_only_after_the_patience_for_it() -> None:
    away = BrokerUnavailable("redis://x", "no answer")
    assert Queue(opens=5.0, error=away).next(give_up_s=10.0).kind == "batch"
    with pytest.raises(BrokerUnavailable):
        Queue(opens=50.0, error=away).next(give_up_s=10.0)


def test_the_doorbell_ends_a_pause_and_is_heard_if_it_rang_just_before() -> None:
    bell = Doorbell()
    bell.ring()
    bell.pause(60.0)  # rang before: returns at once, else the test's time limit ends it
    threading.Timer(0.05, bell.ring).start()
    bell.pause(60.0)
