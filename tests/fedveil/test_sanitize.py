from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.sanitize import LIMIT, sanitize, suggest_name
from tests.conftest import ROOT


@pytest.mark.parametrize(
    "text,expected",
    [
        ("north: no reply", "north: no reply"),
        ("Jürgen 模型 ≤ 8", "Jürgen 模型 ≤ 8"),
        ("\x1b[2J\x1b[31mgone\x07", "\\x1b[2J\\x1b[31mgone\\x07"),
        ("a\r\nb\u2028c\u0085", "a\\r\\nb\\u2028c\\x85"),
        ("user\u202etxt.exe\u2066", "user\\u202etxt.exe\\u2066"),
        ("zero\u200bwidth\u00a0", "zero\\u200bwidth\\xa0"),
        ("\ud800", "\\ud800"),
        ("[red]x[/red]", "[red]x[/red]"),
        (None, "None"),
        (ValueError("a\nb"), "a\\nb"),
    ],
)
def test_by_hand(text, expected):
    assert sanitize(text) == expected


def test_twenty_megabytes_are_cut_and_counted():
    assert sanitize(10**5000) == "<int without text>"
    assert sanitize("\x1b" * 20_000_000) == "\\x1b" * LIMIT + "... (20000000 characters)"
    assert sanitize("abcd", 4) == "abcd"
    assert sanitize("abcde", 4) == "abcd... (5 characters)"


@given(st.text())
def test_whatever_comes_is_one_printable_line_and_stays_so(text):
    once = sanitize(text)
    assert once.isprintable()
    assert sanitize(once, len(once)) == once


def test_it_needs_no_torch():
    code = "import sys, fedveil.sanitize; print([m for m in ('torch', 'flwr', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_a_slip_is_answered_with_the_nearest_name():
    assert suggest_name("fedrnd", {"fedavg", "fedrand"}) == "did you mean fedrand? "
    assert suggest_name("x", {"fedavg"}) == ""
