"""Ports that are still free when somebody listens there, a minute after they were chosen."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import ports
from configs.ports import HIGHEST, LOWEST, free_port, lasting_ports, port_is_free

LOCAL = "127.0.0.1"


@given(st.integers(1, HIGHEST), st.integers(1, HIGHEST))
def test_the_kernels_range_is_left_alone_if_it_leaves_anything(low: int, high: int) -> None:
    found = lasting_ports(low, high)
    assert found
    assert set(found) <= set(range(LOWEST, HIGHEST + 1))
    whole = low <= LOWEST and high >= HIGHEST
    assert whole or not any(low <= port <= high for port in found)


def test_a_port_that_was_chosen_is_none_that_the_kernel_gives_to_whoever_asks_for_any() -> None:
    low, high = map(int, ports.KERNELS_RANGE.read_text().split())
    chosen = [free_port(LOCAL) for _ in range(50)]
    assert not any(low <= port <= high for port in chosen)
    assert all(port_is_free(LOCAL, port) for port in chosen)


def test_a_port_is_none_on_which_somebody_listens_and_none_that_is_to_be_avoided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as listener:
        listener.bind((LOCAL, 0))
        listener.listen()
        taken, promised = listener.getsockname()[1], free_port(LOCAL)
        left = free_port(LOCAL, {taken, promised})
        monkeypatch.setattr(ports, "lasting_ports", lambda _low, _high: [taken, promised, left])
        assert {free_port(LOCAL, {promised}) for _ in range(10)} == {left}
        with pytest.raises(OSError, match="no free port"):
            free_port(LOCAL, {promised, left})


def test_processes_that_choose_at_the_same_time_choose_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [free_port(LOCAL) for _ in range(4)]
    monkeypatch.setattr(ports, "lasting_ports", lambda _low, _high: few)
    for _ in range(10):
        assert free_port(LOCAL, (), (0, 2)) in few[::2]
        assert free_port(LOCAL, (), (1, 2)) in few[1::2]


def test_a_host_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
