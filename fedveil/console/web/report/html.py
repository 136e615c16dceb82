"""Build small HTML pages: escaped text, tables, one style sheet for light and dark themes; no external resources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeGuard

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedveil import paths
from fedveil.sanitize import sanitize

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881;
  --mute: color-mix(in srgb, currentColor 65%, transparent);
  --good: #1a7f4b; --warn: #8a5a00; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --good: #4cc38a; --warn: #e3b341; --bad: #ff7b6b; } }
body { font: 15px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; max-width: 74rem; margin: 0 auto;
  padding: 2.2rem 1.4rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; } p { margin: .5rem 0; max-width: 60rem; }
.lead, .note, th, figcaption, summary { color: var(--mute); } .note { font-size: .88rem; }
.wide { overflow-x: auto; background: linear-gradient(to right, Canvas 40%, transparent) 0 / 2.4rem 100%,
  linear-gradient(to left, Canvas 40%, transparent) 100% / 2.4rem 100%,
  linear-gradient(to right, #8887, transparent) 0 / .9rem 100%,
  linear-gradient(to left, #8887, transparent) 100% / .9rem 100%; background-repeat: no-repeat;
  background-attachment: local, local, scroll, scroll; } /* a shadow where columns extend beyond the edge */
table { border-collapse: collapse; width: 100%; font-size: .92rem; margin: .5rem 0 .9rem; }
th { text-align: left; font-weight: 600; font-size: .82rem; vertical-align: bottom; }
th { border-bottom: 2px solid var(--line); }
th, td { padding: .42rem .55rem; } td { border-bottom: 1px solid var(--line); vertical-align: top; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tbody tr:hover { background: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1.2rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; } .figures figure, .forest { max-width: 40rem; }
.verdict { font-size: 1.12rem; font-weight: 600; } li, p, h1, h3 { overflow-wrap: anywhere; }
.wide td:not(.n) { min-width: 4.5rem; }
.tag { display: inline-block; padding: .05rem .55rem; border-radius: 1rem; border: 1px solid; font-size: .82rem; }
.completed { color: var(--good); } .partial { color: var(--warn); }
.failed { color: var(--bad); } .plain { color: inherit; }
.wait { border-left: 4px solid var(--line); background: var(--soft); padding: .6rem .9rem; }
.alert { border-left: 4px solid var(--bad); background: var(--soft); padding: .6rem .9rem; margin: .8rem 0; }
details { margin: .5rem 0; } summary { cursor: pointer; padding: .2rem 0; }
.contents ul { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; list-style: none; padding: 0; max-width: none; }
.contents a { display: inline-block; padding: .2rem 0; }
.keys { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: .8rem; }
.key { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .8rem; } .key p { margin: 0; }
.key dl { display: grid; grid-template-columns: 1fr 1fr; gap: .2rem .8rem; margin: .3rem 0 0; }
.key dt { color: var(--mute); font-size: .82rem; } .key dd { margin: 0; font-size: 1.12rem; font-weight: 600;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; } .key dd small { font-weight: 400; display: block; }
code, pre { font: .86rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
td code { overflow-wrap: anywhere; } ul { padding-left: 1.2rem; max-width: 60rem; } li { margin: .25rem 0; }
@media (max-width: 40rem) { /* a row is a card, with each cell after its column name */
  .wide { background: none; }
  .wide thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  .wide :is(table, caption, thead, tbody, tr) { display: block; } .wide td { white-space: normal; text-align: left;
    display: flow-root; padding: .12rem .5rem .12rem 9.2rem; border: 0; min-height: 1.4rem; overflow-wrap: anywhere; }
  .wide tr { border: 1px solid var(--line); border-radius: .5rem; margin: .6rem 0; padding: .3rem 0; }
  .wide td::before { content: attr(data-label); float: left; margin-left: -8.6rem; width: 8.2rem; color: var(--mute);
    font-size: .85rem; } .wide td:empty { display: none; }
  .texts td { padding-left: .6rem; } .texts td::before { float: none; margin: 0; display: block; width: auto; } }
@media print { /* on paper, nothing scrolls or expands: tables fit the page, and collapsed parts are open */
  body { max-width: none; padding: 0; font-size: 10pt; } .wide { overflow: visible; background: none; }
  table { font-size: 7.5pt; table-layout: auto; } th, td { padding: .2rem .25rem; overflow-wrap: anywhere; }
  .wide td:not(.n) { min-width: 0; } .n { white-space: normal; } td.n { white-space: nowrap; } th { hyphens: auto; }
  details::details-content { content-visibility: visible !important; display: block !important;
    height: auto !important; }
  tr, figure, .tag { break-inside: avoid; } h2, h3 { break-after: avoid; } summary { list-style: none; } }
"""


