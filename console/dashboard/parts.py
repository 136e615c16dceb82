"""What pages are made of beside the report's parts: links, times, the lines of an audit log."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedveil.console.dashboard import bounded
from fedveil.console.dashboard.later import Later
from fedveil.console.report.figures import Curve, svg
from fedveil.console.report.page import Figure, Html, fold, join, table, tag, text
from fedveil.console.runs.progress import counted
from fedveil.errors import StateError
from fedveil.foreign import shown
from fedveil.records import audit_log

_OWN = (
    "n",
    "time",
    "event",
    "previous",
    "hash",
    "run",
    "round",
    "site",
    "reason",
    "cause",
    "bytes",
    "up_bytes",
    "down_bytes",
)
_FAILURES = ("failed", "refused", "withheld")
_HASH = re.compile(r"(\d+:)?[0-9a-f]{40,}")
_WORDS = 600  # characters of one value of a log
_SECONDS_DIGITS = 7  # of a number of seconds that the page counts on
_MOST_POINTS = 2000  # of a curve
DRAWING = threading.Lock()  # matplotlib's settings are one for all threads
STATES = {"completed": "completed", "running": "running", "online": "completed", "stopped": "stopped"}


@dataclass(frozen=True)
class Verdict:
    """Of an audit log. `kind`: "good", "alert", or "wait" while nobody knows. `anchor`: the log's as it stands."""

    words: str
    kind: str
    anchor: str = ""


def verdict(later: Later, file: Path) -> Verdict:
    """Whether the log is as it was written, as `fedveil log verify` says without an anchor."""
    found = later.ask(("verdict", file), bounded.stamp([file]), lambda: _verified(file))
    if found.value is None:
        return Verdict(found.why or "is being checked", "alert" if found.why else "wait")
    if not found.is_new and found.value.kind == "good":
        return Verdict(
            f"{found.since}: {found.value.words} Lines that came since are being checked.", "wait", found.value.anchor
        )
    return found.value


def _verified(file: Path) -> Verdict:
    try:
        bounded.require_bounded(file, file.stat().st_size)
        head = audit_log.verify(file)
    except StateError as error:
        return Verdict(shown(error, 1000), "alert")
    return Verdict(
        f"{head.lines:,} lines, each as it was written. Lines cut off the end, or a log written anew as a whole, show "
        "only against an anchor that somebody else keeps: fedveil log verify --anchor.",
        "good",
        str(head),
    )


def link(base: str, path: Sequence[str], words: object) -> Html:
    """A link to a page of the dashboard; each part of the path is one component, whatever is in it."""
    return Html(f'<a href="{base}/{"/".join(quote(part, safe="") for part in path)}">{text(words)}</a>')


def state(word: str) -> Html:
    """A state in its colour, beside the word itself."""
    return tag("span", word, f"tag {STATES.get(word, 'failed')}")


def underway(folder: Path) -> Html:
    """Where a run's round is, with seconds that the page counts on by itself; "" where nothing says so."""
    found = counted(folder)
    seconds: object = found.seconds
    if found.seconds.isdecimal() and len(found.seconds) <= _SECONDS_DIGITS:
        seconds = Html(f'<span data-step="{found.step:d}">{found.seconds}</span>')
    return join([text(found.before), text(seconds), text(found.after)], "")


def failures(count: int) -> object:
    """A number of failures, in the colour of one where there are any."""
    return Figure(f'<span class="failed">{count:,}</span>') if count else count


def when(value: object) -> object:
    """A time, to the second and in UTC; text that is no time stays what it is."""
    try:
        moment = (
            datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else datetime.fromisoformat(str(value))
        )
        iso = moment.astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return shown(value, 40)
    return Html(f'<time datetime="{iso}"><span>{iso[:10]}</span> {iso[11:19]}</time>')


def log_rows(lines: Iterable[dict[str, Any]]) -> list[list[object]]:
    """The lines of a log for `table(LOG_HEAD, ...)`: rounds counted from 1, long hashes cut."""
    rows = []
    for line in lines:
        why = "; ".join(shown(line[key]) for key in ("cause", "reason") if line.get(key))
        rest = [f"{shown(k, 80)} {_value(v)}" for k, v in line.items() if k not in _OWN and v not in ("", None)]
        parts = [_sizes(line), why, fold("more", ", ".join(rest)) if rest else ""]
        about = join(filter(None, parts), " ")
        event = shown(line.get("event", "?"), 40)
        rows.append([
            plain(line.get("n")), when(line.get("time", "")),
            tag("span", event, "tag failed") if event in _FAILURES else event,
            shown(line.get("run", ""), 100), rounds_from_1(line.get("round")), shown(line.get("site", ""), 80), about,
        ])  # fmt: skip
    return rows


LOG_HEAD = ("line", "time (UTC)", "event", "run", "round", "site", "what")


def _sizes(line: dict[str, Any]) -> str:
    """The bytes that a line is about, "" without."""
    names = (("up_bytes", "upload bytes"), ("down_bytes", "download bytes"), ("bytes", "bytes"))
    found = [f"{line[key]:,} {words}" for key, words in names if type(line.get(key)) is int]
    return f"{', '.join(found)}." if found else ""


def rounds_from_1(round_: object) -> object:
    """A round as people count."""
    return str(round_ + 1) if type(round_) is int else shown("" if round_ is None else round_, 20)


def plain(value: object) -> str:
    """A number that is no count, such as that of a line: without separators."""
    return shown("" if value is None else value, 20)


def chart(title: str, x: str, y: str, points: Sequence[tuple[float, float]], name: str) -> Html:
    """A curve, and the same as a table behind a click; "" without a point."""
    known = [(x_, y_) for x_, y_ in points if _is_number(x_) and _is_number(y_)]
    every = max(1, math.ceil(len(known) / _MOST_POINTS))
    known = [point for i, point in enumerate(known) if i % every == 0 or i == len(known) - 1]
    if not known:
        return Html("")
    with DRAWING:
        figure = Html(svg(title, x, y, [Curve(name, known, 0)], integer_x=True))
    numbers = fold(f"{title}: the numbers", table([x, y], [[str(x_), f"{y_:.6g}"] for x_, y_ in known], caption=title))
    return tag("figure", join([figure, numbers]))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300


def _value(value: object) -> str:
    if isinstance(value, list | dict):
        return f"({len(value)})"
    said = shown(value, _WORDS)
    return f"{said[:12]}..." if _HASH.fullmatch(said) else said
