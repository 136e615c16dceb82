"""Backups of a running server and a stopped site, restored to new folders, with real processes."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.console.main import main
from tests.deployment.test_restarts import Command, provisioned, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LOCKED_SECONDS = 25.0  # long enough that the SuperLink, which takes some seconds to import, meets the lock


def test_both_ends_come_back_from_their_backups(tmp_path: Path, capsys) -> None:
    folder = provisioned(tmp_path, "localhost")
    kit, moved = tmp_path / "pilot-north", tmp_path / "old"
    request = str(kit / "keys" / "request.json")
    of_server, of_site = str(tmp_path / "backups" / "server.tar"), str(tmp_path / "backups" / "north.tar")
    with _running(tmp_path / "server.out", "next: fedveil submit", "server", "start", str(folder)):
        assert main(["members", "register", str(folder), request, "--fingerprint", "-"]) == 0
        with _running(tmp_path / "site.out", "site north: online", "site", "start", "--kit", str(kit)):
            assert main(["server", "backup", str(folder), "--to", of_server, "--all-runs"]) == 0
            assert main(["site", "backup", "--kit", str(kit), "--to", of_site]) == 2
            assert "site north: already running" in capsys.readouterr().err
    assert main(["site", "backup", "--kit", str(kit), "--to", of_site]) == 0
    moved.mkdir()
    shutil.move(folder, moved / "pilot")
    shutil.move(kit / "state", moved / "state")
    assert main(["server", "restore", of_server, str(folder)]) == 0
    assert "registered sites: north" in capsys.readouterr().out
    assert main(["site", "restore", of_site, "--kit", str(kit)]) == 0
    with _running(tmp_path / "server.again.out", "next: fedveil submit", "server", "start", str(folder)):
        assert main(["site", "start", "--kit", str(kit)]) == 2
        assert "site ledger recover DATA" in capsys.readouterr().err
        assert main(["site", "ledger", "recover", str(kit / "data"), "--nothing-lost", "--kit", str(kit)]) == 0
        with _running(tmp_path / "site.again.out", "site north: online", "site", "start", "--kit", str(kit)):
            pass


def test_a_lock_of_another_program_does_not_end_a_start(tmp_path: Path) -> None:
    """As one of a backup program that locks Flower's database for longer than Flower waits."""
    folder = provisioned(tmp_path, "localhost")
    with _running(tmp_path / "first.out", "next: fedveil submit", "server", "start", str(folder)):
        pass
    held = threading.Event()

    def lock() -> None:
        with contextlib.closing(
            sqlite3.connect(folder / "server" / "superlink.db", isolation_level=None, timeout=30)
        ) as other:
            other.execute("PRAGMA locking_mode = EXCLUSIVE")  # keeps out readers too, which WAL alone does not
            other.execute("BEGIN EXCLUSIVE")
            held.set()
            time.sleep(LOCKED_SECONDS)
            other.execute("COMMIT")

    ready = f"log {folder / 'server' / 'logs'}"
    thread = threading.Thread(target=lock)
    thread.start()
    assert held.wait(60)
    with _running(tmp_path / "second.out", "next: fedveil submit", "server", "start", str(folder)) as server:
        thread.join()
        time.sleep(2)
        assert server.process.poll() is None
        assert ready in server.said
        assert "Traceback" not in server.said


@contextlib.contextmanager
def _running(log: Path, ready: str, *words: str) -> Iterator[Command]:
    command = Command(log, *words)
    try:
        until(lambda: ready in command.said or command.process.poll() is not None, 240, command)
        assert ready in command.said, command.said[-4000:]
        yield command
    finally:
        command.stop()
