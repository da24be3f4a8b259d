"""Joins a sample that broke off (or was asked for in pieces) and its continuation, possibly under newer weights.

Invariant: what was sampled stays as it was: its tokens, log-probs, versions and routes are those of the forward passes
that made them, and the joined sample is as complete as one that was never interrupted. Pure.

A partial response of `a` tokens after a prompt of `p` has routes of positions 0 .. p + a - 2: its last token was
sampled but not yet fed. The continuation is asked for as a prompt of p + a tokens with routes from position p + a - 1,
which is the forward pass that produces its first token. Its engine recomputes the earlier positions under its own
weights; those routes are not asked for, because they did not make the partial's log-probs. So the rows add up to
p + a + b - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from broker.types import VersionRun
from rollout.client import InvalidAnswer, Sample, Sampling


@dataclass(frozen=True, slots=True)
class Continuation:
    """The request that goes on with a sample: `prompt_ids` (prompt and partial), `routes_start`, `sampling`."""

    prompt_ids: tuple[int, ...]
    routes_start: int
    sampling: Sampling


def next_request(
    prompt_ids: Sequence[int],
    partial: Sample | None,
    sampling: Sampling,
    routes_start: int = 0,
    piece: int | None = None,
) -> Continuation:
    """The request for the rest of a sample; without a partial, or an empty one, it is the request for all of it.

    routes_start: first position whose routes are wanted at all. piece: most tokens to ask for at once, None: the rest.
    Raises ValueError if nothing is left to sample (see `is_complete`).
    """
    if partial is None or not len(partial.token_ids):
        limit = min(sampling.max_new_tokens, piece or sampling.max_new_tokens)
        return Continuation(tuple(prompt_ids), routes_start, replace(sampling, max_new_tokens=limit))
    if is_complete(partial, sampling):
        raise ValueError("the sample is complete, there is nothing to go on with")
    ids = (*prompt_ids, *partial.token_ids.tolist())
    left = sampling.max_new_tokens - len(partial.token_ids)
    return Continuation(ids, len(ids) - 1, replace(sampling, max_new_tokens=min(left, piece or left)))


def is_complete(sample: Sample, sampling: Sampling) -> bool:
    """Whether nothing is left to sample: it ended by itself, or broke off after its last token."""
    return sample.finish in ("stop", "length") or len(sample.token_ids) >= sampling.max_new_tokens


def as_piece(answer: Sample, asked: Sampling, before: int, wanted: Sampling) -> Sample:
    """An answer that filled the piece that was `asked` of it has ended only if the whole is as long as `wanted`.

    before: tokens that the sample had. Its finish becomes "piece" if it is to go on.
    """
    filled = answer.finish == "length" and len(answer.token_ids) == asked.max_new_tokens
    return (
        replace(answer, finish="piece") if filled and before + asked.max_new_tokens < wanted.max_new_tokens else answer
    )


def join(partial: Sample | None, rest: Sample, prompt: int) -> Sample:
    """`partial` followed by `rest`, the answer to `next_request`; prompt: tokens of the first prompt.

    Raises InvalidAnswer if `rest` is older than `partial`, or its routes do not begin where those of `partial` end.
    """
    if partial is None or not len(partial.token_ids):
        return rest
    kept = len(partial.token_ids)
    if not len(rest.token_ids):
        return replace(partial, finish=rest.finish)
    if rest.versions[0].version < partial.versions[-1].version:
        raise InvalidAnswer(
            f"continued under version {rest.versions[0].version}, begun under version {partial.versions[-1].version}"
        )
    return Sample(
        token_ids=np.concatenate([partial.token_ids, rest.token_ids]),
        log_probs=np.concatenate([partial.log_probs, rest.log_probs]),
        versions=join_runs(partial.versions, rest.versions),
        routes=_join_routes(partial, rest, prompt + kept - 1),
        routes_start=partial.routes_start,
        finish=rest.finish,
        cached_tokens=partial.cached_tokens,
    )


def join_runs(
    first: tuple[VersionRun, ...], second: tuple[VersionRun, ...], between: int = 0
) -> tuple[VersionRun, ...]:
    """The version runs of two parts of a response. between: tokens that no engine sampled, which count to `first`."""
    runs = list(first)
    if runs:
        runs[-1] = replace(runs[-1], length=runs[-1].length + between)
    offset = runs[-1].start + runs[-1].length if runs else 0
    for run in second:
        if runs and runs[-1].version == run.version:
            runs[-1] = replace(runs[-1], length=runs[-1].length + run.length)
        else:
            runs.append(replace(run, start=run.start + offset))
    return tuple(runs)


def _join_routes(partial: Sample, rest: Sample, position: int) -> np.ndarray | None:
    if partial.routes is None and rest.routes is None:
        return None
    if partial.routes is None or rest.routes is None:
        raise InvalidAnswer("one half of a continued sample has routes and the other has none")
    ends = partial.routes_start + len(partial.routes)
    if ends != position or rest.routes_start != position:
        raise InvalidAnswer(f"routes end at position {ends}, go on at {rest.routes_start}, expected {position}")
    return np.concatenate([partial.routes, rest.routes])
