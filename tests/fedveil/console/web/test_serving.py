"""A dashboard on a socket: loopback alone, and nobody who is slow or without the link stalls it."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from fedveil.console.main import main
from fedveil.console.web import serving
from fedveil.console.web.apps import server_app
from fedveil.console.web.serving import DashboardServer


@pytest.fixture
def server(runs, monkeypatch):
    monkeypatch.setattr(serving, "_IDLE_SECONDS", 1.0)
    made = DashboardServer(0, lambda entry, ending: server_app({"": runs}, {}, entry, ending))
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    made.thread = thread
    yield made
    made.end()
    thread.join(30)
    assert not thread.is_alive()


def ask(server: DashboardServer, path: str = "/", cookie: bool = True) -> http.client.HTTPResponse:
    line = http.client.HTTPConnection("127.0.0.1", server.entry.port, timeout=20)
    entry = server.entry
    line.request("GET", entry.base + path, headers={"Cookie": f"{entry.cookie}={entry.session}"} if cookie else {})
    return line.getresponse()


def test_it_listens_on_the_loopback_alone(server):
    assert server._socket.getsockname()[0] == "127.0.0.1"
    assert ask(server).status == 200
    assert ask(server, cookie=False).status == 401


@pytest.mark.long
def test_silent_and_slow_clients_stall_nobody_and_are_cut_off(server):
    lines = []
    for number in range(150):
        line = socket.create_connection(("127.0.0.1", server.entry.port), timeout=20)
        if number % 3:
            line.sendall(
                b"GET / HTTP/1.1\r\nHost: 127" if number % 3 == 1 else b"POST / HTTP/1.1\r\nContent-Length: 999999\r\n"
            )
        lines.append(line)
    started = time.monotonic()
    assert ask(server).status == 200
    assert time.monotonic() - started < 20
    for line in lines:
        assert line.recv(100) == b""  # or an error, were it left open
        line.close()


def test_a_head_without_end_is_refused(server):
    with socket.create_connection(("127.0.0.1", server.entry.port), timeout=20) as line:
        line.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000)
        assert line.recv(100).startswith(b"HTTP/1.1 400 ")


@pytest.mark.long
def test_who_reads_no_event_stalls_nobody_and_keeps_no_dashboard_from_ending(server):
    stream = ask(server, "/events?seen=")
    assert stream.getheader("content-type").startswith("text/event-stream")
    assert stream.readline() == b"retry: 3000\n"
    time.sleep(2.5)  # longer than a silent client may stay
    assert ask(server).status == 200
    assert stream.readline() == b"\n"
    assert stream.readline() == b"event: changed\n"
    started = time.monotonic()
    server.end()
    server.thread.join(30)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("command", [["dashboard"], ["site", "dashboard", "--state-dir", "."]])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", "127.0.0.2"])
def test_another_address_is_refused_with_the_reason(command, host, capsys):
    assert main([*command, "--host", host, "--port", "0"]) == 2
    stderr = capsys.readouterr().err
    assert f"--host: expected 127.0.0.1, found {host}: pages and the link's token are sent unencrypted" in stderr
    assert "ssh -N -L" in stderr


def test_a_port_that_is_taken_is_named(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["dashboard", "--port", str(port)]) == 2
    assert f"--port: expected a free port, found {port}: it is in use" in capsys.readouterr().err
    assert main(["dashboard", "--port", "99999"]) == 2


def test_a_folder_that_is_no_site_s_is_named(tmp_path, capsys):
    assert main(["site", "dashboard", "--state-dir", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "--state-dir: expected a site's state folder, found none" in capsys.readouterr().err
    assert main(["dashboard", "--federation", str(tmp_path), "--port", "0"]) == 2
    assert "expected a folder made by fedveil provision" in capsys.readouterr().err
    assert main(["dashboard", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "FOLDER: expected a folder of runs" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_as_soon_as_the_link_is_shown_ends_it_in_order(runs, which):
    command = [sys.executable, "-m", "fedveil.console.main", "dashboard", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as dashboard:
        assert dashboard.stdout.readline().startswith("dashboard: http://127.0.0.1:")
        dashboard.send_signal(which)
        _, stderr = dashboard.communicate(timeout=60)
    assert stderr.splitlines()[-1] == "interrupted: all started processes were stopped"
    assert "Traceback" not in stderr
    assert dashboard.returncode == 130
