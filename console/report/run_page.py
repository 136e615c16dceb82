"""The report: one self-contained HTML page about one or more runs, finished, failed or still running."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedveil.console import samples
from fedveil.console.report import disclosed, findings, page, privacy, trade, trade_picture
from fedveil.console.report.figures import Curve, svg
from fedveil.console.report.page import Html, bullets, fold, join, table, tag
from fedveil.console.run_config import flattened
from fedveil.console.runs import by_site, disclosure, unseen
from fedveil.console.runs.folder import Row, Run
from fedveil.console.runs.summary import label, metric_names, unchanged, upload_ratio

SUMMARY_NOTE = (
    "Quality: the server's model on the server's own test data, last value. Test loss is cross-entropy a token, lower "
    "is better; of the text metrics higher is better. Bytes: whole messages, refused ones too. Seconds: all rounds, "
    "scoring on the server not counted. Upload / FedAvg: beside the FedAvg run of equal rounds, where one is here."
)
_HEADLINE = "FedVeil: what withholding gained, and cost"
_PURPOSE = "One model, trained by sites that keep their rows: how good it is, what it cost, and what was given away."
SITES_NOTE = (
    "The server scored no model on rows of its own. The curves are what the sites told: the loss of the model that "
    "they received, on rows that they train on, weighted with their examples. That is no held-out loss."
)
PRIVACY_NOTE = (
    "Upper bounds, by dp-accounting, of what everyone but a site can tell about one of its rows, from everything "
    "that the site sent and keeps. The relation of neighbouring data sets stands beside each; a site's own ledger "
    "adds its other runs."
)


def write(file: Path, runs: Sequence[Run], missing: Mapping[str, str] | None = None) -> None:
    """Writes the page about `runs` to `file`; `missing` says of members of the federation why they are not online."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(html(runs, missing), encoding="utf-8")


def html(runs: Sequence[Run], missing: Mapping[str, str] | None = None) -> str:
    """The page about `runs`."""
    return page.document(_title(runs), body(runs, missing))


def _title(runs: Sequence[Run]) -> str:
    return f"FedVeil: {_named(runs)}"


def _named(runs: Sequence[Run]) -> str:
    return " / ".join(run.name for run in runs)


def body(runs: Sequence[Run], missing: Mapping[str, str] | None = None) -> Html:
    """What the page says, without its frame."""
    gained = _gained(runs)
    lead = f"{_named(runs)}. {_lead(runs)}" if gained else _lead(runs)
    parts: list[object] = [tag("h1", _HEADLINE if gained else _title(runs)), tag("p", lead, "lead")]
    parts += [_alert(run) for run in runs if run.status.get("state") != "completed"]
    parts += [tag("p", _resumed(run, row), "note") for run in runs for row in run.resumes]
    parts += [tag("p", _chosen(run), "note") for run in runs if run.of_round]
    parts += [tag("p", f"{run.name}: {same}.", "note") for run in runs if (same := unchanged(run))]
    parts += [gained, tag("h2", "Summary"), _summary(runs), _figures(runs), *_texts(runs)]
    parts += [tag("h2", "What each side learned"), *map(disclosed.learned, runs)]
    parts += [tag("p", disclosure.SYMBOLS, "note")]
    parts += [tag("h2", "Differential privacy"), tag("p", PRIVACY_NOTE, "note"), *(_privacy(run) for run in runs)]
    parts += _unseen(runs)
    parts += _findings(runs)
    parts += [
        tag("h2", "Disclosure ledger"),
        tag("p", disclosed.LEDGER_NOTE, "note"),
        *(disclosed.ledger(run) for run in runs),
    ]
    parts += [tag("h2", "Sites"), *map(disclosed.sites, runs), _missing(missing or {})]
    parts += [tag("h2", "Configuration and environment"), _config(runs), _environment(runs)]
    return join(parts, "\n")


def _lead(runs: Sequence[Run]) -> str:
    config: Row = next((run.config["config"] for run in runs if run.config.get("config")), {})
    started = next((run.config["started"] for run in runs if run.config.get("started")), "")
    ended = max((str(run.status.get("ended", "")) for run in runs), default="")
    count = max((len(run.sites) for run in runs), default=0)
    task = f"{config.get('task.name', 'unknown task')}, model {config.get('task.model', '?')}"
    return f"{_PURPOSE} {task}; {count} sites; started {started or 'at an unknown time'}{ended and f', ended {ended}'}."


