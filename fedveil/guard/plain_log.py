"""Make Flower's log fit for a file: times instead of color codes, and no line for each routine call.

A ServerApp that waits for sites asks the SuperLink several times a second, and uvicorn writes a line for each answer:
36 MB a day. Refused and failed calls keep their lines, and the control log has every call of an operator.
"""

from __future__ import annotations

import logging
import sys

from flwr.supercore.logger import update_console_handler

__all__ = ["RoutineCallFilter", "write_plain_log"]

_ACCESS = "uvicorn.access"
_ROUTINE = "/v1/runtime/"  # calls of this machine's own ServerApp and SuperExec


class RoutineCallFilter(logging.Filter):
    """Drop uvicorn's line about a call of an app process that succeeded."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the line."""
        match record.args:
            case (_, _, str(path), _, int(status)):
                return not (path.startswith(_ROUTINE) and status < 400)
        return True


def write_plain_log() -> None:
    """Limit this process's log. On a terminal, Flower's colors stay."""
    if not sys.stderr.isatty():
        update_console_handler(timestamps=True, colored=False)
    access = logging.getLogger(_ACCESS)
    if not any(isinstance(each, RoutineCallFilter) for each in access.filters):
        access.addFilter(RoutineCallFilter())
