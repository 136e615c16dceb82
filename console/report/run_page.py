"""The report: one self-contained HTML page about one or more runs, finished, failed or still running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedveil.console.report import findings, page, privacy
from fedveil.console.report.figures import Curve, svg
from fedveil.console.report.page import Html, bullets, fold, join, table, tag
from fedveil.console.runs import by_site, disclosure
from fedveil.console.runs.folder import Row, Run
from fedveil.console.runs.summary import metric_names, upload_ratio

SUMMARY_NOTE = (
    "Quality: the server's model on the server's own test data, last value. Loss is cross-entropy a token, lower is "
    "better; of the text metrics higher is better. Bytes: whole messages. Seconds: all rounds, scoring on the server "
    "not counted."
)
LEDGER_NOTE = (
    "Every message of every attempt, as it crossed the wire; refused and repeated ones count. Payload is the bytes "
    "of the tensors; overhead is everything else in the message: names, shapes, and the figures a site reports about "
    "its training."
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
    names = " / ".join(run.name for run in runs)
    parts: list[object] = [tag("h1", f"FedVeil: {names}"), tag("p", _lead(runs), "lead")]
    parts += [_alert(run) for run in runs if run.status.get("state") != "completed"]
    parts += [tag("p", _resumed(run, row), "note") for run in runs for row in run.resumes]
    parts += [tag("h2", "Summary"), _summary(runs), _figures(runs)]
    parts += [tag("h2", "What each side learned"), *(_learned(run) for run in runs)]
    parts += [tag("h2", "Differential privacy"), tag("p", PRIVACY_NOTE, "note"), *(_privacy(run) for run in runs)]
    parts += _findings(runs)
    parts += [tag("h2", "Disclosure ledger"), tag("p", LEDGER_NOTE, "note"), *(_ledger(run) for run in runs)]
    parts += [tag("h2", "Sites"), *(_sites(run) for run in runs), _missing(missing or {})]
    parts += [tag("h2", "Configuration and environment"), _config(runs), _environment(runs)]
    return page.document(f"FedVeil: {names}", join(parts, "\n"))


def _lead(runs: Sequence[Run]) -> str:
    config: Row = next((run.config["config"] for run in runs if run.config.get("config")), {})
    started = next((run.config["started"] for run in runs if run.config.get("started")), "")
    count = max((len(run.sites) for run in runs), default=0)
    task = f"{config.get('task.name', 'unknown task')}, model {config.get('task.model', '?')}"
    return f"{task}; {count} sites; started {started or 'at an unknown time'}."


def _alert(run: Run) -> Html:
    state, reason = str(run.status.get("state", "unknown")), str(run.status.get("reason") or "").strip(" :.")
    done = f"{run.rounds_done} of {run.status.get('rounds', '?')} rounds done"
    words = {"running": "is still running", "died": "died", "failed": "failed"}.get(state, f"has state {state}")
    return tag(
        "p",
        f"{run.name} {words}, {done}{': ' if reason else ''}{reason}. The figures below are what it has so far.",
        "alert",
    )


def _resumed(run: Run, row: Row) -> str:
    """What one line of resumes.jsonl says."""
    notes = [f"before that: {row['before']}"] if row.get("before") else []
    notes += [str(row["checkpoint"])] if row.get("checkpoint") else []
    notes += [f"{key}: {values}" for key, values in dict(row.get("changes") or {}).items()]
    return f"{run.name} was resumed with round {row.get('round')} at {row.get('time')}. {'; '.join(notes)}"


def _summary(runs: Sequence[Run]) -> Html:
    metrics = metric_names(runs)
    head = [
        "run",
        "method",
        "state",
        "rounds",
        *metrics,
        "upload bytes",
        "download bytes",
        "upload / FedAvg",
        "seconds",
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
    figures = [
        svg("Test loss by round", "rounds done", "loss", by_round, integer_x=True),
        svg("Uploaded so far", "rounds done", "MB, all sites", megabytes, integer_x=True),
        svg("Test loss by upload", "MB uploaded, all sites", "loss", against),
    ]
    return tag("div", join(tag("figure", Html(f)) for f in figures if f), "figures")


def _learned(run: Run) -> Html:
    items: list[object] = [sentence.replace("`", "") for sentence in disclosure.words_of(run.method)]
    uploads = [kind for kind in disclosure.kinds(run) if kind.direction == "up"]
    for site in run.sites:
        held = [f"{_variant(kind)} {_times(kind.sites[site])}" for kind in uploads if kind.sites[site]]
        if held:
            never = ", never all of it in one upload" if disclosure.never_together(run, site) else ""
            items.append(f"{site} sent the server {' and '.join(held)}{never}.")
    if reported := disclosure.reported(run):
        items.append(f"Beside the tensors every accepted upload told the server: {', '.join(reported)}.")
    if words := disclosure.scalars(run)["up"]:
        items.append(f"Uploads also carried: {', '.join(words)}.")
    empty = tag("p", "No message was exchanged.", "note")
    return join([tag("h3", _heading(run)), bullets(items) if items else empty])


def _privacy(run: Run) -> Html:
    return join([tag("h3", _heading(run)), bullets(privacy.statements(run))])


def _findings(runs: Sequence[Run]) -> list[object]:
    found = [(run, findings.html(run.folder)) for run in runs]
    audited = [join([tag("h3", _heading(run)), part]) for run, part in found if part is not None]
    return [tag("h2", "What attacks found"), tag("p", findings.NOTE, "note"), *audited] if audited else []


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _variant(kind: disclosure.Kind) -> str:
    what = f"{len(kind.fields)} tensors"
    return f"{kind.variant} ({what})" if kind.variant else f"all {what}"


def _ledger(run: Run) -> Html:
    found = disclosure.kinds(run)
    if not found:
        return join([tag("h3", _heading(run)), tag("p", "No message was exchanged.", "note")])
    rows, folds = [], []
    for kind in found:
        about = disclosure.describe_fields(kind.fields)
        way = "site to server" if kind.direction == "up" else "server to site"
        share = Html(f"{100 * kind.overhead_bytes / kind.payload_bytes:.2f}&nbsp;%") if kind.payload_bytes else None
        rows.append([
            way, kind.variant or "the only one", ", ".join(about["codecs"]), about["tensors"], about["entries"],
            kind.messages, kind.payload_bytes, kind.overhead_bytes, share, kind.total_bytes,
        ])  # fmt: skip
        fields = [[tag("code", name), codec, str(shape), nbytes] for name, codec, shape, nbytes in kind.fields]
        title = f"{way}, {kind.variant or 'every message'}: {len(fields)} fields, bytes in one message"
        folds.append(fold(title, table(["field", "codec", "shape", "bytes"], fields)))
    head = ["direction", "variant", "codec", "tensors", "entries", "messages", "payload bytes", "overhead bytes"]
    parts = [tag("h3", _heading(run)), table([*head, "overhead", "total bytes"], rows), _by_site(run, found), *folds]
    return join(parts)


def _by_site(run: Run, found: Sequence[disclosure.Kind]) -> Html:
    """How many uploads of each variant each site sent."""
    uploads = [kind for kind in found if kind.direction == "up"]
    if len(uploads) < 2:
        return Html("")
    rows = [[site, *(kind.sites[site] for kind in uploads)] for site in run.sites]
    return table(["uploads by site", *(_variant(kind) for kind in uploads)], rows)


def _sites(run: Run) -> Html:
    head = ["site", "accepted", "asked", "examples", "loss received", "loss trained", "train seconds", "up bytes"]
    rows = [
        [s.name, s.accepted, s.asked, s.examples, s.loss_received, s.loss_trained, s.train_seconds, s.up, s.down,
         join((f"round {round_}: {reason}" for round_, reason in s.failures), "; ") or None]
        for s in by_site.of(run)
    ]  # fmt: skip
    return join([tag("h3", _heading(run)), table([*head, "down bytes", "failures"], rows)])


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
    fields = [
        f"{run.method}: {', '.join(f'{k} = {v}' for k, v in run.config['method'].get('fields', {}).items())}"
        for run in runs
        if "method" in run.config
    ]
    parts: list[object] = [tag("h3", "Fields of the methods"), bullets(fields)] if fields else []
    parts += [tag("h3", "Where the runs differ"), table(head, different)] if different and len(runs) > 1 else []
    return join([*parts, fold(f"The same for every run: {len(same)} keys", table(["key", "value"], same))])


def _environment(runs: Sequence[Run]) -> Html:
    keys = [k for run in runs for k in run.config if k not in ("config", "method")]
    head = ["", *(run.name for run in runs)]
    rows = [[key, *(_plain(run.config.get(key)) for run in runs)] for key in dict.fromkeys(keys)]
    return join([tag("h3", "Environment"), table(head, rows)]) if rows else Html("")


def _heading(run: Run) -> str:
    return run.name if run.name == run.method else f"{run.name} ({run.method})"


def _plain(value: object) -> str:
    """A config value as text: numbers here are not counts, and get no separators."""
    return "" if value is None else str(value)
