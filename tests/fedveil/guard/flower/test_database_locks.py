"""A backup that holds a lock on Flower's database for longer than Flower waits."""

from __future__ import annotations

import importlib
import sqlite3
import threading
import time

import pytest

from fedveil.guard.flower import database_locks

LOCKED_SECONDS = 6.0  # Flower waits for 5


@pytest.mark.long
@pytest.mark.parametrize("patched", [True, False])
def test_a_lock_of_six_seconds_is_waited_for(patched, tmp_path, monkeypatch):
    mixin = importlib.import_module("flwr.supercore.sql_mixin")
    monkeypatch.setattr(mixin, "SQLITE_PRAGMAS", mixin.SQLITE_PRAGMAS)
    if patched:
        database_locks.patch_busy_timeout()
    file = tmp_path / "state.db"
    connection = sqlite3.connect(file)
    mixin._set_sqlite_pragmas(connection, None)
    connection.execute("CREATE TABLE t (n)")
    connection.commit()

    def backup() -> None:
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        held.set()
        time.sleep(LOCKED_SECONDS)
        other.execute("COMMIT")
        other.close()

    held = threading.Event()
    thread = threading.Thread(target=backup)
    thread.start()
    assert held.wait(10)
    try:
        if patched:
            connection.execute("INSERT INTO t VALUES (1)")
        else:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                connection.execute("INSERT INTO t VALUES (1)")
    finally:
        thread.join()
        connection.close()
