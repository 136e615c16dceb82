"""The report: one self-contained HTML page about one or more finished, failed or running runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.console.run_config_args import flatten_config
from fedveil.console.runs import disclosure, per_site, privacy_statements, sample_texts, secagg_summary
from fedveil.console.runs.run_reader import Row, RunView
from fedveil.console.runs.summary import (
    baseline_of,
    different_scoring,
    is_unchanged,
    metric_names,
    protection,
    run_label,
    upload_ratio,
)
from fedveil.console.web.report import audit_section, disclosure_section, key_figures, tradeoff, tradeoff_plot
from fedveil.console.web.report import html as page
from fedveil.console.web.report.html import Html, html_details, html_list, html_table, html_tag, join_markup
from fedveil.console.web.report.line_chart import ChartCurve, curves_svg
from fedveil.sanitize import sanitize

SUMMARY_NOTE = (
    "Quality: the last value for the server's model on the server's own test data. Test loss is cross-entropy per "
    "token, where lower is better; for the text metrics, higher is better. Bytes: whole messages, including refused "
    "ones. Seconds: "
    "all rounds, excluding scoring on the server. Upload / FedAvg: relative to the first FedAvg run here without "
    "protection and with as many rounds, if any."
)
_HEADLINE = "FedVeil: what an attacker learns, and what protection costs"
_PURPOSE = "A model trained across sites that keep their examples: its quality, its cost, and what was disclosed."
SITES_NOTE = (
    "The server did not score models on its own examples. The curves show what the sites reported: the loss of the "
    "model that they received, on training examples, weighted by number of examples. This is not a held-out loss."
)
PRIVACY_NOTE = (
    "Upper bounds, computed with dp-accounting, on what anyone but the site can learn about one of its examples from "
    "everything that the site sent and keeps. Each bound states which data sets count as neighbors; a site's own "
    "ledger adds its "
    "other runs."
)


def write_run_page(file: Path, runs: Sequence[RunView], missing: Mapping[str, str] | None = None) -> None:
    """Write the page about `runs` to `file`; `missing` gives the reasons why members are offline."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(run_page_html(runs, missing), encoding="utf-8")


def run_page_html(runs: Sequence[RunView], missing: Mapping[str, str] | None = None) -> str:
    """Return the page about `runs`."""
    return page.html_document(_title(runs), run_page_body(runs, missing))


def _title(runs: Sequence[RunView]) -> str:
    return f"FedVeil: {_named(runs)}"


def _named(runs: Sequence[RunView]) -> str:
    return " / ".join(run.name for run in runs)


@dataclass(frozen=True)
class ReportSection:
    """A section of the page: the anchor of its heading, the heading, and its content."""

    anchor: str
    title: str
    content: Html


def run_page_body(runs: Sequence[RunView], missing: Mapping[str, str] | None = None) -> Html:
    """Return the page's content without its frame. With several runs, what is about one of them is folded."""
    gained, sections = _gained(runs), _sections(runs, missing or {})
    lead = f"{_named(runs)}. {_lead(runs)}" if gained else _lead(runs)
    parts: list[object] = [html_tag("h1", _HEADLINE if gained else _title(runs)), html_tag("p", lead, "lead")]
    parts += [_alert(run) for run in runs if run.status.get("state") != "completed"]
    parts += [html_tag("p", f"{run.name}: {gone}", "alert") for run in runs if (gone := _gone(run))]
    parts += [html_tag("p", _resumed(run, row), "note") for run in runs for row in run.resumes]
    parts += [html_tag("p", _chosen(run), "note") for run in runs if run.of_round]
    parts += [html_tag("p", f"{run.name}: {same}.", "note") for run in runs if (same := is_unchanged(run))]
    parts += [key_figures.key_figures(runs), _contents(sections), gained]
    for section in sections:
        parts += [Html(f'<h2 id="{section.anchor}">{page.escape_text(section.title)}</h2>'), section.content]
    return join_markup(parts, "\n")


