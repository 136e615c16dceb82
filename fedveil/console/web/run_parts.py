"""The parts of a run's page: progress, quality, what was given away, and its config and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.attacks.audit import verdict
from fedveil.attacks.audit.attack_words import describe_attack
from fedveil.attacks.audit.findings import AttackFinding, attack_names
from fedveil.cards.card import read_card
from fedveil.cards.signing import in_toto, verification
from fedveil.console.run_config_args import flatten_config
from fedveil.console.runs import disclosure, per_site
from fedveil.console.runs.privacy_statements import PrivacyFigure
from fedveil.console.runs.run_reader import RunView
from fedveil.console.runs.summary import metric_names, protection, run_label
from fedveil.console.web import safe_files
from fedveil.console.web.components import chart_with_table, command_line, format_duration, format_time, page_link
from fedveil.console.web.report import run_page
from fedveil.console.web.report.html import Html, html_table, html_tag, join_markup
from fedveil.console.web.safe_files import RunLocation
from fedveil.errors import StateError
from fedveil.sanitize import sanitize

__all__ = [
    "LEAST_POINTS", "attack_rows", "card_tile", "config_part", "given_away_part", "given_away_tiles",
    "next_steps", "progress_tiles", "quality_part",
]  # fmt: skip

LEAST_POINTS = 3  # a chart of fewer points says less than its numbers
_CURVES = 12
_MOST_KEYS = 500  # of a config
_LONGEST_VALUE = 500
Tile = tuple[str, object, object]


def progress_tiles(run: RunView, time_left: str) -> list[Tile]:
    """Return the figures of a run's progress."""
    status = run.status
    started, ended = run.config.get("started"), status.get("ended")
    tiles: list[Tile] = [
        ("rounds done", f"{run.rounds_done} of {sanitize(status.get('rounds', '?'), 20)}", time_left),
        ("sites", len(run.sites), per_site.sites_left(run)),
        ("seconds in rounds", round(run.seconds, 1), "without scoring on the server"),
    ]
    if "loss" in run.final:
        curve = run.curve("loss")
        first = f"{_number(curve[0][1])} before round 1" if curve and curve[0][0] == 0 else ""
        tiles.insert(1, ("test loss", run.final["loss"], first))
    if started:
        lasted = format_duration(started, ended)
        tiles.append(("started (UTC)", format_time(started), f"lasted {lasted}" if lasted else ""))
    return tiles


def quality_part(run: RunView) -> dict[str, Any]:
    """Return charts for what has at least `LEAST_POINTS` points, and a table of numbers for the rest."""
    names = [(name, sanitize(run_label(name), 40)) for name in metric_names([run])[:_CURVES]]
    curves = [(f"{label[:1].upper()}{label[1:]} by round", label, run.curve(name)) for name, label in names]
    at_sites = [] if names or run.before else per_site.site_losses(run)
    if at_sites:
        curves.append(("Training loss at the sites", "loss at the sites", at_sites))
    if run.upload_bytes:
        sent = [(x, y / 1e6) for x, y in run.uploaded]
        curves.append(("Uploaded so far", "MB, all sites", sent))
    charts = [chart_with_table(title, "rounds done", label, points, run.name) for title, label, points in curves
              if len(points) >= LEAST_POINTS]  # fmt: skip
    rows = [
        [label, str(points[0][0]), _number(points[0][1]), str(points[-1][0]), _number(points[-1][1])]
        for _, label, points in curves
        if 0 < len(points) < LEAST_POINTS
    ]
    return {
        "charts": [chart for chart in charts if chart], "figures": rows,
        "at_sites": run_page.SITES_NOTE if at_sites else "",
    }  # fmt: skip


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else sanitize(value, 40)


def given_away_tiles(run: RunView, figure: PrivacyFigure | None, attacks: Tile, card: Tile) -> list[Tile]:
    """Return the figures of what left the sites. `figure`: None while it is being computed."""
    messages = sum(message["direction"] == "up" for message in run.messages)
    what = f"{messages:,} messages in the ledger" if messages else "no message in the ledger"
    shown = figure or PrivacyFigure("computing", "")
    return [
        ("bytes from the sites", run.upload_bytes, f"{what}; {run.download_bytes:,} bytes to the sites"),
        ("protection of uploads", protection(run), "in a sum, the server saw no single upload" if run.unseen else ""),
        ("epsilon", shown.value, shown.note),
        attacks,
        card,
    ]


