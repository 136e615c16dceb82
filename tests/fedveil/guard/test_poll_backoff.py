from __future__ import annotations

import importlib
import inspect
import re

import pytest

from fedveil.guard import poll_backoff
from fedveil.guard.poll_backoff import PollBackoff


class Sleeps(PollBackoff):
    """A pace whose sleeps are written down."""

    def __init__(self, first: dict[float, float], longest: dict[float, float] | None = None) -> None:
        self.slept: list[float] = []
        super().__init__(first, longest, self.slept.append)

    def for_seconds(self, what: float, until: float) -> list[float]:
        """The sleeps of one wait that lasts so long."""
        before = len(self.slept)
        while sum(self.slept[before:]) < until:
            self.sleep(what)
        return self.slept[before:]


def test_a_wait_is_short_at_first_then_a_tenth_of_what_was_waited_and_never_longer_than_flowers():
    slept = Sleeps({3.0: 0.2}).for_seconds(3.0, 60.0)
    assert slept[:10] == [0.2] * 10
    waited = 0.0
    for seconds in slept:
        assert seconds == min(3.0, max(0.2, 0.1 * waited))
        waited += seconds
    assert slept[-1] == 3.0
    assert len(slept) < 60


def test_after_long_it_looks_less_often_than_flower_and_adds_a_tenth_of_the_wait_at_most():
    sleeps = Sleeps({3.0: 0.2, 0.5: 0.05}, {3.0: 10.0})
    slept, waited = sleeps.for_seconds(3.0, 600.0), 0.0
    for seconds in slept:
        assert seconds == min(10.0, max(0.2, 0.1 * waited))
        waited += seconds
    assert slept[-1] == 10.0
    assert sleeps.for_seconds(0.5, 60.0)[-1] == 0.5  # nothing is said of its longest: Flower's own
    assert {*Sleeps({3.0: 3.0}, {3.0: 10.0}).for_seconds(3.0, 600.0)} == {3.0}  # whoever asks for Flower's has it


def test_it_begins_anew_when_what_was_waited_for_has_come():
    sleeps = Sleeps({3.0: 0.2, 0.5: 0.05})
    assert sleeps.for_seconds(3.0, 60.0)[-1] == 3.0
    assert sleeps.for_seconds(0.5, 0.01) == [0.05]  # a message came: now its reply is waited for
    assert sleeps.for_seconds(3.0, 0.01) == [0.2]
    sleeps.for_seconds(3.0, 60.0)
    sleeps.again()
    assert sleeps.for_seconds(3.0, 0.01) == [0.2]


def test_a_sleep_of_flowers_that_nothing_is_said_of_stays():
    assert {*Sleeps({3.0: 0.2}).for_seconds(7.0, 30.0)} == {7.0}


def test_a_first_wait_as_long_as_flowers_leaves_flowers(monkeypatch):
    monkeypatch.setenv(poll_backoff.VARIABLE, "3")
    flowers = importlib.import_module("flwr.supernode.start_client_internal")
    monkeypatch.setattr(flowers, "time", flowers.time)  # put back afterwards
    poll_backoff.patch_supernode_polling()
    assert flowers.time.first == {3: 3.0, 0.5: 0.5}


@pytest.mark.parametrize("sites", [1, 40, 41, 1000, 10_000])
def test_all_sites_together_ask_a_server_no_more_than_200_times_a_second(sites):
    first = poll_backoff.patch_site_polling(sites)
    assert first >= 0.2
    slept = Sleeps({3.0: first}).for_seconds(3.0, 60.0)
    assert sites / min(slept) <= 200.0 + 1e-9
    assert max(slept) == max(3.0, first)


@pytest.mark.parametrize("text", ["soon", "", "nan", "inf", "-1", "0", "0.001"])
def test_a_first_wait_that_is_none_ends_the_program_in_words(text, monkeypatch, capsys):
    monkeypatch.setenv(poll_backoff.VARIABLE, text)
    with pytest.raises(SystemExit, match="2"):
        poll_backoff.first_seconds()
    assert "FEDVEIL_POLL_SECONDS: must be 0.02 seconds or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    "module,sleeps,install",
    [
        ("flwr.supernode.start_client_internal", ["3", "0.5", "0.5"], poll_backoff.patch_supernode_polling),
        ("flwr.supercore.superexec.run_superexec", ["task_poll_interval"], poll_backoff.patch_superexec_polling),
    ],
)
def test_flowers_modules_do_nothing_with_time_but_these_sleeps(module, sleeps, install, monkeypatch):
    monkeypatch.setenv(poll_backoff.VARIABLE, "0.4")
    flowers = importlib.import_module(module)
    monkeypatch.setattr(flowers, "time", flowers.time)  # put back afterwards
    used = re.findall(r"\btime\.(\w+)\(([^)]*)\)", inspect.getsource(flowers))
    assert used == [("sleep", seconds) for seconds in sleeps]
    install()
    assert isinstance(flowers.time, PollBackoff)
    assert set(flowers.time.first.values()) <= {0.4, 0.2, 0.1}


def test_a_superexec_asks_as_often_as_flower_says_it_does():
    flowers = importlib.import_module("flwr.supercore.superexec.run_superexec")
    assert flowers._get_task_poll_interval() == 1.0
