"""The Compare page: chosen runs side by side: configs first, then loss, bytes and attacks, then curves.

| the runs | the page |
|---|---|
| were not scored alike | says so first, and draws no loss of theirs on one axis |
| have a run without any protection | names it as the undefended baseline; no other run is called so |
| have curves of fewer than three points | shows the numbers alone |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fedveil.attacks.audit.findings import AuditReport
from fedveil.console.runs.run_reader import RunView
from fedveil.console.runs.summary import (
    BASELINE,
    different_scoring,
    metric_names,
    protection,
    run_label,
    upload_ratio,
)
from fedveil.console.web.components import DRAWING, page_link, state_badge
from fedveil.console.web.pages import PageQuery
from fedveil.console.web.report import tradeoff, tradeoff_plot
from fedveil.console.web.report.html import Html, html_details, html_table, html_tag, join_markup
from fedveil.console.web.report.key_figures import attack_figure
from fedveil.console.web.report.line_chart import ChartCurve, curves_svg
from fedveil.console.web.run_parts import LEAST_POINTS
from fedveil.console.web.safe_files import RunLocation
from fedveil.errors import StateError
from fedveil.sanitize import sanitize

__all__ = ["ComparedRun", "chosen_keys", "compare_about", "group_by_scoring"]

_MOST_KEYS = 100  # differences of config
_MOST_METRICS = 12
_MOST_POINTS = 2000
_LONGEST_NAME, _LONGEST_TITLE = 60, 20


@dataclass(frozen=True)
class ComparedRun:
    """A run on the page. `run` is named by its key, which is unique; `audit` is None without a readable audit."""

    place: RunLocation
    run: RunView
    audit: AuditReport | None
    audit_error: str = ""

    @property
    def name(self) -> str:
        """Return the run's key, for display."""
        return sanitize(self.place.key, _LONGEST_NAME)

    @classmethod
    def from_run(cls, place: RunLocation, run: RunView) -> ComparedRun:
        """Return a run for the page, with its audit."""
        # The runs of two folders may have one name. The functions that compare runs tell them apart by it.
        named = replace(run, folder=Path("/", place.key))
        try:
            return cls(place, named, AuditReport.read(place.folder))
        except StateError as error:
            return cls(place, named, None, sanitize(error, 300))


def chosen_keys(query: PageQuery) -> list[str]:
    """Return the keys of the runs that a query names, each once, in order. Their boxes' values are quoted."""
    return list(dict.fromkeys(unquote(value) for value in query.get("run", ())))


