"""The printer: whole lines in a pipe, wrapped and colored ones on a terminal, no control code of others in either."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.console import terminal
from fedveil.console.terminal import say, say_row, wrap_line

LONG = "fail  certificate ca.crt      expired on 2026-01-01; the operator must provision the federation again, and soon"


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def screen(monkeypatch, columns: str = "80", **environment: str) -> Screen:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": columns, **environment}.items():
        monkeypatch.setenv(name, value)
    made = Screen()
    monkeypatch.setattr(terminal.sys, "stdout", made)
    return made


def test_a_pipe_gets_whole_lines_without_color(capsys):
    say(LONG, hang=29, mark="fail", verdict="fail")
    say_row("east", "x" * 200)
    assert capsys.readouterr().out == f"{LONG}\neast  {'x' * 200}\n"


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("120", 100), ("60", 60), ("0", 80), ("x", 80), ("", 80)])
def test_a_terminal_gets_lines_of_its_width_with_a_hanging_indent(monkeypatch, columns, width):
    out = screen(monkeypatch, columns, NO_COLOR="1")
    say(LONG * 2, hang=29)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > width - 30
    assert all(line.startswith(" " * 29) and line[29] != " " for line in lines[1:])
    assert " ".join(out.getvalue().split()) == " ".join((LONG * 2).split())


def test_a_narrow_terminal_gets_a_small_indent(monkeypatch):
    out = screen(monkeypatch, "40", NO_COLOR="1")
    say(LONG, hang=29)
    assert all(re.match(r"  \S", line) for line in out.getvalue().splitlines()[1:])


def test_a_command_to_copy_is_in_one_piece(monkeypatch):
    out = screen(monkeypatch, NO_COLOR="1")
    command = "fedveil submit --federation '/srv/a pilot' --config /srv/a/runs/first/resume.toml"
    say(f"failed: killed by the kernel because memory ran out; resume it: {command}")
    assert out.getvalue().splitlines()[-1].strip() == command
    out.seek(0), out.truncate()
    say(f"the run continues; follow it with: fedveil watch 77 --flower-home {'x' * 50}; stop it with: fedveil stop 77")
    assert out.getvalue().splitlines()[1:] == [
        f"  fedveil watch 77 --flower-home {'x' * 50};", "  stop it with: fedveil stop 77",
    ]  # fmt: skip


def test_the_name_of_a_program_in_a_message_is_no_command(monkeypatch):
    out = screen(monkeypatch, NO_COLOR="1")
    say(f"error: flwr supernode: no answer from the server's control port (its address is in /{'x' * 30}); start it")
    assert out.getvalue().startswith("error: flwr supernode: no answer from")
    out.seek(0), out.truncate()
    command = f"FLWR_HOME=/{'y' * 40} flwr stop 1210960356280891820"
    say(f"the run may have been stopped; list runs with: {command}")
    assert out.getvalue().splitlines()[1] == f"  {command}"


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_color_is_for_terminals_that_want_it(monkeypatch, environment):
    out = screen(monkeypatch, **environment)
    say("ok    ok-site  all is ok", mark="ok", verdict="ok")
    shown = "ok" if environment else "\x1b[32mok\x1b[0m"
    assert out.getvalue() == f"{shown}    ok-site  all is ok\n"


def test_the_marked_word_is_searched_behind_the_name(monkeypatch):
    out = screen(monkeypatch)
    say_row("failed-run     failed", mark="failed", verdict="fail", start=14)
    assert out.getvalue() == "failed-run     \x1b[31mfailed\x1b[0m\n"


def test_a_note_that_does_not_fit_stands_below_its_row(monkeypatch):
    out = screen(monkeypatch, NO_COLOR="1")
    say_row("fedavg  completed", "short")
    say_row("fedavg  failed", "word " * 30)
    first, second, *rest = out.getvalue().splitlines()
    assert (first, second) == ("fedavg  completed  short", "fedavg  failed")
    assert all(line.startswith("    word") and len(line) <= 80 for line in rest)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_control_code_of_others_reaches_the_terminal(monkeypatch, capsys, is_terminal):
    hostile = "\x1b]0;owned\x07\x1b[2J \u202egnp.exe \r overwritten"
    out = screen(monkeypatch, NO_COLOR="1") if is_terminal else None
    say(hostile)
    say_row(hostile, hostile)
    text = out.getvalue() if out else capsys.readouterr().out
    assert not set("\x1b\x07\u202e\r") & set(text)
    assert "\\x1b]0;owned\\x07" in text


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.just(" "), max_size=300)


@given(WORDS, st.integers(20, 100), st.integers(0, 40))
def test_wrapping_loses_and_adds_no_word_and_keeps_the_width(line, width, hang):
    lines = wrap_line(line, width, hang)
    assert " ".join(" ".join(lines).split()) == " ".join(line.split())
    rest = lines[1:]
    for each in rest:
        assert terminal._cells(each) <= width or " " not in each.strip() or ": fedveil " in line or ": flwr " in line


def test_wide_characters_count_as_two_columns_and_combining_ones_as_none():
    assert wrap_line("漢字 " * 10, 20, 2)[0] == "漢字 漢字 漢字 漢字"
    assert wrap_line("e\u0301" * 20, 20, 2) == ["e\u0301" * 20]


def test_a_closed_standard_output_is_no_error(monkeypatch, capfd):
    monkeypatch.setattr(terminal.sys, "stdout", None)
    say("nothing")
    say_row("nothing", "more")
    assert capfd.readouterr() == ("", "")
