"""Dashboards as a browser meets them: through the gate, on hostile files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fedveil.console.runs.run_reader import load_run
from fedveil.console.web.apps import run_folders, server_app, site_app
from fedveil.console.web.auth import AccessMiddleware, DashboardCredentials
from fedveil.console.web.federations import name_federations
from fedveil.records import audit_log
from tests.fedveil.console.conftest import write_run

PORT = 8050
EVIL = "<script>alert(271828)</script>"
ESCAPES = "\x1b]0;owned\x07\u202e"


def client_of(app_of) -> TestClient:
    """A browser that has opened the link. `entry` and `base` of it are the dashboard's."""
    entry = DashboardCredentials(PORT)
    app = AccessMiddleware(app_of(entry), entry)
    client = TestClient(app, base_url=f"http://127.0.0.1:{PORT}", follow_redirects=False)
    client.entry, client.base, client.app_ = entry, entry.base, app
    assert client.get(f"{entry.base}/?token={entry.token}").status_code == 303
    return client


def opened(runs: Path | None, *federations: Path) -> TestClient:
    named_federations = name_federations(federations)
    return client_of(
        lambda entry: server_app(run_folders(runs, named_federations), named_federations, entry, lambda: False)
    )


def opened_site(state: Path, policy: str = "") -> TestClient:
    return client_of(lambda entry: site_app(state, policy, "", entry, lambda: False))


@pytest.fixture
def runs(tmp_path) -> Path:
    """Three runs, one in a group; a log of 28 lines beside them, one of 12 in the group."""
    folder = tmp_path / "runs"
    write_run(folder, "fedavg")
    write_run(folder, "fedrand", state="failed", site_names=("north", "south", "west", "east"))
    write_run(folder / "demo", "fedqsn")
    for run in (folder / "fedavg", folder / "fedrand", folder / "demo" / "fedqsn"):
        log_of(run)
    return folder


def log_of(run: Path) -> None:
    """The lines of the audit log that belong to the run's attempts."""
    log = run.parent / audit_log.NAME
    sizes = {(m["round"], m["site"]): m["bytes"] for m in load_run(run).messages if m["direction"] == "up"}
    for attempt in load_run(run).attempts:
        for site in attempt["cohort"]:
            about = {"run": f"{run.name}-0a1b2c3d", "round": attempt["round"], "attempt": 0, "site": site}
            why = attempt["failed"].get(site)
            more = {"reason": why} if why else {"bytes": sizes[attempt["round"], site]}
            audit_log.append_entry(log, "failed" if why else "accepted", about | more)


@pytest.fixture
def hostile(tmp_path) -> Path:
    """A run in which every word that another side chooses is an attack on the page."""
    folder = tmp_path / "hostile"
    words = EVIL + ESCAPES
    run = write_run(folder, "fedrand", site_names=(words, f"'{words}", f'"{words}', "west"))
    for name in ("metrics.jsonl", "status.json", "config.json"):
        text = (run / name).read_text()
        text = text.replace('"bleu"', json.dumps(words)).replace("tiny", json.dumps(words)[1:-1])
        text = text.replace("ValueError: <no rows>", json.dumps(words)[1:-1])
        (run / name).write_text(text)
    status = {"state": words, "round": 1, "rounds": words, "reason": words, "ended": words}
    (run / "status.json").write_text(json.dumps(status))
    run.rename(folder / EVIL.replace("/", "\\"))
    about = {"run": words, "round": words, "site": words, "reason": words, words: words, "bytes": words}
    audit_log.append_entry(folder / audit_log.NAME, words, about)
    return folder