def _gained(runs: Sequence[Run]) -> Html:
    """The answer of runs side by side, before anything else."""
    arms = [trade.arm(run) for run in runs]
    picture = trade_picture.svg(arms) if any(a.attacked for a in arms) else ""
    if not picture:
        return Html("")
    figure = join([Html(picture), tag("figcaption", trade_picture.caption(arms))])
    answer, *rest = *trade.verdict(arms), *filter(None, [trade.larger(arms)]), ""
    return join([tag("p", answer, "verdict"), tag("figure", figure, "forest"), bullets(filter(None, rest))])


def _texts(runs: Sequence[Run]) -> list[Html]:
    """What the models wrote before and after, where that was asked; only the first run's is open."""
    head = ["prompt (a test row)", "before any round", "after the last", "the row's own text"]
    found = [(run, samples.read(run.folder)) for run in runs]
    tables = [
        (run, tag("div", table(head, [[s.prompt, s.before, s.after, s.wanted] for s in texts]), "texts"))
        for run, texts in found
        if texts
    ]
    open_ = [join([tag("h3", f"Texts: {disclosed.heading(run)}"), shown]) for run, shown in tables[:1]]
    return [*open_, *(fold(f"Texts: {disclosed.heading(run)}", shown) for run, shown in tables[1:])]


def _alert(run: Run) -> Html:
    state, reason = str(run.status.get("state", "unknown")), str(run.status.get("reason") or "").strip(" :.")
    done = f"{run.rounds_done} of {run.status.get('rounds', '?')} rounds done"
    words = {"running": "is still running", "stopped": "was stopped", "died": "died", "failed": "failed"}
    became = words.get(state, f"has state {state}")
    return tag(
        "p",
        f"{run.name} {became}, {done}{': ' if reason else ''}{reason}. The figures below are what it has so far.",
        "alert",
    )


def _chosen(run: Run) -> str:
    """What the scores decided: when the run ended, and with which model."""
    why = str(run.status.get("reason") or "") if run.status.get("state") == "completed" else ""
    return f"{run.name}: {run.of_round}{'; ' if why else ''}{why}."


def _resumed(run: Run, row: Row) -> str:
    """What one line of resumes.jsonl says."""
    notes = [f"before that: {row['before']}"] if row.get("before") else []
    notes += [str(row["checkpoint"])] if row.get("checkpoint") else []
    notes += [f"{key}: {values}" for key, values in dict(row.get("changes") or {}).items()]
    return f"{run.name} was resumed with round {int(row.get('round', -1)) + 1} at {row.get('time')}. {'; '.join(notes)}"


def _summary(runs: Sequence[Run]) -> Html:
    metrics = metric_names(runs)
    head = [
        "run",
        "method",
        "state",
        "rounds",
        *map(label, metrics),
        "upload bytes",
        "download bytes",
        "upload / FedAvg",
        "seconds in rounds",
    ]
    rows = []
    for run in runs:
        state = str(run.status.get("state", "unknown"))
        quality = [run.final.get(name) for name in metrics]
        totals = [run.upload_bytes, run.download_bytes, upload_ratio(run, runs), round(run.seconds, 1)]
        rows.append([run.name, run.method, tag("span", state, f"tag {state}"), run.rounds_done, *quality, *totals])
    return join([table(head, rows), tag("p", SUMMARY_NOTE, "note")])


