"""Keep a package's warnings and log lines, whose texts may quote values from a file, from the log and the terminal."""

from __future__ import annotations

import logging
import re
import warnings
from typing import Any

__all__ = ["quiet_package"]


def quiet_package(name: str, *loggers: str) -> None:
    """Ignore a package's warnings and log lines from now on, in all threads; `loggers` are its other loggers.

    This does not use catch_warnings, which is not thread-safe.
    """
    for each in (name, *loggers):
        logging.getLogger(each).setLevel(logging.CRITICAL + 1)
    ignored: Any = ("ignore", None, Warning, re.compile(name), 0)  # as in warnings.filters
    if ignored not in warnings.filters:
        warnings.filterwarnings("ignore", module=name)
