"""Strangers at the real port, and a member that sends no bodies, while two honest sites train: the run ends as without.

A thousand calls that never sent their body kept every site out of Flower's gRPC port. Here each wave has such calls,
with fresh keys, with a site's public key alone, without headers, and with a registered site's signature; half bodies,
where the port speaks HTTP; and connections with garbage, with half a TLS handshake, or that close after it.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.guard import fleet_limits as limits
from fedveil.guard import flower
from fedveil.records.tensor_state import state_digest
from tests.deployment.loopback import in_process, over_grpc
from tests.deployment.loopback import lines as lines_of
from tests.deployment.test_hostile_member import CONFIG, DATA, Caller, beside

HONEST, MEMBER = ("site-0", "site-1"), "site-2"
RUN = CONFIG | {"run.rounds": 1, "cohort.deadline-seconds": 600.0}  # no site is silent: a busy machine has time
CALLS_OF_A_WAVE = {"fresh key": 120, "site's key": 40, "no headers": 40, "member": 3 * limits.MAX_OPEN_CALLS}
CONNECTIONS_OF_A_WAVE = 60
CALLS_OF_A_CONNECTION = 30  # the port admits 32
HOLD_SECONDS = 3.0
MIN_CALLS = 1000
_SECONDS = 10.0


class Strangers:
    """Connections and calls of one wave.

    Attributes:
        answers: how calls without a body were answered while they were open, by caller.
    """

    def __init__(self, federation: LocalDeployment) -> None:
        self.member, self.site = Caller(federation, MEMBER), Caller(federation, HONEST[0])
        self.address = ("127.0.0.1", federation._fleet_port)
        self.ca = (federation.folder / "ca.crt").read_bytes()
        self.answers = Counter[tuple[str, str]]()
        self.calls = self.failed_connections = 0

    def wave(self, end: threading.Event) -> None:
        """Open all calls and connections, hold them open, and close them."""
        sockets = [self._connect(number) for number in range(CONNECTIONS_OF_A_WAVE)]
        hold = self._hold_grpc if self.member.is_grpc else self._hold_http
        hold(end)
        for each in sockets:
            if each is not None:
                each.close()
        self.calls += sum(CALLS_OF_A_WAVE.values())

    def _connect(self, number: int) -> socket.socket | None:
        """Open a connection that sends garbage, half a handshake or nothing, or that closes after its handshake."""
        try:
            connection = socket.create_connection(self.address, _SECONDS)
            if number % 4 == 0:
                connection.sendall(os.urandom(500))
            elif number % 4 == 1:
                hello = ssl.MemoryBIO()
                wrapped = ssl.create_default_context(cadata=self.ca.decode()).wrap_bio(
                    ssl.MemoryBIO(), hello, server_hostname="127.0.0.1"
                )
                with pytest.raises(ssl.SSLWantReadError):
                    wrapped.do_handshake()
                sent = hello.read()
                connection.sendall(sent[: len(sent) // 2])
            elif number % 4 == 2:
                self._handshake(connection).close()
            return connection
        except OSError:  # the port reset garbage
            self.failed_connections += 1
            return None

    def _handshake(self, connection: socket.socket) -> ssl.SSLSocket:
        context = ssl.create_default_context(cadata=self.ca.decode())
        return context.wrap_socket(connection, server_hostname="127.0.0.1")

    def _signed(self, who: str) -> list[tuple[str, str | bytes]]:
        """Return the headers of a call, as gRPC has them."""
        stranger, _ = generate_key_pairs()
        if who == "no headers":
            return []
        key = {"fresh key": stranger, "site's key": self.site.key, "member": self.member.key}[who]
        signs, stamp = self.member.key if who == "member" else stranger, now().isoformat()
        return [
            (PUBLIC_KEY_HEADER, public_key_to_bytes(key.public_key())), (TIMESTAMP_HEADER, stamp),
            (SIGNATURE_HEADER, sign_message(signs, stamp.encode())),
        ]  # fmt: skip

    def _hold_grpc(self, end: threading.Event) -> None:
        over = threading.Event()

        def never() -> Iterator[bytes]:
            over.wait(_SECONDS + HOLD_SECONDS)
            return
            yield b""

        channels, calls = [], []
        options = [("grpc.use_local_subchannel_pool", 1)]
        credentials = grpc.ssl_channel_credentials(self.ca)
        for who, count in CALLS_OF_A_WAVE.items():
            for number in range(count):
                if number % CALLS_OF_A_CONNECTION == 0:
                    channels.append(grpc.secure_channel("{}:{}".format(*self.address), credentials, options))
                call = channels[-1].stream_unary("/flwr.proto.Fleet/PullMessages")
                calls.append((who, call.future(never(), metadata=self._signed(who))))
        end.wait(HOLD_SECONDS)
        for who, call in calls:
            self.answers[who, call.code().name if call.done() else "open"] += 1
        over.set()
        for channel in channels:
            channel.close()

    def _hold_http(self, end: threading.Event) -> None:
        from fedveil.guard.flower import fleet_http

        names = {PUBLIC_KEY_HEADER: fleet_http.PUBLIC_KEY, SIGNATURE_HEADER: fleet_http.SIGNATURE}
        calls = []
        for who, count in CALLS_OF_A_WAVE.items():
            for number in range(count):
                headers = {"Host": "127.0.0.1", "Content-Length": "10"}
                for name, value in self._signed(who):
                    headers[names.get(name, name)] = value if isinstance(value, str) else b64encode(value).decode()
                head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                request = f"POST /v1/fleet/pull-messages HTTP/1.1\r\n{head}\r\n".encode()
                try:
                    connection = self._handshake(socket.create_connection(self.address, _SECONDS))
                    connection.sendall(request + b"12345" * (number % 2))  # no body, or half of it
                    calls.append((who, connection))
                except OSError:
                    self.failed_connections += 1
        end.wait(HOLD_SECONDS)
        for who, connection in calls:
            connection.settimeout(0.01)
            try:
                answer = connection.recv(100).split(b" ")
                self.answers[who, answer[1].decode() if len(answer) > 1 else "closed"] += 1
            except TimeoutError:
                self.answers[who, "open"] += 1
            except OSError:
                self.answers[who, "closed"] += 1
            connection.close()


def flood(end: threading.Event, strangers: Strangers) -> None:
    """Send wave after wave, and at least as many calls as kept every site out of Flower's port."""
    while not end.is_set() or strangers.calls < MIN_CALLS:
        strangers.wave(end)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_calls_without_a_body_and_broken_handshakes_keep_no_site_out(tmp_path: Any) -> None:
    sites = [LocalSite(f"site-{i}", DATA, (("partition-id", i), ("num-partitions", 2))) for i in range(3)]
    with LocalDeployment(sites, tmp_path / "federation", database=True) as federation:
        federation.kill_site(MEMBER, grace=5.0)
        strangers = Strangers(federation)
        with beside(flood, strangers):
            ended = over_grpc(federation, tmp_path, RUN, timeout=900)
            states = federation.flower.nodes()  # the strangers are still there
        print(f"{ended.seconds:.0f} s, {strangers.calls} calls, {strangers.failed_connections} connections not made")
        print(sorted(strangers.answers.items()))
        assert ended.completed, ended.reason
        assert [states[federation._nodes[site]] for site in HONEST] == ["online"] * 2
        assert [federation.processes.ended(name) for name in ("superlink", *HONEST)] == [None] * 3
    rounds = lines_of(tmp_path / "fedavg" / "metrics.jsonl")
    assert rounds[-1]["weights"] == state_digest(in_process(RUN, DATA, 2).models()["server"])
    assert all(line["accepted"] == list(HONEST) for line in rounds if line["round"] >= 0)
    # A stranger is refused. A member's calls stay open up to the limit, and it is told to ask again about the others.
    refused, again = (
        ("UNAUTHENTICATED", "UNAVAILABLE") if flower.installed_release().speaks == "gRPC" else ("401", "503")
    )
    for (who, answer), _ in strangers.answers.items():
        assert answer in (("open", again, "closed") if who == "member" else (refused, "closed")), strangers.answers
