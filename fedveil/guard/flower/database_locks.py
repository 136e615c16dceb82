"""Wait a minute for a locked database instead of five seconds.

A backup program that copies Flower's database holds a lock on it during the copy. After waiting five seconds, Flower's
SuperLink ends or answers with 500.
"""

from __future__ import annotations

import importlib

BUSY_MILLISECONDS = 60_000
_PRAGMA = "busy_timeout"


def patch_busy_timeout() -> None:
    """Make this process's SuperLink wait up to `BUSY_MILLISECONDS` for its database."""
    module = importlib.import_module("flwr.supercore.sql_mixin")
    others = tuple((name, value) for name, value in module.SQLITE_PRAGMAS if name != _PRAGMA)
    # First, because the later ones read the database and would wait for only five seconds.
    module.SQLITE_PRAGMAS = ((_PRAGMA, str(BUSY_MILLISECONDS)), *others)  # type: ignore[attr-defined]
