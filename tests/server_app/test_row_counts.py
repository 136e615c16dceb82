"""Rows that sites cut or left out, over a whole run: the reports, metrics.jsonl, pages, the last lines and the card."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import ArrayRecord

from fedveil import rng, strategies
from fedveil.cards import card, markdown
from fedveil.client_app.app import app
from fedveil.config import parse
from fedveil.console.runs import per_site
from fedveil.console.runs.run_follower import closing_lines
from fedveil.console.runs.run_reader import load_run
from fedveil.console.web.report import disclosure_section
from fedveil.contract.row_counts import FIELDS, RowCounts
from fedveil.contract.task import Example, PreparedData
from fedveil.server_app.flower_strategy import MethodStrategy, _mean_report
from fedveil.server_app.metrics.samples import samples_from_line
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from tests.fedveil.cards.made import card as made_card
from tests.fedveil.console.web.conftest import opened
from tests.server_app.grid import LocalGrid, use_toy_task

SITES = ["north", "east", "west"]
POLICIES = {"north": "report-row-counts = true", "east": ""}  # the west has no policy
BOUNDS = "max-broadcast-change = 100.0\nmax-broadcast-drift = 100.0\n"
PERMITS = '[permits]\n"cohort.wait-seconds" = 1.0\n"cohort.min-sites" = 3\n"run.name" = "run"\n"run.rounds" = 2\n'
COUNTS = RowCounts(read_rows=12, cut_rows=3, dropped_rows=2)
WORDS = "3 of 12 rows cut (25.0 %), 2 left out as empty"


@pytest.fixture
def run(monkeypatch, tmp_path):
    task = use_toy_task(monkeypatch)
    rows = Example.from_columns([{"mr": "a", "ref": "b"}] * 10)
    cut = np.array([True] * 3 + [False] * 7)
    monkeypatch.setattr(task, "prepare", lambda *_: PreparedData(rows, lambda: [None] * 10, 2, cut))
    config = parse({"run.name": "run", "run.rounds": 2, "cohort.min-sites": 3, "cohort.wait-seconds": 1.0,
                    "method.name": "fedavg"})  # fmt: skip
    method = strategies.create_method("fedavg", "")
    grid = LocalGrid(app, SITES, tmp_path / "sites", config.flat())
    for site, text in POLICIES.items():
        grid.node_config[site] = {"policy": str(tmp_path / f"{site}.toml")}
        (tmp_path / f"{site}.toml").write_text(f'{text}\n{BOUNDS}{PERMITS}"method.name" = "fedavg"\n')
    with RunFolder(tmp_path / "run") as folder:
        folder.config(config, method)
        ours = MethodStrategy(method, RunSettings.from_config(config, "run"), folder=folder, spec=task.spec)
        ours.start(grid, ArrayRecord(dict(task.initial(rng.initial_stream(9, "weights")))), 2)

    return ours, tmp_path / "run"


def test_the_counts_are_in_every_record_of_the_run_where_the_policy_permits_them(run):
    ours, folder = run
    for record in ours.history:
        assert sorted(record.accepted) == sorted(SITES)
        found = {site: RowCounts.from_report(report) for site, report in record.reports.items()}
        assert found == {"north": COUNTS, "west": COUNTS, "east": None}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    attempts = [line for line in lines if "reports" in line]
    assert attempts[0]["reports"]["north"]["dropped_rows"] == 2
    assert attempts[0]["reports"]["north"]["cut_rows"] == 3
    assert not FIELDS & set(attempts[0]["reports"]["east"])
    assert not FIELDS & set(_mean_report(ours.history[0]))  # a mean of counts says nothing
    paths = {sample.path: sample.value for sample in samples_from_line(attempts[0], {}).figures}
    assert paths["site_cut_rows/north"] == 3.0
    view = load_run(folder)
    assert {site.name: site.rows for site in per_site.records_by_site(view)} == found
    assert per_site.incomplete_rows(view) == [f"north: {WORDS}", f"west: {WORDS}"]
    assert [line for line in closing_lines(folder) if "rows of" in line] == [
        f"rows of north: {WORDS}", f"rows of west: {WORDS}",
    ]  # fmt: skip
    assert str(disclosure_section.sites_section(view)).count(WORDS) == 2
    page = (client := opened(folder.parent)).get(f"{client.base}/runs/run").text
    assert page.count(WORDS) == 2


def test_the_card_lists_them_as_reported(run, tmp_path):
    ours, _ = run
    attempts = [{"round": 0, "cohort": SITES, "accepted": SITES, "reports": ours.history[0].reports, "weights": "a"}]
    made = made_card(tmp_path, attempts=attempts)
    assert made.rows == [card.SiteRows(site=site, read=12, cut=3, dropped=2) for site in ("north", "west")]
    page = markdown.card_page(made)
    assert "| north | 12 | 3 | 2 |" in page
    assert markdown.AS_REPORTED in page
    assert card.parse_card(made.to_bytes(), "card") == made
    assert markdown.NO_ROWS in markdown.card_page(made_card(tmp_path))
