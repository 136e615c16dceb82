"""What signals do to a command: one stops it in order, and those that come with it break nothing off."""

from __future__ import annotations

import os
import signal
import time

import pytest

from fedveil.console import main
from fedveil.console.commands.getting_started import methods

pytestmark = pytest.mark.usefixtures("signal_handlers")


def test_signals_that_come_together_are_one(monkeypatch, capsys):
    stopped = []

    def work(args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            stopped.append(True)

    monkeypatch.setattr(methods, "run", work)
    assert main.main(["methods"]) == 130
    assert stopped == [True]
    os.kill(os.getpid(), signal.SIGTERM)  # as the interpreter ends
    assert capsys.readouterr().err == "interrupted: all started processes were stopped\n"


def test_a_closed_terminal_stops_everything_unless_nohup_said_otherwise(monkeypatch):
    stopped = []

    def work(args):
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.5)
            return 0
        finally:
            stopped.append(True)

    monkeypatch.setattr(methods, "run", work)
    assert main.main(["methods"]) == 130
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert main.main(["methods"]) == 0
    assert stopped == [True, True]


def test_a_later_signal_breaks_off_a_stopping_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(main, "_TOGETHER", 0.0)
    stopped = []

    def work(args):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            stopped.append(True)

    monkeypatch.setattr(methods, "run", work)
    assert main.main(["methods"]) == 130
    assert stopped == []
