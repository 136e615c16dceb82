"""What takes long is found out beside the pages."""

from __future__ import annotations

import threading
import time

from fedveil.console.web import background as module
from fedveil.console.web.background import BackgroundQueries, CachedAnswer
from fedveil.errors import StateError


def until(later: BackgroundQueries, answered: int) -> None:
    deadline = time.monotonic() + 20
    while later.answered < answered:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_quick_answer_is_there_at_once_and_found_once():
    later, calls = BackgroundQueries(patience=20.0), []
    for _ in range(3):
        assert later.ask("a", 1, lambda: calls.append(1) or "x") == CachedAnswer("x", "", True)
    assert (calls, later.answered) == ([1], 1)


def test_a_slow_answer_is_waited_for_no_longer_than_patience_and_then_the_one_before_is_shown():
    later, go = BackgroundQueries(patience=0.05), threading.Event()

    def slow() -> str:
        go.wait(20)
        return "slow"

    assert later.ask("a", 1, slow) == CachedAnswer()
    assert later.ask("a", 2, lambda: "never asked while the first is under way") == CachedAnswer()
    go.set()
    until(later, 1)
    assert later.ask("a", 1, slow) == CachedAnswer("slow", "", True)
    go.clear()
    assert later.ask("a", 2, slow) == CachedAnswer("slow", "", False)
    go.set()
    until(later, 2)
    assert later.ask("a", 2, slow).is_new


def test_what_nobody_watched_for_a_while_is_waited_for_and_else_says_from_when_it_is(monkeypatch):
    later, now, go = BackgroundQueries(patience=20.0), [1000.0], threading.Event()
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    assert later.ask("a", 1, lambda: "then") == CachedAnswer("then", "", True)
    now[0] += 1200
    assert later.ask("a", 2, lambda: "now") == CachedAnswer("now", "", True)
    now[0] += 1200
    answer = later.ask("a", 3, lambda: str(go.wait(20)), patience=0.05)
    assert (answer, answer.since) == (CachedAnswer("now", "", False), "As of 00:36:40 UTC")
    go.set()
    now[0] += 100
    assert later.ask("a", 4, lambda: "later") == CachedAnswer(
        "later", "", True
    )  # not what was asked of the state before


def test_an_error_is_an_answer_and_is_text():
    later = BackgroundQueries(patience=20.0)

    def broken() -> str:
        raise StateError("ledger: \x1b[2J")

    assert later.ask("a", 1, broken) == CachedAnswer(None, "ledger: \\x1b[2J", True)
    assert later.ask("b", 1, lambda: {}["none"]).why == "KeyError('none')"


def test_one_question_is_looked_into_at_a_time():
    later, at_work, most = BackgroundQueries(patience=0.0), [], []

    def work() -> int:
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.02)
        at_work.pop()
        return 1

    for key in range(6):
        later.ask(key, 1, work)
    until(later, 6)
    assert max(most) == 1


def test_a_question_that_hangs_delays_its_own_lane_alone():
    later, silent = BackgroundQueries(patience=0.0), threading.Event()
    later.ask("a", 1, lambda: silent.wait(60), lane="a")
    assert later.ask("b", 1, lambda: 5, 20.0, "b").value == 5
    assert later.ask("c", 1, lambda: 5, 0.01, "a").value is None
    silent.set()
    assert later.ask("c", 1, lambda: 5, 20.0, "a").value == 5
