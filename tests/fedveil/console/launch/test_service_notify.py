"""What systemd is told: that a service is up, and that it works, but not if it does not."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedveil.console.doctor import checks
from fedveil.console.flower.processes import ProcessGroup
from fedveil.console.launch import online_watch, server, service_notify, site
from fedveil.console.launch.online_watch import SiteStartWatcher
from fedveil.console.launch.service_notify import ServiceNotifier
from fedveil.console.main import main
from fedveil.errors import ConfigError
from tests.fedveil.console.tls import tls_server


@pytest.fixture
def manager(tmp_path):
    """systemd's end: the messages so far, without blocking."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.setblocking(False)

    def received() -> list[str]:
        messages = []
        while True:
            try:
                messages.append(listener.recv(4096).decode())
            except BlockingIOError:
                return messages

    yield SimpleNamespace(address=str(tmp_path / "notify"), received=received)
    listener.close()


def test_systemd_s_variables_are_read_once_and_no_child_gets_them():
    environ = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "5", "PATH": "/bin"}
    notifier = ServiceNotifier.from_environment(environ, 5)
    assert (notifier.address, notifier.every) == ("/run/x", 5.0)
    assert environ == {"PATH": "/bin"}
    assert ServiceNotifier.from_environment({}, 5) == ServiceNotifier()
    for name, wrong in (("PID", "6"), ("USEC", "-4"), ("USEC", "\u0665"), ("USEC", "9" * 30)):
        environ = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "5"}
        environ[f"WATCHDOG_{name}"] = wrong
        assert ServiceNotifier.from_environment(environ, 5).every == service_notify.SECONDS
    assert ServiceNotifier.from_environment({"NOTIFY_SOCKET": "vsock:2:1"}, 5).address == ""


def test_a_report_comes_at_most_once_an_interval_and_a_fault_takes_its_watchdog_line_away(manager):
    now, faults = [0.0], [""]
    notifier = ServiceNotifier(manager.address, 10.0, lambda: now[0])
    notifier.tell_ready("serving\nWATCHDOG=1")
    assert manager.received() == ["READY=1\nSTATUS=serving WATCHDOG=1"]  # one line, whatever the text has
    for at, fault, said in (
        (1, "", ["WATCHDOG=1\nSTATUS=serving WATCHDOG=1"]), (9, "", []),
        (11, "gone\nWATCHDOG=1", ["STATUS=gone WATCHDOG=1"]), (20, "", []), (21, "", ["WATCHDOG=1\nSTATUS=online"]),
    ):  # fmt: skip
        now[0], faults[0] = at, fault
        notifier.tell_alive(lambda: faults[0], "online" if at == 21 else "")
        assert manager.received() == said


def test_without_systemd_nothing_is_sent_and_no_fault_is_looked_for():
    looked: list[str] = []

    def find_fault() -> str:
        looked.append("looked")
        return ""

    notifier = ServiceNotifier()
    notifier.tell_ready("serving")
    notifier.tell_alive(find_fault)
    assert looked == []


def test_an_abstract_address_is_reached_too():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(b"\0fedveil-test-%d" % id(listener))
        listener.settimeout(5)
        ServiceNotifier(f"@fedveil-test-{id(listener)}").tell_ready("serving")
        assert listener.recv(100) == b"READY=1\nSTATUS=serving"


def test_a_socket_that_is_gone_is_said_once_and_stops_nothing(tmp_path, capsys):
    notifier = ServiceNotifier(str(tmp_path / "none"), 0.0)
    for _ in range(3):
        notifier.tell_alive(str)
    assert capsys.readouterr().err.count("cannot report to systemd at ") == 1


