"""Page components that the report does not provide: links, times, audit-log lines."""

from __future__ import annotations

import math
import re
import shlex
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedveil.console.runs.progress_bar import countdown_words
from fedveil.console.web import safe_files
from fedveil.console.web.background import BackgroundQueries
from fedveil.console.web.report.html import (
    FormattedNumber,
    Html,
    escape_text,
    html_details,
    html_table,
    html_tag,
    join_markup,
)
from fedveil.console.web.report.line_chart import ChartCurve, curves_svg
from fedveil.errors import StateError
from fedveil.records import audit_log
from fedveil.sanitize import sanitize

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
_WORDS = 600  # maximum characters in one log value
_SECONDS_DIGITS = 7  # maximum digits in a number of seconds that the page itself counts
_LONGEST_COMMAND = 2000
_MOST_POINTS = 2000  # maximum points in a chart
DRAWING = threading.Lock()  # because all threads share matplotlib's settings
STATES = {
    "completed": "completed", "running": "running", "online": "completed", "stopped": "stopped",
    "starting": "plain", "being asked": "plain", "not known": "plain",
}  # fmt: skip


@dataclass(frozen=True)
class LogVerdict:
    """The verdict on an audit log.

    `kind`: "good", "alert", or "wait" while unknown. `anchor`: the log's current anchor.
    """

    words: str
    kind: str
    anchor: str = ""


def log_verdict(later: BackgroundQueries, file: Path) -> LogVerdict:
    """Check that the log has not been changed, as `fedveil log verify` does without an anchor."""
    answer = later.ask(("verdict", file), safe_files.file_stamps([file]), lambda: _verified(file))
    if answer.value is None:
        return LogVerdict(answer.why or "checking", "alert" if answer.why else "wait")
    if not answer.is_new and answer.value.kind == "good":
        return LogVerdict(
            f"{answer.since}: {answer.value.words} Newer lines are being checked.",
            "wait",
            answer.value.anchor,
        )
    return answer.value


def _verified(file: Path) -> LogVerdict:
    try:
        safe_files.require_bounded(file, audit_log.log_bytes(file))
        files, head = audit_log.list_log_files(file), audit_log.verify_log(file)
        lines, damaged = head.lines - audit_log.start_of(files[0]).lines, audit_log.count_damaged(files)
    except StateError as error:
        return LogVerdict(sanitize(error, 1000), "alert")
    if damaged:
        words = f"{damaged:,} lines are damaged, as the log itself records; all other lines are unchanged."
        return LogVerdict(words, "alert", str(head))
    return LogVerdict(
        f"{lines:,} lines, all unchanged. Lines cut off at the end, or a fully rewritten log, are detected only "
        "with an anchor that another party keeps: fedveil log verify --anchor.",
        "good",
        str(head),
    )


def page_link(base: str, path: Sequence[str], words: object) -> Html:
    """Return a link to a dashboard page; each path part, with any content, becomes one URL component."""
    return Html(f'<a href="{base}/{"/".join(map(url_part, path))}">{escape_text(words)}</a>')


def url_part(text: str) -> str:
    """Return a text, such as a name of a file that is no valid UTF-8, as one component of a URL."""
    return quote(text, safe="", errors="replace")


def state_badge(word: str, left: str = "") -> Html:
    """Return a state as a colored tag that contains the word and, in amber, the remaining sites."""
    if left:
        return html_tag("span", f"{word}, {left}", "tag partial")
    return html_tag("span", word, f"tag {STATES.get(word, 'failed')}")


def round_progress(folder: Path) -> Html:
    """Return the state of a run's round, with seconds that the page itself counts; "" if unknown."""
    countdown = countdown_words(folder)
    seconds: object = countdown.seconds
    if countdown.seconds.isdecimal() and len(countdown.seconds) <= _SECONDS_DIGITS:
        seconds = Html(f'<span data-step="{countdown.step:d}">{countdown.seconds}</span>')
    return join_markup([escape_text(countdown.before), escape_text(seconds), escape_text(countdown.after)], "")


def command_line(*words: object) -> Html:
    """Return a shell command with a button that copies it; "" for one that is too long to be shown whole.

    A path may contain anything: each word is quoted for the shell, and the button exists for the page's script alone.
    """
    text = shlex.join(map(str, words))
    if len(text) > _LONGEST_COMMAND or not text.isprintable():
        return Html("")
    return Html(
        f'<span class="command"><code>{escape_text(text)}</code> <button type="button" hidden>Copy</button></span>'
    )


