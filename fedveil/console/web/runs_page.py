"""The Runs page: runs in progress, then what needs a person, then all runs to filter, sort and compare.

Nothing here needs a script: the filter and the comparison are forms that only read, and their values are bounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from urllib.parse import urlencode

from fedveil.console.runs.run_reader import progress_of
from fedveil.console.web.components import (
    format_seconds,
    format_time,
    page_link,
    round_progress,
    state_badge,
    url_part,
)
from fedveil.console.web.pages import PageNotFound, PageQuery, first_value
from fedveil.console.web.report.html import Html, escape_text, html_table, html_tag, join_markup
from fedveil.console.web.run_summaries import RunSummary
from fedveil.sanitize import sanitize

__all__ = [
    "MOST_COMPARED", "PER_PAGE", "RunsQuery", "describe_time_left", "page_links", "reading_row", "running_card",
    "runs_table", "select_runs", "sort_options", "state_links", "tick_box",
]  # fmt: skip

PER_PAGE = 50
MOST_COMPARED = 6  # as many as a chart can tell apart
_LONGEST_TEXT = 80
_MOST_PAGE = 10_000
_LONGEST_REASON = 160
_STATES = ("running", "completed", "stopped", "failed")
_ORDERS: Mapping[str, tuple[str, Callable[[RunSummary], Any]]] = {
    "newest": ("newest first", lambda run: 0),
    "oldest": ("oldest first", lambda run: run.place.changed),
    "name": ("name", lambda run: run.place.name.casefold()),
    "loss": ("lowest test loss", lambda run: (run.loss is None, run.loss)),
    "bytes": ("most bytes uploaded", lambda run: -run.upload_bytes),
    "lasted": ("longest", lambda run: (run.lasted is None, -(run.lasted or 0.0))),
}


@dataclass(frozen=True)
class RunsQuery:
    """A reader's choice of runs for the list.

    Attributes:
        text: runs whose name, method, protection or federation contains this text; "" for all.
        state: "running", "completed", "stopped" or "failed"; "" for all.
        order: a key of the orders that the page offers.
        page: counted from 1.
    """

    text: str = ""
    state: str = ""
    order: str = "newest"
    page: int = 1

    @classmethod
    def from_query(cls, query: PageQuery) -> RunsQuery:
        """Return what the query of an address asks for. Raises PageNotFound for a value that the page cannot offer."""
        state, order = first_value(query, "state"), first_value(query, "sort") or "newest"
        page = first_value(query, "page") or "1"
        if state and state not in _STATES:
            raise PageNotFound(f'state: expected one of {", ".join(_STATES)}, found "{sanitize(state, 40)}"')
        if order not in _ORDERS:
            raise PageNotFound(f'sort: expected one of {", ".join(_ORDERS)}, found "{sanitize(order, 40)}"')
        if not (page.isascii() and page.isdecimal() and len(page) < 6 and 1 <= int(page) <= _MOST_PAGE):
            raise PageNotFound(f'page: expected a number from 1, found "{sanitize(page, 40)}"')
        return cls(first_value(query, "text").strip()[:_LONGEST_TEXT], state, order, int(page))

    def address(self, base: str) -> Html:
        """Return the address of the page that shows this, for an attribute."""
        values = {"text": self.text, "state": self.state, "sort": self.order, "page": str(self.page)}
        plain = {"text": "", "state": "", "sort": "newest", "page": "1"}
        asked = urlencode({name: value for name, value in values.items() if value != plain[name]}, errors="replace")
        return escape_text(f"{base}/{'?' if asked else ''}{asked}")


def select_runs(runs: Sequence[RunSummary], asked: RunsQuery) -> list[RunSummary]:
    """Return the runs that match, in the order asked for. `runs`: newest first."""
    text = asked.text.casefold()
    chosen = [
        run
        for run in runs
        if (not asked.state or _group(run) == asked.state)
        and text in f"{run.place.key} {run.method} {run.protection}".casefold()
    ]
    return sorted(chosen, key=_ORDERS[asked.order][1])


def _group(run: RunSummary) -> str:
    return "failed" if run.is_failure else run.state


def state_links(runs: Sequence[RunSummary], asked: RunsQuery, base: str) -> list[Html]:
    """Return a link for each state that a run has, with their number; the one in use is marked."""
    counts = Counter(map(_group, runs))
    words = {"": ("all", len(runs))} | {state: (state, counts[state]) for state in _STATES if counts[state]}
    words |= {"failed": ("failed or died", counts["failed"])} if counts["failed"] else {}
    current = ' aria-current="true"'
    return [
        Html(
            f'<a href="{replace(asked, state=state, page=1).address(base)}"{current if state == asked.state else ""}>'
            f"{name} <b>{count:,}</b></a>"
        )
        for state, (name, count) in words.items()
    ]


def sort_options(asked: RunsQuery) -> Html:
    """Return the options of the field that sorts."""
    return join_markup(
        Html(f'<option value="{key}"{" selected" if key == asked.order else ""}>{words}</option>')
        for key, (words, _) in _ORDERS.items()
    )


def page_links(asked: RunsQuery, count: int, base: str) -> list[Html]:
    """Return links to the pages before and after this one, if `count` runs need more than one page."""
    links = [(asked.page - 1, "Previous page"), (asked.page + 1, "Next page")]
    last = max(1, -(-count // PER_PAGE))
    return [
        Html(f'<a href="{replace(asked, page=page).address(base)}">{words}</a>')
        for page, words in links
        if 1 <= page <= last and page != asked.page
    ]


def tick_box(key: str, is_ticked: bool = False) -> Html:
    """Return a box that chooses a run for the comparison. Its value is the quoted key, which may hold any character."""
    words = html_tag("span", f"Compare {sanitize(key, 200)}", "unseen")
    return Html(
        f'<label class="tick"><input type="checkbox" name="run" value="{escape_text(url_part(key))}"'
        f"{' checked' if is_ticked else ''}>{words}</label>"
    )


def runs_table(
    runs: Sequence[RunSummary], asked: RunsQuery, base: str, federation_of: Callable[[RunSummary], str] | None
) -> Html:
    """Return the table of one page of runs. `federation_of`: None if there is no column for the federation."""
    head = ["compare", *(["federation"] if federation_of else []), "run", "state", "method; protection", "rounds",
            "test loss", "upload bytes", "sites", "started (UTC)", "lasted"]  # fmt: skip
    begin = (asked.page - 1) * PER_PAGE
    rows = [
        [
            tick_box(run.place.key), *([federation_of(run)] if federation_of else []),
            page_link(base, ("runs", run.place.key), run.place.name), _state_cell(run),
            f"{run.method}; {run.protection}" if run.protection != "none" else run.method,
            f"{run.rounds_done} of {run.rounds or '?'}", run.loss, run.upload_bytes, run.sites,
            format_time(run.started), "" if run.lasted is None else format_seconds(run.lasted),
        ]
        for run in runs[begin : begin + PER_PAGE]
    ]  # fmt: skip
    return html_table(head, rows, caption="Runs")


def _state_cell(run: RunSummary) -> Html:
    """Return a run's state, with the reason for an end."""
    reason = html_tag("span", _shortened(run.reason), "note") if run.reason and run.state != "running" else ""
    return join_markup(filter(None, [state_badge(run.state, run.sites_left), reason]), " ")


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 1]}\u2026"