def _figures(runs: Sequence[Run]) -> Html:
    loss = {run.name: run.curve("loss") for run in runs}
    sent = {run.name: dict(run.uploaded) for run in runs}
    by_round = [Curve(run.name, loss[run.name], i) for i, run in enumerate(runs)]
    megabytes = [Curve(r.name, [(x, y / 1e6) for x, y in r.uploaded], i) for i, r in enumerate(runs) if r.attempts]
    against = [
        Curve(run.name, [(sent[run.name][x] / 1e6, y) for x, y in loss[run.name] if x in sent[run.name]], i)
        for i, run in enumerate(runs)
    ]
    told = {run.name: by_site.losses(run) for run in runs if not loss[run.name]}
    at_sites = [Curve(run.name, told.get(run.name, []), i) for i, run in enumerate(runs)]
    figures = [
        svg("Test loss by round", "rounds done", "loss", by_round, integer_x=True),
        svg("Training loss at the sites", "rounds done", "loss, sites' own rows", at_sites, integer_x=True),
        svg("Uploaded so far", "rounds done", "MB, all sites", megabytes, integer_x=True),
        svg("Test loss by upload", "MB uploaded, all sites", "loss", against),
    ]
    shown = tag("div", join(tag("figure", Html(f)) for f in figures if f), "figures")
    return join([shown, tag("p", SITES_NOTE, "note")]) if any(told.values()) else shown


def _privacy(run: Run) -> Html:
    return join([tag("h3", disclosed.heading(run)), bullets(privacy.statements(run))])


def _unseen(runs: Sequence[Run]) -> list[object]:
    found = [run for run in runs if run.unseen]
    head = ["round", "attempt", "sites in the sum", "holders", "of whom open it", "opened no shares", "no sum, because"]
    parts = [
        join([tag("h3", disclosed.heading(run)), bullets(unseen.claims(run)), table(head, unseen.rows(run))])
        for run in found
    ]
    return [tag("h2", "Secure aggregation"), tag("p", unseen.NOT_SEEN, "note"), *parts] if found else []


def _findings(runs: Sequence[Run]) -> list[object]:
    found = [(run, findings.html(run.folder)) for run in runs]
    note = [tag("p", findings.NOTE, "note")] if any(part is not None for _, part in found) else []
    parts = [join([tag("h3", disclosed.heading(run)), _not_attacked(run) if part is None else part])
             for run, part in found]  # fmt: skip
    return [tag("h2", "What attacks found"), *note, *parts]


def _not_attacked(run: Run) -> Html:
    """What to do, so that nobody takes silence for an answer."""
    taps = run.config.get("config", {}).get("run.tap")
    how = tag("code", f"fedveil audit {run.folder}") if taps else "only a run with run.tap = true can be"
    return tag("p", join(["Not attacked, so nothing is known of what an attacker could tell: ", how, "."]), "wait")


def _missing(missing: Mapping[str, str]) -> Html:
    if not missing:
        return Html("")
    return join([tag("h3", "Members that are not online"), table(["site", "why"], [[*row] for row in missing.items()])])


def _config(runs: Sequence[Run]) -> Html:
    keys = list(dict.fromkeys(key for run in runs for key in run.config.get("config", {})))
    values = {key: [run.config.get("config", {}).get(key) for run in runs] for key in keys}
    head = ["key", *(run.name for run in runs)]
    different = [[tag("code", key), *map(_plain, row)] for key, row in values.items() if len({str(v) for v in row}) > 1]
    same = [[tag("code", key), _plain(row[0])] for key, row in values.items() if len({str(v) for v in row}) == 1]
    fields = dict.fromkeys(  # runs of one method often have the same
        f"{run.method}: {', '.join(_field(*of) for of in flattened(run.config['method'].get('fields', {})).items())}"
        for run in runs
        if "method" in run.config
    )
    parts: list[object] = [tag("h3", "Fields of the methods"), bullets(fields)] if fields else []
    parts += [tag("h3", "Where the runs differ"), table(head, different)] if different and len(runs) > 1 else []
    return join([*parts, fold(f"The same for every run: {len(same)} keys", table(["key", "value"], same))])


def _environment(runs: Sequence[Run]) -> Html:
    keys = [k for run in runs for k in run.config if k not in ("config", "method")]
    head = ["", *(run.name for run in runs)]
    rows = [[key, *(_plain(run.config.get(key)) for run in runs)] for key in dict.fromkeys(keys)]
    return join([tag("h3", "Environment"), table(head, rows)]) if rows else Html("")


def _field(name: str, value: object) -> str:
    """As a line of a run config has it."""
    return f"{name} unset" if value is None else f"{name} = {json.dumps(value)}"


def _plain(value: object) -> str:
    """A config value as text: numbers here are not counts, and get no separators."""
    return "" if value is None else str(value)
