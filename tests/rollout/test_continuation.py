"""A sample that was aborted any number of times is as complete as one that never was, and keeps what was sampled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.types import Trajectory, VersionRun, check_trajectory
from rollout.client import InvalidAnswer, Sample, Sampling
from rollout.continuation import is_complete, join, next_request

PROMPT = (3, 4, 5)


def piece(
    tokens: int, version: int, finish: str, *, prompt: int, start: int, mark: int = 0, routed: bool = True
) -> Sample:
    """An answer whose log-probs and routes carry `mark`, so that it can be told where they came from."""
    rows = max(prompt + tokens - 1 - start, 0)
    return Sample(
        token_ids=np.arange(tokens, dtype=np.int32),
        log_probs=np.full(tokens, -float(mark), np.float32),
        versions=(VersionRun(0, tokens, version),) if tokens else (),
        routes=np.full((rows, 2, 2), mark, np.uint8) if routed else None,
        routes_start=start,
        finish=finish,
    )


@given(
    pieces=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6),
    routed=st.booleans(),
)
def test_pieces_add_up_to_one_sound_trajectory(pieces: list[tuple[int, int]], routed: bool) -> None:
    sampling = Sampling(1.0, 64)
    whole, version = None, 0
    lengths = []
    for mark, (tokens, newer) in enumerate(pieces):
        version += newer
        last = mark == len(pieces) - 1
        tokens = max(tokens, 1) if last else tokens  # noqa: PLW2901
        ask = next_request(PROMPT, whole, sampling)
        assert len(ask.prompt_ids) + ask.sampling.max_new_tokens == len(PROMPT) + 64
        finish = "stop" if last else "abort"
        answer = piece(
            tokens, version, finish, prompt=len(ask.prompt_ids), start=ask.routes_start, mark=mark, routed=routed
        )
        whole = join(whole, answer, len(PROMPT))
        lengths.append(tokens)
    assert whole is not None
    n = sum(lengths)
    check_trajectory(
        Trajectory(
            np.asarray(PROMPT, np.int32),
            whole.token_ids,
            whole.log_probs,
            np.ones(n, np.bool_),
            whole.versions,
            0.0,
            whole.finish,
            whole.routes,
        )
    )
    made_by = np.repeat(np.arange(len(lengths)), lengths)
    np.testing.assert_array_equal(whole.log_probs, -made_by.astype(np.float32))
    assert (whole.routes is not None) == routed
    if whole.routes is not None:
        # Row p + i - 1 is the forward pass that produced token i, so it is of the piece that token i came with.
        np.testing.assert_array_equal(whole.routes[len(PROMPT) - 1 :, 0, 0], made_by)
    versions = [run.version for run in whole.versions]
    assert versions == sorted(set(versions))


def test_a_continuation_asks_only_for_routes_that_are_missing() -> None:
    partial = piece(4, 1, "abort", prompt=3, start=0)
    ask = next_request(PROMPT, partial, Sampling(1.0, 10))
    assert ask.prompt_ids == (3, 4, 5, 0, 1, 2, 3)
    assert ask.routes_start == 6
    assert ask.sampling.max_new_tokens == 6


def test_a_continuation_under_an_older_version_is_refused() -> None:
    partial = piece(4, 2, "abort", prompt=3, start=0)
    with pytest.raises(InvalidAnswer, match="version 1"):
        join(partial, piece(2, 1, "stop", prompt=7, start=6), 3)


@pytest.mark.parametrize("start", [0, 5])
def test_routes_that_do_not_continue_are_refused(start: int) -> None:
    partial = piece(4, 1, "abort", prompt=3, start=0)
    with pytest.raises(InvalidAnswer, match="position"):
        join(partial, piece(2, 1, "stop", prompt=7, start=start), 3)


def test_half_a_routing_trace_is_refused() -> None:
    partial = piece(4, 1, "abort", prompt=3, start=0)
    with pytest.raises(InvalidAnswer, match="routes"):
        join(partial, piece(2, 1, "stop", prompt=7, start=6, routed=False), 3)


def test_a_sample_aborted_after_its_last_token_is_complete() -> None:
    sampling = Sampling(1.0, 4)
    done = piece(4, 1, "abort", prompt=3, start=0)
    assert is_complete(done, sampling)
    assert not is_complete(piece(3, 1, "abort", prompt=3, start=0), sampling)
    with pytest.raises(ValueError, match="complete"):
        next_request(PROMPT, done, sampling)