def running_card(run: RunSummary, base: str) -> dict[str, Any]:
    """Return what the card of a run in progress shows."""
    progress = progress_of(run.place.folder)
    number, rounds = progress.get("round"), run.rounds
    current = number + 1 if type(number) is int and 0 <= number < (rounds or 0) else run.rounds_done + 1
    return {
        "link": page_link(base, ("runs", run.place.key), run.place.key),
        "state": state_badge(run.state, run.sites_left),
        "about": run.method if run.protection == "none" else f"{run.method}; {run.protection}",
        "round": f"Round {min(current, rounds)} of {rounds}" if rounds else f"Round {current}",
        "done": run.rounds_done, "rounds": rounds, "now": round_progress(run.place.folder),
        "left": describe_time_left(run, progress), "loss": run.loss,
    }  # fmt: skip


def describe_time_left(run: RunSummary, progress: Mapping[str, Any], now: float | None = None) -> str:
    """Return how long the run still takes if its rounds go on as the last ones did, or why that is not known.

    Args:
        progress: progress.json.
        now: seconds since 1970.
    """
    if run.rounds is None or run.rounds_done >= run.rounds:
        return ""
    if not run.pace:
        return "How long it still takes is not known before its first round has ended."
    each, since = median(run.pace), progress.get("since")
    elapsed = 0.0
    if progress.get("phase") == "round" and isinstance(since, int | float):
        elapsed = min(max(0.0, (time.time() if now is None else now) - since), each)
    seconds = each * (run.rounds - run.rounds_done) - elapsed
    of = "the last round" if len(run.pace) == 1 else f"the last {len(run.pace)} rounds"
    return f"About {format_seconds(seconds)} left, at the pace of {of}; scoring on the server comes on top."


def reading_row(count: int) -> Html:
    """Return a note on runs that are not read yet; "" if there are none."""
    words = f"{count:,} runs are being read; they will appear here in a moment."
    return html_tag("p", words, "wait") if count else Html("")
