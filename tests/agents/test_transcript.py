"""Calls become trajectories: one while each continues the last, and the engine's tokens are never encoded again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.types import VersionRun, check_trajectory
from rollout.agents.transcript import Call, Said, Transcript
from rollout.client import Sample

EOS = 2


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def render(said: list[Said]) -> str:
    return "".join(f"[{role[0]}{content}]" for role, content in said) + "[a"


def begin(transcript: Transcript, said: list[Said]) -> Call:
    return transcript.begin(said, render(said), encode)


def answer(transcript: Transcript, call: Call, text: str, ids: list[int]) -> None:
    """The engine answers `text` by `ids`, which are other tokens than those that encode it."""
    asked = call.episode.turn
    rows = np.arange(len(asked.prompt_ids) + len(ids) - 1, dtype=np.uint16)[asked.routes_start :, None, None]
    log_probs = np.full(len(ids), -1, np.float32)
    sample = Sample(
        np.asarray(ids, np.int32), log_probs, (VersionRun(0, len(ids), 3),), rows, asked.routes_start, "stop"
    )
    after = call.episode.answered(asked, sample)
    transcript.abandon(call)
    transcript.end(call, after, text, text + "]")


@given(st.lists(st.tuples(st.text("xyz", max_size=3), st.text("uvw", max_size=2)), min_size=1, max_size=6))
def test_a_conversation_is_one_trajectory_whose_sampled_tokens_stay(turns: list[tuple[str, str]]) -> None:
    transcript, said = Transcript(), [("system", "s")]
    for number, (text, reply) in enumerate(turns):
        said.append(("user", reply))
        answer(transcript, begin(transcript, said), text, [1000 + number, EOS])
        said.append(("assistant", text))
    (t,) = transcript.trajectories(0.5)
    check_trajectory(t)
    assert t.response_ids[t.loss_mask].tolist() == [i for n in range(len(turns)) for i in (1000 + n, EOS)]
    assert t.reward == 0.5
    heard = "".join(map(chr, t.response_ids[~t.loss_mask].tolist()))
    assert heard == "".join(f"[u{reply}][a" for _, reply in turns[1:])
    assert t.routes is not None
    assert t.routes[:, 0, 0].tolist() == list(range(t.tokens - 1))


def test_two_calls_that_branch_off_are_trajectories_on_the_same_tokens() -> None:
    transcript = Transcript()
    answer(transcript, begin(transcript, [("user", "x")]), "y", [1000, EOS])
    one, two = ([("user", "x"), ("assistant", "y"), ("user", name)] for name in "uv")
    first, second = begin(transcript, one), begin(transcript, two)
    answer(transcript, second, "y", [1001, EOS])
    answer(transcript, first, "y", [1002, EOS])
    back = begin(transcript, [("user", "x"), ("assistant", "y"), ("user", "w")])
    answer(transcript, back, "y", [1003, EOS])
    long, short, last = transcript.trajectories(1.0)
    assert long.response_ids[long.loss_mask].tolist() == [1000, EOS, 1002, EOS]
    assert short.prompt_ids.tolist() == [*encode("[ux][a"), 1000, EOS, *encode("[uv][a")]
    assert last.prompt_ids.tolist() == [*encode("[ux][a"), 1000, EOS, *encode("[uw][a")]
    assert [t.response_ids.tolist() for t in (short, last)] == [[1001, EOS], [1003, EOS]]


def test_messages_that_are_not_what_was_said_begin_anew() -> None:
    transcript = Transcript()
    answer(transcript, begin(transcript, [("user", "x")]), "y", [1000, EOS])
    for said in ([("user", "x")], [("user", "x"), ("assistant", "yz"), ("user", "u")], [("system", "x")]):
        assert begin(transcript, said).episode.turn.prompt_ids == tuple(encode(render(said)))


def test_a_call_that_was_not_answered_leaves_the_conversation_as_it_was() -> None:
    transcript = Transcript()
    answer(transcript, begin(transcript, [("user", "x")]), "y", [1000, EOS])
    said = [("user", "x"), ("assistant", "y"), ("user", "u")]
    lost = begin(transcript, said)
    transcript.abandon(lost)
    answer(transcript, begin(transcript, said), "z", [1001])
    (t,) = transcript.trajectories(1.0)
    assert t.response_ids[t.loss_mask].tolist() == [1000, EOS, 1001]
