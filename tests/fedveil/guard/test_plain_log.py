"""What Flower's programs write to a log file."""

from __future__ import annotations

import io
import logging

import pytest
from flwr.supercore.logger import LOGGER_NAME, ConsoleHandler

from fedveil.guard.plain_log import RoutineCallFilter, write_plain_log


def record(path: str, status: int) -> logging.LogRecord:
    arguments = ("127.0.0.1:1", "POST", path, "1.1", status)  # as uvicorn calls its access logger
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)


@pytest.mark.parametrize(
    "path,status,written",
    [
        ("/v1/runtime/pull-messages", 200, False),
        ("/v1/runtime/pull-messages?x=1", 204, False),
        ("/v1/runtime/pull-messages", 401, True),
        ("/v1/runtime/push-object", 500, True),
        ("/v1/control/start-run", 200, True),
        ("/v1/fleet/pull", 200, True),
    ],
)
def test_only_an_app_processs_successful_calls_get_no_line(path, status, written):
    assert RoutineCallFilter().filter(record(path, status)) is written


def test_other_lines_of_that_logger_are_kept():
    assert RoutineCallFilter().filter(logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "text", None, None))
    assert RoutineCallFilter().filter(logging.LogRecord("x", logging.INFO, "", 0, "%s", ("/v1/runtime/x",), None))


@pytest.fixture
def console():
    """Flower's handler, as it is before and after."""
    (handler,) = [each for each in logging.getLogger(LOGGER_NAME).handlers if isinstance(each, ConsoleHandler)]
    access = logging.getLogger("uvicorn.access")
    before = (handler.timestamps, handler.colored, list(access.filters))
    yield handler
    handler.timestamps, handler.colored, access.filters[:] = before


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_file_gets_times_and_a_terminal_colors(console, monkeypatch, is_terminal):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    console.timestamps, console.colored = False, True
    for _ in range(2):
        write_plain_log()
    text = console.format(logging.LogRecord(LOGGER_NAME, logging.INFO, "", 0, "started", None, None))
    assert ("\x1b[" in text) is is_terminal
    assert (text.startswith("INFO 20")) is not is_terminal
    filters = logging.getLogger("uvicorn.access").filters
    assert sum(isinstance(each, RoutineCallFilter) for each in filters) == 1
