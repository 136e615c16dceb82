"""`fedveil server start` and `site start` with real processes: what is killed comes back, and a federation with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fedveil.console.flower.machine import free_ports
from fedveil.console.main import main
from tests.conftest import ROOT, extract

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


class Command:
    """A command of the console in a process of its own."""

    def __init__(self, log: Path, *words: str) -> None:
        self.log = log
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedveil.console.main", *words], env=env, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def child(self, program: str) -> psutil.Process | None:
        """The newest of its processes of this program."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.name().startswith(program[:15]) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return max(found, key=lambda process: process.create_time(), default=None)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        assert self.process.poll() is not None, self.said[-3000:]


def until(true: Callable[[], object], seconds: float, command: Command) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, command.said[-4000:]
        time.sleep(0.2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return provisioned(tmp_path, "localhost")


def provisioned(tmp_path: Path, address: str) -> Path:
    """A federation's folder, of one site; its kit is unpacked beside it."""
    fleet, control = free_ports(2)
    text = (
        f'name = "pilot"\nserver = ["{address}"]\nsites = ["north"]\nfleet-port = {fleet}\ncontrol-port = {control}\n'
    )
    (tmp_path / "federation.toml").write_text(text)
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    extract(tmp_path / "pilot" / "kits" / "north.tar.gz", tmp_path)
    kit = tmp_path / "pilot-north"
    assert main(["site", "init", "--kit", str(kit)]) == 0
    (kit / "data").mkdir()
    (kit / "data" / "train.jsonl").write_text(json.dumps({"mr": "name[a]", "ref": "text"}) + "\n")
    return tmp_path / "pilot"


@pytest.fixture
def server(folder: Path) -> Iterator[Command]:
    command = Command(folder.parent / "server.out", "server", "start", str(folder))
    try:
        until(lambda: "next: fedveil submit" in command.said, 120, command)
        yield command
    finally:
        command.stop()


def test_a_folder_that_was_moved_serves_its_operators_from_the_new_place(folder: Path, capsys) -> None:
    """Flower's own connection file names the certificate by an absolute path."""
    moved = folder.parent / "elsewhere" / "pilot"
    moved.parent.mkdir()
    folder.rename(moved)
    command = Command(moved.parent / "server.out", "server", "start", str(moved))
    try:
        until(lambda: "next: fedveil submit" in command.said, 120, command)
        request = folder.parent / "pilot-north" / "keys" / "request.json"
        assert main(["members", "register", str(moved), str(request), "--fingerprint", "-"]) == 0
        capsys.readouterr()
        main(["status", str(folder.parent / "runs"), "--federation", str(moved)])
        assert "north" in capsys.readouterr().out
    finally:
        command.stop()


def test_a_superexec_and_a_superlink_that_are_killed_are_started_again(folder: Path, server: Command) -> None:
    superlink, superexec = server.child("flower-superlink"), server.child("flower-superexec")
    assert superlink is not None
    assert superexec is not None
    superexec.kill()
    until(lambda: (new := server.child("flower-superexec")) and new.pid != superexec.pid, 60, server)
    assert server.child("flower-superlink") == superlink
    assert "its SuperExec ended with exit code -9" in server.said
    assert "runs in progress ended with it" in server.said
    superlink.kill()
    until(lambda: "serving sites and runs again" in server.said, 120, server)
    assert server.process.poll() is None


def test_a_port_that_another_took_meanwhile_ends_the_server_with_the_reason(folder: Path, server: Command) -> None:
    superlink = server.child("flower-superlink")
    assert superlink is not None
    fleet = json.loads((folder / "registry" / "members.json").read_text())["federation"]["fleet-port"]
    superlink.kill()
    with contextlib.ExitStack() as held:
        end = time.monotonic() + 20
        while True:  # before it is started again
            try:
                held.enter_context(socket.create_server(("127.0.0.1", fleet)))
                break
            except OSError:
                assert time.monotonic() < end
        assert server.process.wait(60) == 2
    assert f"fleet-port: expected a free port at 0.0.0.0:{fleet}, found one in use" in server.said


def test_a_registry_that_broke_meanwhile_ends_the_server_with_the_reason(folder: Path, server: Command) -> None:
    superlink = server.child("flower-superlink")
    assert superlink is not None
    (folder / "registry" / "members.json").write_text("[" * 3000)
    superlink.kill()
    assert server.process.wait(60) == 2
    assert "members.json" in server.said.splitlines()[-1]


def test_a_site_comes_back_after_its_processes_were_killed_and_its_server_was(folder: Path, server: Command) -> None:
    kit = folder.parent / "pilot-north"
    request = str(kit / "keys" / "request.json")
    assert main(["members", "register", str(folder), request, "--fingerprint", "-"]) == 0
    site = Command(folder.parent / "site.out", "site", "start", "--kit", str(kit))
    try:
        until(lambda: "site north: online" in site.said, 120, site)
        superexec, supernode = site.child("flower-superexec"), site.child("flower-supernode")
        assert superexec is not None
        assert supernode is not None
        superexec.kill()
        until(lambda: (new := site.child("flower-superexec")) and new.pid != superexec.pid, 60, site)
        assert site.child("flower-supernode") == supernode
        supernode.terminate()  # at once offline at the server: nothing to wait for
        until(lambda: site.said.count("site north: online") == 2, 120, site)
        superlink = server.child("flower-superlink")
        assert superlink is not None
        superlink.kill()
        until(lambda: "serving sites and runs again" in server.said, 120, server)
        heard = kit / "state" / "north.heartbeat"
        at = heard.stat().st_mtime
        until(lambda: heard.stat().st_mtime > at, 90, site)
        assert site.process.poll() is None
    finally:
        site.stop()


def test_a_site_comes_back_by_itself_after_its_server_lost_its_database(folder: Path) -> None:
    kit = folder.parent / "pilot-north"
    request = str(kit / "keys" / "request.json")
    server = Command(folder.parent / "server.out", "server", "start", str(folder))
    site = None
    try:
        until(lambda: "next: fedveil submit" in server.said, 120, server)
        assert main(["members", "register", str(folder), request, "--fingerprint", "-"]) == 0
        site = Command(folder.parent / "site.out", "site", "start", "--kit", str(kit))
        until(lambda: "site north: online" in site.said, 120, site)
        server.stop()
        for file in (folder / "server").glob("superlink.db*"):
            file.unlink()
        server = Command(folder.parent / "again.out", "server", "start", str(folder))
        until(lambda: "next: fedveil submit" in server.said, 120, server)
        until(lambda: "this key is registered, but the server's database lacks it" in site.said, 120, site)
        assert main(["members", "sync", str(folder)]) == 0
        heard = kit / "state" / "north.heartbeat"
        synced = time.time()
        until(lambda: heard.stat().st_mtime > synced, 120, site)
        assert site.process.poll() is None
    finally:
        for command in (site, server):
            if command is not None:
                command.stop()