def _sections(runs: Sequence[RunView], missing: Mapping[str, str]) -> list[ReportSection]:
    """Return the page's sections in order, without those that have nothing to say."""
    every = list[tuple[str, Html]]()
    curves = _figures(runs) if len(runs) == 1 else html_details("Curves of loss and bytes", _figures(runs))
    every += [("Summary", join_markup([_summary(runs), curves])), ("Sample texts", _texts(runs))]
    learned = _by_run(runs, disclosure_section.learned_section)
    every.append(("What each side learned", join_markup([learned, html_tag("p", disclosure.SYMBOLS, "note")])))
    privacy = _by_run(runs, lambda run: html_list(privacy_statements.privacy_statements(run)))
    every.append(("Differential privacy", join_markup([html_tag("p", PRIVACY_NOTE, "note"), privacy])))
    every += [("Secure aggregation", _unseen(runs)), ("What attacks found", _findings(runs))]
    ledger = _by_run(runs, disclosure_section.ledger_section)
    every.append(("Disclosure ledger", join_markup([ledger, _about(disclosure_section.LEDGER_NOTE)])))
    sites = _by_run(runs, disclosure_section.sites_section)
    every.append(("Sites", join_markup([sites, _missing(missing)])))
    every.append(("Configuration and environment", join_markup([_config(runs), _environment(runs)])))
    return [
        ReportSection(f"report-{title.lower().replace(' ', '-')}", title, content)
        for title, content in every
        if content
    ]


def _contents(sections: Sequence[ReportSection]) -> Html:
    links = (Html(f'<a href="#{each.anchor}">{page.escape_text(each.title)}</a>') for each in sections)
    return Html(f'<nav class="contents" aria-label="Contents">{html_list(links)}</nav>')


def _about(text: str) -> Html:
    """Return the folded explanation of a section's figures."""
    return html_details("About these figures", html_tag("p", text, "note"))


def _by_run(runs: Sequence[RunView], part: Callable[[RunView], Html]) -> Html:
    """Return the part of the only run, or each run's part, folded under its name."""
    if len(runs) == 1:
        return part(runs[0])
    return join_markup(html_details(run.name, part(run)) for run in runs)


def _lead(runs: Sequence[RunView]) -> str:
    config: Row = next((run.config["config"] for run in runs if run.config.get("config")), {})
    started = next((run.config["started"] for run in runs if run.config.get("started")), "")
    ended = max((str(run.status.get("ended", "")) for run in runs), default="")
    count = max((len(run.sites) for run in runs), default=0)
    task = f"{config.get('task.name', 'unknown task')}, model {config.get('task.model', '?')}"
    return f"{_PURPOSE} {task}; {count} sites; started {started or 'at an unknown time'}{ended and f', ended {ended}'}."


def _gained(runs: Sequence[RunView]) -> Html:
    """Return the comparison between the runs, which comes first on the page."""
    arms = [tradeoff.read_tradeoff_run(run) for run in runs]
    picture = tradeoff_plot.tradeoff_svg(arms) if any(a.attack or a.broken for a in arms) else ""
    if not picture:
        return Html("")
    figure = join_markup([Html(picture), html_tag("figcaption", tradeoff_plot.tradeoff_caption(arms))])
    answer, *rest = *tradeoff.tradeoff_verdict(arms), ""
    details = html_details("Each site's figure, and what the figures do not show", html_list(filter(None, rest)))
    return join_markup([html_tag("p", answer, "verdict"), html_tag("figure", figure, "forest"), details])


def _texts(runs: Sequence[RunView]) -> Html:
    """Return the models' sample texts before and after training, if any."""
    head = ["prompt (a test example)", "before round 1", "after the last round", "reference text"]
    samples = {run.name: sample_texts.read_samples(run.folder) for run in runs}

    def table(run: RunView) -> Html:
        rows = [[text.prompt, text.before, text.after, text.wanted] for text in samples[run.name]]
        return html_tag("div", html_table(head, rows), "texts")

    return _by_run([run for run in runs if samples[run.name]], table) if any(samples.values()) else Html("")


def _alert(run: RunView) -> Html:
    state, reason = str(run.status.get("state", "unknown")), str(run.status.get("reason") or "").strip(" :.")
    done = f"{run.rounds_done} of {run.status.get('rounds', '?')} rounds done"
    words = {"running": "is still running", "stopped": "was stopped", "died": "died", "failed": "failed"}
    became = words.get(state, f"has state {state}")
    return html_tag(
        "p",
        f"{run.name} {became}, {done}{': ' if reason else ''}{reason}. The figures below are its results so far.",
        "alert",
    )


