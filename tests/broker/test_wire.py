"""The wire format: bit for bit, without copies, and every kind of damage named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import wire
from broker.errors import CorruptPayload, SchemaMismatch, WrongRun
from broker.trajectory import check_trajectory
from broker.types import Group, InvalidTrajectory, Trajectory, VersionRun, check_group


@st.composite
def trajectories(draw: st.DrawFn, kind: Any) -> Trajectory:
    """kind: dtype of the routes, for one model routes alike; a sample may be without them."""
    prompt, response = draw(st.integers(1, 9)), draw(st.integers(1, 17))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from([None, kind]))
    cut = draw(st.integers(0, response - 1))
    runs = [(0, cut, 3), (cut, response - cut, 5)] if cut else [(0, response, 5)]
    return Trajectory(
        prompt_ids=generator.integers(0, 2**31 - 1, prompt, dtype=np.int32),
        response_ids=generator.integers(0, 2**31 - 1, response, dtype=np.int32),
        log_probs=-generator.random(response, dtype=np.float32),
        loss_mask=generator.random(response) < 0.5,
        versions=tuple(VersionRun(*r) for r in runs),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
        routes=None if kind is None else generator.integers(0, 200, (prompt + response - 1, 2, 3)).astype(kind),
    )


groups = st.builds(
    Group,
    run=st.just("run"),
    group_id=st.integers(0, 2**53),
    prompt_index=st.integers(0, 2**40),
    attempt=st.integers(0, 9),
    task=st.text(max_size=9),
    worker=st.text(max_size=9),
    engine=st.text(max_size=9),
    samples_wanted=st.integers(1, 64),
    generation_seconds=st.floats(0, 1e6),
    trajectories=st.sampled_from([np.uint8, np.uint16]).flatmap(
        lambda kind: st.lists(trajectories(kind), min_size=1, max_size=4).map(tuple)
    ),
    trace=st.sampled_from(["", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"]),
)


def same(a: npt.NDArray[np.generic] | None, b: npt.NDArray[np.generic] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@settings(max_examples=40, deadline=None)
@given(groups)
def test_a_group_comes_back_bit_for_bit_and_is_valid(group: Group) -> None:
    back = wire.decode(wire.encode(group), "run", group.group_id)
    check_group(back)
    for name in ("run", "group_id", "prompt_index", "attempt", "task", "worker", "engine", "samples_wanted"):
        assert getattr(back, name) == getattr(group, name)
    assert back.generation_seconds == group.generation_seconds
    for a, b in zip(back.trajectories, group.trajectories, strict=True):
        assert (a.versions, a.reward, a.finish) == (b.versions, b.reward, b.finish)
        for field in ("prompt_ids", "response_ids", "log_probs", "loss_mask", "routes"):
            assert same(getattr(a, field), getattr(b, field)), field


@settings(max_examples=40, deadline=None)
@given(groups)
def test_decoded_arrays_are_aligned_read_only_views_of_the_message(group: Group) -> None:
    data = wire.encode(group)
    whole = np.frombuffer(data, np.uint8)
    for t in wire.decode(data, "run").trajectories:
        for array in (t.prompt_ids, t.response_ids, t.log_probs, t.loss_mask):
            assert np.shares_memory(array, whole)
            assert not array.flags.writeable
            assert array.flags.aligned


@settings(max_examples=40, deadline=None)
@given(groups, st.data())
def test_any_flipped_bit_is_noticed(group: Group, data: st.DataObject) -> None:
    message = bytearray(wire.encode(group))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((CorruptPayload, SchemaMismatch)):
        wire.decode(bytes(message), "run", group.group_id)


@settings(max_examples=40, deadline=None)
@given(groups, st.data())
def test_any_truncation_is_noticed(group: Group, data: st.DataObject) -> None:
    message = wire.encode(group)
    with pytest.raises(CorruptPayload):
        wire.decode(message[: data.draw(st.integers(0, len(message) - 1))], "run", group.group_id)


def example() -> Group:
    t = Trajectory(
        np.ones(2, np.int32),
        np.ones(3, np.int32),
        np.zeros(3, np.float32),
        np.ones(3, np.bool_),
        (VersionRun(0, 3, 1),),
        0.5,
        "stop",
    )
    return Group("run", 7, 1, 0, "task", "w", "e", 1, 1.0, (t,))


def test_a_payload_of_another_run_schema_or_group_says_so() -> None:
    message = wire.encode(example())
    with pytest.raises(WrongRun, match="'run', this is 'other'"):
        wire.decode(message, "other")
    with pytest.raises(CorruptPayload, match="holds group 7"):
        wire.decode(message, "run", 8)
    with pytest.raises(SchemaMismatch, match="schema 9"):
        wire.decode(message[:4] + b"\x09\x00" + message[6:], "run")
    with pytest.raises(CorruptPayload, match="not a trajectory group"):
        wire.decode(b"\x80\x04pickle" * 9, "run")


def test_the_checksum_is_the_message_s_own() -> None:
    other = replace(example(), prompt_index=2)
    assert wire.checksum(wire.encode(example())) == wire.checksum(wire.encode(example()))
    assert wire.checksum(wire.encode(example())) != wire.checksum(wire.encode(other))


def forged(codec: int = 0, **changes: Any) -> bytes:
    """The example with another header of its prompts, and a checksum that is right all the same."""

    def lie(header: bytes) -> bytes:
        fields = msgspec.msgpack.decode(header)
        column = msgspec.convert(fields["prompt_ids"], wire.Column)
        return msgspec.msgpack.encode(fields | {"prompt_ids": msgspec.structs.replace(column, **changes)})

    return with_header(lie, codec)


def with_header(change: Callable[[bytes], bytes], codec: int = 0) -> bytes:
    """The example with a header that `change` made of its own, and a checksum that is right."""
    data = wire.encode(example())
    size = wire._HEAD.unpack_from(data)[4]
    start = wire._FIXED + size + -(wire._FIXED + size) % 16
    header = change(data[wire._FIXED : wire._FIXED + size])
    head = wire._HEAD.pack(wire.MAGIC, wire.SCHEMA_VERSION, codec, 0, len(header), len(data) - start)
    rest = header + bytes(-(wire._FIXED + len(header)) % 16) + data[start:]
    return head + wire._DIGEST.pack(xxhash.xxh3_64(head + rest).intdigest()) + rest


def test_a_group_of_a_release_that_knows_fewer_or_more_fields_is_read() -> None:
    def older(header: bytes) -> bytes:
        fields = msgspec.msgpack.decode(header)
        del fields["group"]["trace"]
        return msgspec.msgpack.encode(fields)

    def newer(header: bytes) -> bytes:
        fields = msgspec.msgpack.decode(header)
        fields["group"]["later"] = fields["later"] = "of a later release"
        return msgspec.msgpack.encode(fields)

    assert wire.decode(with_header(older), "run").trace == ""
    assert wire.decode(with_header(newer), "run").group_id == example().group_id


def test_numbers_of_numpy_come_back_as_numbers_and_a_reward_that_is_a_truth_value_is_none() -> None:
    run: Any = VersionRun(np.int64(0), np.int64(3), np.int32(1))  # type: ignore[arg-type]
    sample = msgspec.structs.replace(example().trajectories[0], reward=np.float32(0.5), versions=(run,))
    sent = replace(example(), trajectories=(sample,), generation_seconds=np.float32(1.5))  # type: ignore[arg-type]
    back = wire.decode(wire.encode(sent), "run")
    found = (back.trajectories[0].reward, back.generation_seconds, back.trajectories[0].versions[0].length)
    assert found == (0.5, 1.5, 3)
    assert [type(value) for value in found] == [float, float, int]
    with pytest.raises(InvalidTrajectory, match="reward is True"):
        check_trajectory(msgspec.structs.replace(sample, reward=True))


LIES: list[dict[str, Any]] = [
    {"rows": (2**62,)},
    {"rows": (2**64 - 1,)},
    {"rows": (2,), "row": (2**62,)},
    {"rows": (-1,), "row": (-3,)},
    {"rows": (-1,)},
    {"rows": ("many",)},
    {"rows": ()},
    {"rows": (1, 1)},
    {"rows": None},
    {"offset": None},
    {"offset": -16},
    {"offset": 2**63 - 1},  # of a sum that overflows
    {"offset": 2**64 - 1},
    {"offset": 65, "rows": (0,)},
    {"offset": -1},
    {"dtype": "i8"},
    {"codec": 1},
]


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_under_a_right_checksum_is_a_corrupt_payload(lie: dict[str, Any]) -> None:
    assert wire.decode(forged(), "run").trajectories
    with pytest.raises(CorruptPayload):
        wire.decode(forged(**lie), "run", 7)


def test_junk_that_is_nested_without_end_is_a_corrupt_payload() -> None:
    def nested(header: bytes) -> bytes:
        """Another field of the header, which a reader passes over; a short map of msgpack begins with its length."""
        return bytes([header[0] + 1]) + header[1:] + msgspec.msgpack.encode("later") + b"\x91" * 100_000 + b"\x00"

    with pytest.raises(CorruptPayload, match="malformed"):
        wire.decode(with_header(nested), "run", 7)


def test_routes_of_several_shapes_or_dtypes_are_no_group() -> None:
    sample = example().trajectories[0]
    routed = [
        msgspec.structs.replace(sample, routes=np.zeros((4, *shape), kind))
        for shape, kind in (((2, 3), np.uint8), ((2, 4), np.uint8), ((2, 3), np.uint16))
    ]
    assert wire.encode(replace(example(), trajectories=(sample, routed[0], routed[0])))
    for other in routed[1:]:
        with pytest.raises(InvalidTrajectory, match="routes of several dtypes or shapes"):
            wire.encode(replace(example(), trajectories=(routed[0], other)))


def test_an_array_without_a_dimension_is_an_invalid_trajectory() -> None:
    spoilt = msgspec.structs.replace(example().trajectories[0], response_ids=np.array(1, np.int32))
    with pytest.raises(InvalidTrajectory, match="response_ids is int32"):
        check_trajectory(spoilt)


def test_a_small_payload_cannot_claim_any_amount_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = wire.encode(example(), codec="zstd")
    assert wire.decode(data, "run").trajectories
    monkeypatch.setattr(wire, "LARGEST_BODY", 16)
    with pytest.raises(CorruptPayload, match="decompresses"):
        wire.decode(data, "run", 7)