def attack_rows(found: Sequence[AttackFinding]) -> list[list[object]]:
    """Return a row per attack: name, what it does, its strongest finding about the run, and what that means."""
    rows = list[list[object]]()
    for name in attack_names(found):
        own = [f for f in found if f.attack == name and f.kind == "about the run"]
        if not own:
            continue
        top = max(own, key=lambda f: f.auroc[0])
        if reasons := verdict.explain_unusable(found, name):
            meaning = html_tag("span", f"proves nothing here: {sanitize('; '.join(reasons), 300)}", "")
        elif top.verdict == "above":
            meaning = html_tag("span", "membership shows", "tag failed")
        elif top.auroc[1] > 0.5:
            meaning = html_tag("span", "above 0.5, not decided after correction", "tag partial")
        else:
            meaning = html_tag("span", "not told apart from guessing, which proves no safety", "tag plain")
        rows.append([
            sanitize(name, 80), describe_attack(name) or "an attack of another package",
            "{:.2f} [{:.2f}, {:.2f}]".format(*top.auroc), sanitize(top.model, 80), meaning,
        ])  # fmt: skip
    return rows


def card_tile(place: RunLocation, base: str, state: str) -> Tile:
    """Return whether the run has a card, and how many have signed it."""
    files = safe_files.model_files(place)
    if "privacy.json" not in files:
        why = "a run writes it when it ends" if state == "running" else "write one: fedveil card make RUN"
        return "privacy card", "none", why if files or state == "running" else "the run wrote no model"
    link = page_link(base, ("runs", place.key, "card"), "Read the card")
    folder = safe_files.model_folder(place)
    if in_toto.NAME not in files or folder is None:
        return "privacy card", link, "not signed"
    try:
        count = len(verification.read_envelope(folder / in_toto.NAME).signatures)
    except StateError as error:
        return "privacy card", link, f"its signatures cannot be read: {sanitize(error, 200)}"
    return "privacy card", link, f"signatures: {count}, not checked here (fedveil card verify)"


def next_steps(run: RunView, place: RunLocation, federation: str, is_attacked: bool) -> list[tuple[str, Html]]:
    """Return what a person may do next with the run, the most useful first, and the command for it.

    Args:
        federation: the folder of the run's federation; "" if it is not known.
        is_attacked: whether the run has been audited.
    """
    state, folder, files = run.status.get("state"), place.folder, safe_files.model_files(place)
    steps: list[tuple[str, Html]] = []
    if state == "running":
        steps.append(("Follow it in a terminal until it ends", command_line("fedveil", "watch", folder)))
    elif state != "completed" and safe_files.file_stamps([folder / "resume.toml"]):
        resume = command_line(
            "fedveil", "submit", "--federation", federation or "FOLDER", "--config", folder / "resume.toml"
        )
        steps.append(("Resume it where it ended, once the cause is gone", resume))
    captured = run.config.get("config", {}).get("run.capture-messages") is True
    if state != "running" and run.rounds_done and captured and not is_attacked:
        steps.append(("Attack it, to measure what it gave away", command_line("fedveil", "audit", folder)))
    if "privacy.json" in files and in_toto.NAME not in files:
        if is_attacked and not _card_has_audit(place):
            steps.append(("Write the attacks' results into its card", command_line("fedveil", "card", "make", folder)))
        steps.append(("Sign its card and model", command_line("fedveil", "card", "sign", "--key", "KEY", folder)))
    if state == "completed":
        steps.append(("Score its model on other data", command_line("fedveil", "evaluate", folder, "--data", "FOLDER")))
    steps.append(
        ("Write a report that stands alone", command_line("fedveil", "report", folder, "--out", "report.html"))
    )
    return [(words, command) for words, command in steps if command]


def _card_has_audit(place: RunLocation) -> bool:
    """Return whether the run's card has the results of attacks."""
    folder = safe_files.model_folder(place)
    try:
        return folder is not None and read_card(folder).audited.measured
    except (StateError, OSError):
        return False


def config_part(run: RunView) -> dict[str, Any]:
    """Return the run's config, its method's parameters, and its environment, as tables."""
    config, method = _dict(run.config.get("config")), _dict(run.config.get("method"))
    about = {k: v for k, v in run.config.items() if k not in ("config", "method", "adapter", "started")}
    return {
        "keys": len(config), "config": _pairs(config, "Run config"),
        "fields": _pairs(flatten_config(_dict(method.get("fields"))), "Method parameters"),
        "environment": _pairs(about, "Environment"), "adapter": run.adapter_weights,
    }  # fmt: skip


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _pairs(values: Mapping[str, Any], caption: str) -> Html:
    rows = [
        [html_tag("code", sanitize(key, 200)), "unset" if value is None else sanitize(value, _LONGEST_VALUE)]
        for key, value in list(values.items())[:_MOST_KEYS]
    ]
    more = len(values) - len(rows)
    note = html_tag("p", f"{more:,} more are only in config.json.", "note") if more > 0 else ""
    return join_markup([html_table(["key", "value"], rows, caption=caption), note]) if rows else Html("")


def given_away_part(run: RunView) -> dict[str, Any]:
    """Return what each side learned, in words."""
    return {
        "words": disclosure.what_was_learned(run), "symbols": disclosure.SYMBOLS,
        "reported": [sanitize(name, 80) for name in disclosure.reported_metrics(run)],
    }  # fmt: skip