def _gone(run: RunView) -> str:
    """Name the sites missing from the last rounds; "" if there are none."""
    absent = per_site.absent_since(run)
    names = ", ".join(f"{sanitize(site, 80)} since round {round_}" for site, round_ in absent.items())
    return f"the model has no upload from {names}." if absent else ""


def _chosen(run: RunView) -> str:
    """Describe what the scores determined: when the run ended, and with which model."""
    why = str(run.status.get("reason") or "") if run.status.get("state") == "completed" else ""
    return f"{run.name}: {run.of_round}{'; ' if why else ''}{why}."


def _resumed(run: RunView, row: Row) -> str:
    """Describe one line of resumes.jsonl."""
    notes = [f"before that: {row['before']}"] if row.get("before") else []
    notes += [str(row["checkpoint"])] if row.get("checkpoint") else []
    notes += [f"{key}: {values}" for key, values in dict(row.get("changes") or {}).items()]
    return f"{run.name} was resumed at round {int(row.get('round', -1)) + 1} on {row.get('time')}. {'; '.join(notes)}"


def _summary(runs: Sequence[RunView]) -> Html:
    metrics = metric_names(runs)
    head = [
        "run",
        "method",
        "protection",
        "adapter",
        "state",
        "rounds",
        *map(run_label, metrics),
        "upload bytes",
        "download bytes",
        "upload / FedAvg",
        "seconds in rounds",
    ]
    rows = []
    for run in runs:
        quality = [run.final.get(name) for name in metrics]
        totals = [run.upload_bytes, run.download_bytes, upload_ratio(run, runs), round(run.seconds, 1)]
        rows.append(
            [
                run.name,
                run.method,
                protection(run),
                run.adapter_weights,
                _state(run),
                run.rounds_done,
                *quality,
                *totals,
            ]
        )
    unlike = different_scoring(runs)
    baselines = sorted({base.name for run in runs if (base := baseline_of(run, runs))})
    named = f" Here, that is {', '.join(baselines)}." if baselines else ""
    return join_markup(
        [
            *([html_tag("p", unlike, "alert")] if unlike else []),
            html_table(head, rows),
            _about(SUMMARY_NOTE + named),
        ]
    )


def _state(run: RunView) -> Html:
    """Return the run's state as a tag, in amber if sites are missing."""
    state = str(run.status.get("state", "unknown"))
    words = per_site.state_with_sites(run, state)
    return html_tag("span", words, f"tag {state if words == state else 'partial'}")


def _figures(runs: Sequence[RunView]) -> Html:
    loss = {run.name: run.curve("loss") for run in runs}
    sent = {run.name: dict(run.uploaded) for run in runs}
    by_round = [ChartCurve(run.name, loss[run.name], i) for i, run in enumerate(runs)]
    megabytes = [ChartCurve(r.name, [(x, y / 1e6) for x, y in r.uploaded], i) for i, r in enumerate(runs) if r.attempts]
    against = [
        ChartCurve(run.name, [(sent[run.name][x] / 1e6, y) for x, y in loss[run.name] if x in sent[run.name]], i)
        for i, run in enumerate(runs)
    ]
    losses_at_sites = {run.name: per_site.site_losses(run) for run in runs if not loss[run.name]}
    at_sites = [ChartCurve(run.name, losses_at_sites.get(run.name, []), i) for i, run in enumerate(runs)]
    figures = [
        curves_svg("Test loss by round", "rounds done", "loss", by_round, integer_x=True),
        curves_svg("Training loss at the sites", "rounds done", "loss, training examples", at_sites, integer_x=True),
        curves_svg("Uploaded so far", "rounds done", "MB, all sites", megabytes, integer_x=True),
        curves_svg("Test loss by upload", "MB uploaded, all sites", "loss", against),
    ]
    figure_block = html_tag("div", join_markup(html_tag("figure", Html(f)) for f in figures if f), "figures")
    return (
        join_markup([figure_block, html_tag("p", SITES_NOTE, "note")])
        if any(losses_at_sites.values())
        else figure_block
    )