def group_by_scoring(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Return the runs in groups that were scored on the same rows in the same way, in order."""
    groups: list[list[ComparedRun]] = []
    for one in runs:
        alike = next((group for group in groups if not different_scoring([group[0].run, one.run])), None)
        if alike is None:
            groups.append([one])
        else:
            alike.append(one)
    return groups


def compare_about(runs: Sequence[ComparedRun], base: str) -> dict[str, Any]:
    """Return the variables of the page about two runs or more."""
    views = [one.run for one in runs]
    groups = group_by_scoring(runs)
    return {
        "unlike": different_scoring(views), "baseline": _baseline_words(views),
        "differences": _differences(runs), "table_of": _overview(runs, base), "tradeoff": _tradeoff(runs),
        "attack_notes": [f"{one.name}: {one.audit_error}" for one in runs if one.audit_error],
        "charts": _charts(runs, groups), "scores": _scores(runs, groups),
        "groups": [", ".join(one.name for one in group) for group in groups] if len(groups) > 1 else [],
    }  # fmt: skip


def _baseline_words(views: Sequence[RunView]) -> str:
    """Name the runs without any protection, or say that there is none; a protected run is never called a baseline."""
    plain = [sanitize(run.name, _LONGEST_NAME) for run in views if run.method == BASELINE and protection(run) == "none"]
    if not plain:
        return "None of these runs is FedAvg without protection, so none is an undefended baseline here."
    is_one = len(plain) == 1
    return f"Undefended baseline{'' if is_one else 's'}: {', '.join(plain)} (FedAvg without protection)."


def _differences(runs: Sequence[ComparedRun]) -> Html:
    """Return the config keys whose values differ, as a table; "" if none does."""
    configs = [one.run.config.get("config") or {} for one in runs]
    methods = [(one.run.config.get("method") or {}).get("fields") or {} for one in runs]
    flat = [{**config, **{f"method field {k}": v for k, v in fields.items()}} for config, fields in
            zip(configs, methods, strict=True)]  # fmt: skip
    keys = list(dict.fromkeys(key for values in flat for key in values))
    rows = [
        [html_tag("code", sanitize(key, 120)), *(sanitize(values.get(key, "unset"), 200) for values in flat)]
        for key in keys
        if key != "run.name" and len({str(values.get(key, "unset")) for values in flat}) > 1
    ]
    if not rows:
        return Html("")
    table = html_table(["key", *(one.name for one in runs)], rows[:_MOST_KEYS], caption="Config keys that differ")
    more = len(rows) - _MOST_KEYS
    return join_markup([table, html_tag("p", f"{more:,} more keys differ.", "note") if more > 0 else ""])


def _overview(runs: Sequence[ComparedRun], base: str) -> Html:
    head = ["run", "method", "protection", "state", "rounds", "test loss", "upload bytes", "upload / baseline",
            "strongest attack", "about the attack"]  # fmt: skip
    views, rows = [one.run for one in runs], []
    for one in runs:
        run, (_, attack, about) = one.run, attack_figure(one.audit)
        loss, ratio = run.final.get("loss"), upload_ratio(run, views)
        shown_ratio = ratio if ratio is None else f"{ratio:.2f}"
        rows.append([
            page_link(base, ("runs", one.place.key), one.name), sanitize(run.method, 60), protection(run),
            state_badge(sanitize(run.status.get("state", "unknown"), 20)), run.rounds_done,
            loss if isinstance(loss, int | float) else None, run.upload_bytes, shown_ratio,
            "unreadable" if one.audit_error else attack, about if one.audit else None,
        ])  # fmt: skip
    return html_table(head, rows, caption="Runs compared")


def _tradeoff(runs: Sequence[ComparedRun]) -> Html:
    """Return the picture of attack, loss and bytes if a run was attacked and all were scored alike; otherwise ""."""
    if different_scoring([one.run for one in runs]) or not any(one.audit for one in runs):
        return Html("")
    arms = []
    for one in runs:
        if one.audit_error:
            continue
        arms.append(replace(tradeoff.read_tradeoff_run(replace(one.run, folder=one.place.folder)), name=one.name))
    if not any(arm.attack or arm.broken for arm in arms):
        return Html("")
    with DRAWING:
        picture = tradeoff_plot.tradeoff_svg(arms)
    if not picture:
        return Html("")
    caption = html_tag("figcaption", tradeoff_plot.tradeoff_caption(arms))
    return html_tag("figure", join_markup([Html(picture), caption]), "forest")


def _charts(runs: Sequence[ComparedRun], groups: Sequence[Sequence[ComparedRun]]) -> list[Html]:
    """Return the charts: for each group, loss by round and by bytes; for all runs, bytes by round."""
    look = {one.place.key: i for i, one in enumerate(runs)}
    figures = []
    for number, group in enumerate(groups, 1):
        alone = f": {group[0].name[:_LONGEST_TITLE]}" if len(group) == 1 else ""
        of = f" (group {number}{alone})" if len(groups) > 1 else ""
        loss = {one.place.key: _known(one.run.curve("loss")) for one in group}
        sent = {one.place.key: dict(one.run.uploaded) for one in group}
        by_round = [ChartCurve(one.name, loss[one.place.key], look[one.place.key]) for one in group]
        against = [
            ChartCurve(
                one.name,
                [(sent[one.place.key][x] / 1e6, y) for x, y in loss[one.place.key] if x in sent[one.place.key]],
                look[one.place.key],
            )
            for one in group
        ]
        figures.append(_figure(f"Test loss by round{of}", "rounds done", "loss", by_round, True))
        figures.append(_figure(f"Test loss by bytes{of}", "MB uploaded, all sites", "loss", against, False))
    uploads = [ChartCurve(one.name, [(x, y / 1e6) for x, y in one.run.uploaded], look[one.place.key]) for one in runs
               if one.run.upload_bytes]  # fmt: skip
    figures.append(_figure("Uploaded so far", "rounds done", "MB, all sites", uploads, True))
    return [figure for figure in figures if figure]


def _figure(title: str, x: str, y: str, curves: Sequence[ChartCurve], is_by_round: bool) -> Html:
    """Return a chart with its numbers below; "" if no curve has enough points for one."""
    curves = [replace(curve, points=_thinned(curve.points)) for curve in curves]
    if not any(len(curve.points) >= LEAST_POINTS for curve in curves):
        return Html("")
    with DRAWING:
        picture = Html(curves_svg(title, x, y, curves, integer_x=is_by_round))
    rows = [[curve.label, f"{x_:.6g}", f"{y_:.6g}"] for curve in curves for x_, y_ in curve.points]
    numbers = html_details(f"{title}: the numbers", html_table(["run", x, y], rows, caption=title))
    return html_tag("figure", join_markup([picture, numbers]))


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    every = max(1, -(-len(points) // _MOST_POINTS))
    return [point for i, point in enumerate(points) if i % every == 0 or i == len(points) - 1]


def _known(points: Sequence[tuple[int, Any]]) -> list[tuple[int, float]]:
    return [(x, float(y)) for x, y in points if isinstance(y, int | float) and abs(y) < 1e300]


def _scores(runs: Sequence[ComparedRun], groups: Sequence[Sequence[ComparedRun]]) -> Html:
    """Return each run's last scores, with the group that it was scored in if there are several; "" without scores."""
    names = metric_names([one.run for one in runs])[:_MOST_METRICS]
    if not names:
        return Html("")
    of = {one.place.key: str(number) for number, group in enumerate(groups, 1) for one in group}
    column = ["group"] if len(groups) > 1 else []
    rows = [
        [one.name, *([of[one.place.key]] if column else []), *(_score(one.run.final.get(name)) for name in names)]
        for one in runs
    ]
    return html_table(["run", *column, *(sanitize(run_label(n), 40) for n in names)], rows, caption="Last scores")


def _score(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