# The page's browser permissions, whatever its content: no scripts, requests, forms or frames. The figures
# contain style attributes.
_PERMITTED = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


Html = Markup  # text that is already HTML; everything else is escaped


class FormattedNumber(Markup):
    """A number with its unit, which tables align like a number."""


def escape_text(value: object) -> Html:
    """Return a value as HTML: integers with thousands separators, None as a dash."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html("&ndash;")
    if isinstance(value, int) and not isinstance(value, bool):
        return Html(f"{value:,}")
    if isinstance(value, float):
        return Html(f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}")
    return Html(escape(sanitize(value, 5000)))


def html_tag(name: str, content: object, kind: str = "") -> Html:
    """Return an element with escaped content."""
    attribute = f' class="{escape_text(kind)}"' if kind else ""
    return Html(f"<{name}{attribute}>{escape_text(content)}</{name}>")


def join_markup(parts: Iterable[object], between: str = "") -> Html:
    """Join HTML parts, escaping any that are not HTML."""
    return Html(between.join(escape_text(part) for part in parts))


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> Html:
    """Return a table with right-aligned numeric columns. A table with a caption can be reached by keyboard."""
    numeric = [
        bool(rows) and all(row[i] is None or isinstance(row[i], int | float | FormattedNumber) for row in rows)
        for i in range(len(head))
    ]
    kinds = ["n" if is_numeric else "" for is_numeric in numeric]
    columns = [equal_decimals([row[i] for row in rows]) if numeric[i] else None for i in range(len(head))]
    rows = [[row[i] if column is None else column[number] for i, column in enumerate(columns)]
            for number, row in enumerate(rows)]  # fmt: skip
    top = join_markup(_column(title, kind) for title, kind in zip(head, kinds, strict=True))
    labels = [f' data-label="{escape_text(title)}"' for title in head]
    body = join_markup(
        html_tag(
            "tr", join_markup(_cell(cell, kind, label) for cell, kind, label in zip(row, kinds, labels, strict=True))
        )
        for row in rows
    )
    named = [html_tag("caption", caption)] if caption else []
    whole = html_tag("table", join_markup([*named, html_tag("thead", html_tag("tr", top)), html_tag("tbody", body)]))
    scrolled = f' tabindex="0" role="region" aria-label="{escape_text(caption)}"' if caption else ""
    return Html(f'<div class="wide"{scrolled}>{whole}</div>')


def _cell(content: object, kind: str, label: str) -> Html:
    attribute = f' class="{kind}"' if kind else ""
    return Html(f"<td{attribute}{label}>{escape_text(content)}</td>")


def _column(title: str, kind: str) -> Html:
    attribute = f' class="{kind}"' if kind else ""
    return Html(f'<th scope="col"{attribute}>{escape_text(title)}</th>')


def equal_decimals(values: Sequence[object]) -> list[object]:
    """Return the numbers of a column with equally many decimals, if any is a fraction; other values stay as they are.

    The smallest number gets four significant digits, and at most four decimals.
    """
    numbers = [value for value in values if _is_number(value)]
    sizes = [abs(value) for value in numbers if math.isfinite(value) and value]
    if not any(isinstance(value, float) for value in numbers) or not sizes:
        return list(values)
    if min(sizes) < 5e-5:  # it would look like zero
        return list(values)
    decimals = 0 if max(sizes) >= 1000 else min(4, max(0, 3 - math.floor(math.log10(min(sizes)))))
    return [FormattedNumber(f"{value:,.{decimals}f}") if _is_number(value) else value for value in values]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def html_list(items: Iterable[object]) -> Html:
    """Return a bulleted list."""
    return html_tag("ul", join_markup(html_tag("li", item) for item in items))


def html_details(title: str, content: object) -> Html:
    """Return content that expands on a click."""
    return html_tag("details", join_markup([html_tag("summary", title), content]))


def html_document(title: str, body: Html) -> str:
    """Return the complete, self-contained page."""
    whole = template_environment("console/web/report/templates").get_template("report.html")
    return whole.render(title=title, body=body, style=Html(STYLE), permitted=_PERMITTED)


def template_environment(*folders: str) -> Environment:
    """Return an environment for templates in these folders, which escapes and bounds all text with `escape_text`."""
    return Environment(
        loader=FileSystemLoader([paths.find_folder(folder) for folder in folders]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_final,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _final(value: object) -> Html:
    if isinstance(value, StrictUndefined):
        str(value)  # raises an error that names the variable
    return escape_text(value)