def _unseen(runs: Sequence[RunView]) -> Html:
    secure_runs = [run for run in runs if run.unseen]
    head = [
        "round",
        "attempt",
        "sites in the sum",
        "of the cohort",
        "must agree to it",
        "did not agree or sent no shares",
        "reason for no sum",
    ]

    def part(run: RunView) -> Html:
        claims = html_list(secagg_summary.secagg_claims(run))
        return join_markup([claims, html_table(head, secagg_summary.attempt_rows(run))])

    if not secure_runs:
        return Html("")
    parts = (part(secure_runs[0]),) if len(runs) == 1 else (html_details(run.name, part(run)) for run in secure_runs)
    return join_markup([html_tag("p", secagg_summary.NOT_SEEN, "note"), *parts])


def _findings(runs: Sequence[RunView]) -> Html:
    """Return each run's verdict, and its findings, which are folded if there are several runs."""
    is_single, parts, has_audit = len(runs) == 1, list[object](), False
    for run in runs:
        findings = audit_section.findings_html(run.folder, with_verdict=is_single)
        has_audit |= findings is not None
        words = audit_section.findings_in_words(run.folder)
        parts += (
            [] if is_single else [html_tag("p", join_markup([html_tag("b", run.name), f": {words}"]))] * bool(words)
        )
        if findings is None:
            parts.append(_not_attacked(run, "" if is_single else f"{run.name}: "))
        else:
            parts.append(findings if is_single else html_details(f"{run.name}: findings and controls", findings))
    return join_markup([*parts, _about(audit_section.NOTE) if has_audit else ""])


def _not_attacked(run: RunView, named: str) -> Html:
    """Return a note on how to audit the run, so that readers do not mistake a missing audit for a good result."""
    taps = run.config.get("config", {}).get("run.capture-messages")
    how = (
        html_tag("code", f"fedveil audit {run.folder}") if taps else "this needs a run with run.capture-messages = true"
    )
    return html_tag(
        "p", join_markup([named, "Not attacked, so what an attacker could learn is unknown: ", how, "."]), "wait"
    )


def _missing(missing: Mapping[str, str]) -> Html:
    if not missing:
        return Html("")
    return join_markup(
        [
            html_tag("h3", "Offline members"),
            html_table(["site", "why"], [[*row] for row in missing.items()]),
        ]
    )


def _config(runs: Sequence[RunView]) -> Html:
    keys = list(dict.fromkeys(key for run in runs for key in run.config.get("config", {})))
    values = {key: [run.config.get("config", {}).get(key) for run in runs] for key in keys}
    head = ["key", *(run.name for run in runs)]
    different = [
        [html_tag("code", key), *map(_plain, row)] for key, row in values.items() if len({str(v) for v in row}) > 1
    ]
    same = [[html_tag("code", key), _plain(row[0])] for key, row in values.items() if len({str(v) for v in row}) == 1]
    fields = dict.fromkeys(  # to remove duplicates: runs with the same method often have the same values
        f"{run.method}: "
        + ", ".join(_field(*of) for of in flatten_config(run.config["method"].get("fields", {})).items())
        for run in runs
        if "method" in run.config
    )
    parts: list[object] = [html_tag("h3", "Method parameters"), html_list(fields)] if fields else []
    if different and len(runs) > 1:
        parts.append(html_details(f"Where the runs differ: {len(different)} keys", html_table(head, different)))
    return join_markup(
        [*parts, html_details(f"Same for every run: {len(same)} keys", html_table(["key", "value"], same))]
    )


def _environment(runs: Sequence[RunView]) -> Html:
    keys = [k for run in runs for k in run.config if k not in ("config", "method", "adapter")]
    head = ["", *(run.name for run in runs)]
    rows = [[key, *(_plain(run.config.get(key)) for run in runs)] for key in dict.fromkeys(keys)]
    return html_details("Environment", html_table(head, rows)) if rows else Html("")


def _field(name: str, value: object) -> str:
    """Format a field as a run config line."""
    return f"{name} unset" if value is None else f"{name} = {json.dumps(value)}"


def _plain(value: object) -> str:
    """Format a config value. Numbers get no thousands separators, because they are not counts."""
    return "" if value is None else str(value)
