"""Wait for a locked database for a minute instead of five seconds.

A backup program that copies Flower's database holds a lock on it for as long as it copies. Flower's SuperLink ends, or
answers with 500, when it has waited five seconds.
"""

from __future__ import annotations

import importlib

BUSY_MILLISECONDS = 60_000
_PRAGMA = "busy_timeout"


def patch_busy_timeout() -> None:
    """Make this process's SuperLink wait for its database as long as this module says."""
    module = importlib.import_module("flwr.supercore.sql_mixin")
    others = tuple((name, value) for name, value in module.SQLITE_PRAGMAS if name != _PRAGMA)
    module.SQLITE_PRAGMAS = (*others, (_PRAGMA, str(BUSY_MILLISECONDS)))  # type: ignore[attr-defined]
