"""Terminal output: one printer for lines of text, a console for tables and bars, Markdown for our docstrings.

| output | a terminal | a file or a pipe |
|---|---|---|
| a line | wrapped to the width, at most MAX_WIDTH, with a hanging indent | one line |
| ok, warn, fail | in color, unless NO_COLOR is set or TERM is "dumb" | without color |
| text from a server, a site or a run folder | sanitized | sanitized |

A line is never broken inside a command to copy, such as "fedveil submit --config FILE".
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from typing import TYPE_CHECKING, Literal, TextIO

from fedveil.sanitize import sanitize

if TYPE_CHECKING:  # takes a twentieth of a second, which a health check does not need
    from rich.console import Console

MAX_WIDTH = 100
Verdict = Literal["ok", "warn", "fail"]
_COLORS = {"ok": "32", "warn": "33", "fail": "31"}
_MIN_TEXT = 24  # columns; with fewer beside the hanging indent, the indent becomes 2
_LONGEST = 100_000  # characters
# A command at the end of a clause is one word, so that it can be copied; punctuation may follow it.
_WORD = re.compile(r"( *)((?<=: )(?:fedveil|\w+=\S+ flwr) .+?(?:[;,)](?=\s|$)|$)|\S+)")


def say(
    text: object = "",
    *,
    hang: int = 2,
    mark: str = "",
    verdict: Verdict | None = None,
    start: int = 0,
    file: TextIO | None = None,
    flush: bool = False,
) -> None:
    """Print lines of text; on a terminal, wrap each to the width.

    Args:
        text: one or more lines; characters that could control a terminal are escaped.
        hang: columns by which a line's continuation is indented.
        mark: the word at which `verdict` is shown in color.
        verdict: the color of `mark`; None for none.
        start: the column from which `mark` is searched for.
        file: default: standard output.
        flush: whether to write at once.
    """
    stream = sys.stdout if file is None else file
    width = _width(stream)
    for line in str(text).split("\n"):
        lines = wrap_line(sanitize(line, _LONGEST), width, hang) if width else [sanitize(line, _LONGEST)]
        if verdict and mark and _is_colored(stream):
            colored = f"\x1b[{_COLORS[verdict]}m{mark}\x1b[0m"
            lines[0] = lines[0][:start] + lines[0][start:].replace(mark, colored, 1)
        print("\n".join(lines), file=stream, flush=flush)


def say_row(row: str, note: str = "", *, mark: str = "", verdict: Verdict | None = None, start: int = 0) -> None:
    """Print a table row and a note: on one line if it fits or this is no terminal, otherwise the note below the row."""
    width = _width(sys.stdout)
    line = f"{row}  {note}".rstrip()
    if not width or _cells(line) <= width:
        say(line, mark=mark, verdict=verdict, start=start)
        return
    say(row.rstrip(), mark=mark, verdict=verdict, start=start)
    say(f"    {note}", hang=4)


def wrap_line(line: str, width: int, hang: int) -> list[str]:
    """Break a line at spaces into lines of at most `width` columns, if no word is wider; indent all but the first."""
    indent = len(line) - len(line.lstrip(" "))
    if _cells(line) <= width or (indent and line.lstrip().startswith("fedveil ")):
        return [line]
    if width - hang < _MIN_TEXT:
        hang = 2
    lines, current = list[str](), ""
    for match in _WORD.finditer(line):
        space, word = match.groups()
        if current.strip() and _cells(current + space + word) > width:
            lines.append(current)
            current = " " * hang + word
        else:
            current += space + word
    return [*lines, current]


def _width(stream: TextIO | None) -> int:
    """Return a terminal's width in columns, at most MAX_WIDTH; 0 if the stream is no terminal."""
    if stream is None or not stream.isatty():
        return 0
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns):
        return min(int(columns), MAX_WIDTH)
    try:
        return min(os.get_terminal_size(stream.fileno()).columns or 80, MAX_WIDTH)
    except OSError:  # a terminal without a size
        return 80


def _is_colored(stream: TextIO | None) -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not is_plain


def _cells(text: str) -> int:
    """Return the columns that a text takes: 2 for wide characters, 0 for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def make_console() -> Console:
    """Return a console that prints strings unchanged.

    Text that may contain escape codes must first pass through `fedveil.sanitize.sanitize`.

    """
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def render_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown: join table rows; put blank lines before tables, formulas and disclosures."""
    lines: list[str] = []
    for line in docstring.splitlines():
        if lines and lines[-1].startswith("|") and not lines[-1].rstrip().endswith("|"):
            lines[-1] = f"{lines[-1].rstrip()} {line.strip()}"
            continue
        before = lines[-1] if lines else ""
        begins = [line.startswith(mark) and not before.startswith(mark[:1]) for mark in ("|", "    ")]
        if before and (any(begins) or line.startswith("The server learns:")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def ask_to_delete() -> bool:
    """Ask whether to delete what was listed; anything but yes means no."""
    try:
        return input("delete them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
