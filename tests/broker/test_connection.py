"""Sockets: each is one thread's at a time and one process' for ever; one that broke is not used again."""

from __future__ import annotations

import os

import pytest

from broker.connection import Connection
from broker.errors import BrokerError
from broker.queue import Broker


def socket_of(connection: Connection) -> int:
    """The server's number for the socket that a call goes through."""
    return int(connection.commands([("CLIENT", "ID")])[0])


def test_calls_go_through_one_socket_unless_another_thread_is_using_it(broker: Broker) -> None:
    connection = broker._connection
    first = socket_of(connection)
    assert socket_of(connection) == first
    taken = connection._take()
    second = socket_of(connection)
    assert second != first
    connection._idle.append(taken)
    assert socket_of(connection) in {first, second}


def test_a_fork_uses_a_socket_of_its_own(broker: Broker) -> None:
    connection = broker._connection
    mine = socket_of(connection)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(socket_of(connection)).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(reading, 100)) != mine
    assert socket_of(connection) == mine
    os.close(reading)
    os.close(writing)


def test_a_socket_that_the_server_closed_is_replaced_and_an_error_of_a_command_closes_none(broker: Broker) -> None:
    connection = broker._connection
    first = socket_of(connection)
    with pytest.raises(BrokerError, match="unknown command"):
        connection.commands([("NONSENSE",)])
    assert socket_of(connection) == first
    connection.client.client_kill_filter(_type="normal")
    assert socket_of(connection) != first