def test_a_server_is_ready_once_it_answers_and_alive_while_both_programs_run(tmp_path, manager, monkeypatch):
    """It is asked by a TLS handshake, so a frozen SuperLink is seen."""
    launcher = server.ServerLauncher(tmp_path, "pilot", "0.0.0.0:9092", 8000, tmp_path)
    faults = [("", ""), ("its SuperLink ended", ""), ("", ""), ("", "timed out"), ("", "")]
    order: list[object] = []
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(server._Programs, "start", lambda self: order.append("start"))
    monkeypatch.setattr(server._Programs, "become_ready", lambda self: order.append(manager.received()) or True)
    monkeypatch.setattr(server._Programs, "reason", lambda self: faults[len(order) - 3][0])
    monkeypatch.setattr(server.checks, "find_handshake_fault", lambda port: faults[len(order) - 3][1])
    monkeypatch.setattr(server.ProcessGroup, "ended", lambda self, name: None)

    def count_rounds(self):
        order.append(manager.received())
        if len(order) == 3 + len(faults):
            raise KeyboardInterrupt

    monkeypatch.setattr(server._Programs, "tell_full_disk", count_rounds)
    with pytest.raises(KeyboardInterrupt):
        server.run(launcher, ServiceNotifier(manager.address, 0.0))
    frozen = "STATUS=its SuperLink does not answer at the control port: timed out"
    status = "STATUS=serving sites at 0.0.0.0:9092"
    good = [f"WATCHDOG=1\n{status}"]
    assert order == ["start", [], [f"READY=1\n{status}"], good, ["STATUS=its SuperLink ended"], good, [frozen], good]


def test_a_program_that_takes_connections_but_does_not_answer_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_TIMEOUT", 0.3)
    (tmp_path / "federation.toml").write_text('name = "pilot"\nserver = ["localhost"]\nsites = ["north"]\n')
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    own = tmp_path / "pilot" / "server"
    with tls_server(own) as address:
        # Not verified: an expired certificate or a lost ca.crt must not stop a running server.
        (own / "ca.crt").unlink()
        assert checks.find_handshake_fault(int(address.rpartition(":")[2])) == ""
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel accepts for it
        assert "timed out" in checks.find_handshake_fault(frozen.getsockname()[1])


@pytest.fixture
def watched(tmp_path):
    processes = ProcessGroup(tmp_path)
    processes.ended = lambda name: None  # type: ignore[method-assign]
    return SiteStartWatcher(processes, "north", tmp_path / "audit-log.jsonl", "h:1", tmp_path / "ca.crt", 0, 0)


@pytest.mark.parametrize(
    "missing,fault",
    [("", "the server answers, but does not hear this site"), ("no answer yet", ""), ("the clock is wrong", ""),
     (ConfigError("another program"), "")],
)  # fmt: skip
def test_a_silent_site_is_a_fault_only_while_its_server_can_be_reached(missing, fault, watched, monkeypatch):
    """Otherwise a restart mends nothing, and a client round in progress would end with it."""

    def look(superlink: str, ca: Path) -> str:
        if isinstance(missing, ConfigError):
            raise missing
        return missing

    monkeypatch.setattr(online_watch, "missing_sites", look)
    assert watched.find_fault() == ""
    watched.silence_said = True
    assert watched.find_fault() == fault


def test_an_ended_process_of_a_site_is_a_fault_and_its_state_is_said(watched):
    assert watched.status == "waiting for the server at h:1"
    watched.online = True
    assert watched.status == "online"
    watched.away_said = True
    assert watched.status == "online, but the server does not answer"
    watched.processes.ended = lambda name: 1  # type: ignore[method-assign]
    watched.processes.ended_part = lambda name: "north superexec"  # type: ignore[method-assign]
    assert watched.find_fault() == "north superexec has ended"


def test_a_site_is_ready_once_its_worker_is_warm(tmp_path, watched, manager, monkeypatch):
    order = []
    for name in ("prepare_site", "write_secret", "supernode_command", "start_isolated"):
        monkeypatch.setattr(site, name, lambda *args, name=name: ("config", "env") if name == "prepare_site" else name)

    def spare(*args):
        order.append(manager.received())
        return SimpleNamespace(pid=5)

    def slept(seconds):
        order.append(manager.received())
        watched.processes.ended, watched.processes.ended_part = lambda name: 7, lambda name: "north"

    monkeypatch.setattr(site, "start_spare", spare)
    monkeypatch.setattr(online_watch.time, "sleep", slept)
    watched.processes.log("north").write_text("")
    watched.processes.stop = lambda: None
    watched.notifier = ServiceNotifier(manager.address)
    node = site.parse_site({"site": "north", "state-dir": str(tmp_path)})
    with pytest.raises(online_watch.SiteProcessEndedError, match="ended with exit code 7"):
        site._started(site.SiteLauncher("h:1", Path("ca"), Path("key"), node, 1.0), watched)
    status = "STATUS=waiting for the server at h:1"
    assert order == [[], [f"READY=1\n{status}", f"WATCHDOG=1\n{status}"]]
