"""A site's figures are its own words. Whatever it reported, the report has a page, and says what is unknown."""

from __future__ import annotations

import json
import time

import pytest

from fedveil.console.main import main
from fedveil.console.runs import privacy_statements
from fedveil.console.runs import run_reader as runs
from tests.fedveil.console.conftest import make_run  # noqa: F401  # a fixture

REPORTS = {
    "no steps": ({"num_examples": 40}, "not known. Its reports lack the number of examples or steps"),
    "10**300 steps": ({"num_examples": 40, "steps": 1e300}, "not known. Its reports lack"),
    "10**15 steps": ({"num_examples": 40, "steps": 10**15}, "not known. Its reports lack"),
    "half a step": ({"num_examples": 40, "steps": 0.5}, "not known. Its reports lack"),
    "steps below zero": ({"num_examples": 40, "steps": -3}, "not known. Its reports lack"),
    "steps that are no number": ({"num_examples": 40, "steps": float("nan")}, "not known. Its reports lack"),
    "steps in words": ({"num_examples": 40, "steps": "many"}, "not known. Its reports lack"),
    "one row": ({"num_examples": 1, "steps": 1}, "not known, because its reports do not fit the run (train.batch-size"),
    "10,000 steps": ({"num_examples": 40, "steps": 10_000.0}, "at most epsilon"),
    "10,000,000 steps": ({"num_examples": 40, "steps": 10_000_000}, "not known. Its reports lack"),
    "100,000 steps of few rows": ({"num_examples": 10, "steps": 100_000}, "more than the accountant supports"),
    "100,000 steps of many rows": ({"num_examples": 100_000, "steps": 100_000}, "at most epsilon"),
    "1,000,000 steps of many rows": ({"num_examples": 1_000_000, "steps": 1_000_000}, "at most epsilon"),
    "no figure at all": ({}, "not known. Its reports lack"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", REPORTS)
def test_the_page_is_made_and_says_what_is_not_known(kind, make_run, capsys):  # noqa: F811
    report, expected = REPORTS[kind]
    folder = make_run(method="dp_fpl")
    config = json.loads((folder / "config.json").read_text())
    config["method"]["fields"] = {"noise_local": 4.0, "noise_global": 4.0}
    config["config"] |= {"run.deterministic": False, "train.batch-size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["reports"]["site-0"] = report
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    started = time.process_time()
    (sentence,) = [s for s in privacy_statements.privacy_statements(runs.load_run(folder)) if s.startswith("site-0")]
    assert expected in sentence
    assert main(["report", str(folder), "--out", str(folder / "page.html")]) == 0
    assert "site-0" in (folder / "page.html").read_text()
    assert time.process_time() - started < 60
