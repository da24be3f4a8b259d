"""What is trained: samples and groups of samples, without I/O.

Invariant: a `Trajectory` or `Group` that passed `check_trajectory`/`check_group` is complete: lengths agree, every
response token has exactly one version, and a routing trace has one row for each token but the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
RouteArray = npt.NDArray[np.uint8 | np.uint16]


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Response tokens [start, start + length) were sampled by `version`."""

    start: int
    length: int
    version: int


class Trajectory(msgspec.Struct, frozen=True, eq=False):  # made in an eighth of the time of a frozen dataclass
    """One sample: a prompt, a response, and what the engine said about each response token.

    prompt_ids: int32 [prompt]. response_ids: int32 [response]. log_probs: float32 [response], the engine's own,
    natural log, at the sampling temperature. loss_mask: bool [response], False where a token is not trained.
    versions: runs that cover the response without gap or overlap, versions never falling. routes: uint8 or uint16
    [prompt + response - 1, layers, top_k], expert ids by falling router weight, of the forward pass that produced the
    next token's log-prob; None for a dense model. reward: finite. finish: "stop", "length" or "abort".
    """

    prompt_ids: Int32Array
    response_ids: Int32Array
    log_probs: Float32Array
    loss_mask: BoolArray
    versions: tuple[VersionRun, ...]
    reward: float
    finish: str
    routes: RouteArray | None = None

    @property
    def tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def oldest_version(self) -> int | None:
        """Smallest version over the trainable tokens; None if no token is trainable."""
        if len(self.versions) == 1:  # no slice: this is asked of every sample
            return self.versions[0].version if np.count_nonzero(self.loss_mask) else None
        oldest = [run.version for run in self.versions if self.loss_mask[run.start : run.start + run.length].any()]
        return min(oldest, default=None)

    def token_versions(self) -> Int32Array:
        """int32 [response]: the version of each response token."""
        out = np.zeros(len(self.response_ids), np.int32)
        for run in self.versions:
            out[run.start : run.start + run.length] = run.version
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The samples of one prompt: the unit of submission, training and accounting.

    run, group_id, prompt_index, attempt: from the `Ticket` that admission gave. task, engine, worker: names, for
    accounting. samples_wanted: size that the group was admitted with; len(trajectories) may be smaller.
    generation_seconds: from admission to submission. trace: W3C traceparent of its trace; "": it is not traced.
    """

    run: str
    group_id: int
    prompt_index: int
    attempt: int
    task: str
    worker: str
    engine: str
    samples_wanted: int
    generation_seconds: float
    trajectories: tuple[Trajectory, ...]
    trace: str = ""

    @property
    def response_tokens(self) -> int:
        """Trainable response tokens over all trajectories: the unit of the token ledger."""
        return sum(int(np.count_nonzero(t.loss_mask)) for t in self.trajectories)

    @property
    def oldest_version(self) -> int | None:
        """Smallest version over all trainable tokens; None if none is trainable."""
        return min((v for t in self.trajectories if (v := t.oldest_version) is not None), default=None)


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether a group of these rewards carries no signal, so no advantage: all are the same, or fewer than two."""
    return len(rewards) < 2 or min(rewards) == max(rewards)


class InvalidTrajectory(ValueError):
    """A trajectory or group whose parts contradict each other."""


def check_trajectory(t: Trajectory) -> None:
    """Raise InvalidTrajectory unless lengths, dtypes, versions and routes agree (see the class)."""
    for name, array, dtype in (
        ("prompt_ids", t.prompt_ids, np.int32),
        ("response_ids", t.response_ids, np.int32),
        ("log_probs", t.log_probs, np.float32),
        ("loss_mask", t.loss_mask, np.bool_),
    ):
        if array.dtype != dtype or array.ndim != 1:
            raise InvalidTrajectory(
                f"{name} is {array.dtype}{list(array.shape)}, expected {np.dtype(dtype)} of one dimension"
            )
    n = len(t.response_ids)
    if not len(t.prompt_ids) or not n:
        raise InvalidTrajectory("prompt and response need at least one token each")
    for name, array in (("log_probs", t.log_probs), ("loss_mask", t.loss_mask)):
        if len(array) != n:
            raise InvalidTrajectory(f"{name} has {len(array)} entries for {n} response tokens")
    if isinstance(t.reward, bool) or not math.isfinite(t.reward):
        raise InvalidTrajectory(f"reward is {t.reward}, expected a finite number")
    at, last = 0, -1
    for run in t.versions:
        if run.start != at or run.length < 1 or run.version < 0 or run.version < last:
            raise InvalidTrajectory(f"version run {run} does not continue {at} tokens of version {last}")
        at, last = at + run.length, run.version
    if at != n:
        raise InvalidTrajectory(f"version runs cover {at} of {n} response tokens")
    if t.routes is not None:
        if t.routes.dtype not in (np.uint8, np.uint16) or t.routes.ndim != 3:
            raise InvalidTrajectory(
                f"routes are {t.routes.dtype}{list(t.routes.shape)}, expected uint8 or uint16 [tokens - 1, layers, "
                f"top_k]"
            )
        if t.routes.shape[0] != t.tokens - 1:
            raise InvalidTrajectory(
                f"routes have {t.routes.shape[0]} rows for {t.tokens} tokens, expected {t.tokens - 1}"
            )


def check_group(group: Group) -> None:
    """Raise InvalidTrajectory unless the group has at least one trajectory and each of them is sound."""
    if not group.trajectories:
        raise InvalidTrajectory("a group needs at least one trajectory")
    for index, trajectory in enumerate(group.trajectories):
        try:
            check_trajectory(trajectory)
        except InvalidTrajectory as error:
            raise InvalidTrajectory(f"group {group.group_id}, trajectory {index}: {error}") from error