def fact_tiles(tiles: Iterable[tuple[str, object, object]]) -> Html:
    """Return key figures as tiles: name, value, and a note in small print, which may be ""."""
    return html_tag(
        "dl",
        join_markup(
            html_tag(
                "div",
                join_markup([
                    html_tag("dt", name), html_tag("dd", value), html_tag("dd", note, "note") if note else "",
                ]),
            )
            for name, value, note in tiles
        ),
        "facts tiles",
    )  # fmt: skip


def failure_count(count: int) -> object:
    """Return the number of failures, colored if there are any."""
    return FormattedNumber(f'<span class="failed">{count:,}</span>') if count else count


def format_time(value: object) -> object:
    """Format a time to the second in UTC; text that is not a time is returned unchanged."""
    try:
        moment = (
            datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else datetime.fromisoformat(str(value))
        )
        iso = moment.astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return sanitize(value, 40)
    return Html(f'<time datetime="{iso}"><span>{iso[:10]}</span> {iso[11:19]}</time>')


def format_duration(started: object, ended: object) -> str:
    """Return the time between two ISO 8601 times, such as "2 h 5 min"; "" if one is missing or malformed."""
    try:
        return format_seconds(
            (datetime.fromisoformat(str(ended)) - datetime.fromisoformat(str(started))).total_seconds()
        )
    except (ValueError, TypeError, OverflowError):
        return ""


def format_seconds(seconds: float) -> str:
    """Return a length of time as words, such as "2 h 5 min"; a negative one as "0 s"."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24:,} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def log_rows(lines: Iterable[dict[str, Any]]) -> list[list[object]]:
    """Return log lines as rows for `html_table(LOG_HEAD, ...)`: rounds counted from 1, long hashes shortened."""
    rows = []
    for line in lines:
        why = "; ".join(sanitize(line[key]) for key in ("cause", "reason") if line.get(key))
        rest = [f"{sanitize(k, 80)} {_value(v)}" for k, v in line.items() if k not in _OWN and v not in ("", None)]
        parts = [_sizes(line), why, html_details("more", ", ".join(rest)) if rest else ""]
        about = join_markup(filter(None, parts), " ")
        event = sanitize(line.get("event", "?"), 40)
        rows.append([
            plain_number(line.get("n")), format_time(line.get("time", "")),
            html_tag("span", event, "tag failed") if event in _FAILURES else event,
            sanitize(line.get("run", ""), 100), rounds_from_1(line.get("round")), sanitize(line.get("site", ""), 80),
            about,
        ])  # fmt: skip
    return rows


LOG_HEAD = ("line", "time (UTC)", "event", "run", "round", "site", "what")


def _sizes(line: dict[str, Any]) -> str:
    """Return a line's sizes in bytes, or "" if it has none."""
    names = (("up_bytes", "upload bytes"), ("down_bytes", "download bytes"), ("bytes", "bytes"))
    sizes = [f"{line[key]:,} {words}" for key, words in names if type(line.get(key)) is int]
    return f"{', '.join(sizes)}." if sizes else ""


def rounds_from_1(round_: object) -> object:
    """Return a round number counted from 1."""
    return str(round_ + 1) if type(round_) is int else sanitize("" if round_ is None else round_, 20)


def plain_number(value: object) -> str:
    """Format a number that is not a count, such as a line number, without separators."""
    return sanitize("" if value is None else value, 20)


def chart_with_table(title: str, x: str, y: str, points: Sequence[tuple[float, float]], name: str) -> Html:
    """Return a curve with its collapsed table; "" if there are no points."""
    known = [(x_, y_) for x_, y_ in points if _is_number(x_) and _is_number(y_)]
    every = max(1, math.ceil(len(known) / _MOST_POINTS))
    known = [point for i, point in enumerate(known) if i % every == 0 or i == len(known) - 1]
    if not known:
        return Html("")
    with DRAWING:
        figure = Html(curves_svg(title, x, y, [ChartCurve(name, known, 0)], integer_x=True))
    numbers = html_details(
        f"{title}: the numbers", html_table([x, y], [[str(x_), f"{y_:.6g}"] for x_, y_ in known], caption=title)
    )
    return html_tag("figure", join_markup([figure, numbers]))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300


def _value(value: object) -> str:
    if isinstance(value, list | dict):
        return f"({len(value)})"
    text = sanitize(value, _WORDS)
    return f"{text[:12]}..." if _HASH.fullmatch(text) else text
