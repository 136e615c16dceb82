"""The relay between sites and server: its counts, and the connections that it cuts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fedveil_bench.process_monitor.relay import TcpRelay, insert_relay


@contextmanager
def joined(make: Callable[[int], TcpRelay]) -> Iterator[tuple[TcpRelay, socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = make(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", relay.port), timeout=10) as site:
            there, _ = server.accept()
            with there:
                yield relay, site, there
        relay.close()


def test_it_carries_bytes_both_ways_and_counts_each():
    with joined(TcpRelay) as (relay, site, there):
        site.sendall(b"asked")
        assert there.recv(5) == b"asked"
        there.sendall(b"answered")
        assert site.recv(8) == b"answered"
        assert (relay.up, relay.down, relay.cuts) == (5, 8, 0)


def test_it_cuts_in_the_midst():
    with joined(lambda port: TcpRelay(port, every=0.3)) as (relay, site, there):
        site.sendall(b"asked")
        assert there.recv(5) == b"asked"
        assert site.recv(1) == b""
        assert there.recv(1) == b""
        assert relay.cuts == 1


def test_without_a_server_a_site_is_hung_up_on_and_the_relay_goes_on():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    relay = TcpRelay(port)
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", relay.port), timeout=10) as site:
            assert site.recv(1) == b""
    relay.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", relay.port), timeout=1)


class Federation:
    """As much of one as the relay touches."""

    def __init__(self) -> None:
        self._fleet_port, self.asked, self.stopped = 9, list[int](), False

    def start_site(self, name: str) -> None:
        self.asked.append(self._fleet_port)

    def stop(self) -> None:
        self.stopped = True


def test_every_site_of_a_federation_goes_through_one_relay_and_the_server_keeps_its_port():
    made = list[int]()

    def make(port: int) -> TcpRelay:
        made.append(port)
        return TcpRelay(port)

    federation = insert_relay(Federation, make)()
    federation.start_site("a")
    federation.start_site("b")
    assert made == [9]
    assert federation.asked == [federation.relay.port] * 2
    assert federation._fleet_port == 9
    federation.stop()
    assert federation.stopped
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", federation.relay.port), timeout=1)
