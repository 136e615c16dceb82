"""How many rows a site cut or left out: at the site always, at the server only where policy and run permit it."""

from __future__ import annotations

import json
import logging

import pytest

from fedveil.client_app.client_round import ClientRoundResult
from fedveil.client_app.trainer_stack import why_counts_stay
from fedveil.client_app.worker import service
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.console.runs.workers import last_row_counts
from fedveil.contract.row_counts import FIELDS, RowCounts, find_fault
from fedveil.wire import header
from tests.client_app.one_site import Server

ROWS = [{"mr": f"name[Aromi {i}]", "ref": f"Aromi {i} is a pub."} for i in range(7)]
ROWS += [{"mr": "name[Aromi]" * 40, "ref": "Aromi is a pub."}, {"mr": "name[X]", "ref": ""}]
DROP = {"task.empty-texts": "drop"}
COUNTS = RowCounts(read_rows=9, cut_rows=1, dropped_rows=1)


def reported(upload: bytes) -> RowCounts | None:
    return RowCounts.from_report(header.header_of_slices([upload])["report"])


@pytest.mark.parametrize("text, expected", [("report-row-counts = true", COUNTS), ("", None)])
def test_the_policy_decides_whether_the_server_gets_the_counts(tmp_path, caplog, text, expected):
    server = Server(tmp_path, text, ROWS, **DROP)
    with caplog.at_level(logging.INFO, "fedveil.turn"):
        upload = server.send(server.initial)
    assert reported(upload) == expected
    said = "task.data: 1 of 9 rows cut (11.1 %), 1 left out as empty; "
    why = "these counts stay at this site: its policy does not permit them (report-row-counts)"
    assert said + ("the server gets these counts" if expected else why) in caplog.messages


def test_no_count_leaves_a_run_with_a_guarantee(tmp_path, caplog):
    server = Server(tmp_path, "report-row-counts = true", ROWS[:8], **{"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0})
    with caplog.at_level(logging.INFO, "fedveil.turn"):
        assert reported(server.send(server.initial)) is None
    assert "1 of 8 rows cut" in caplog.text
    assert "stay at this site: the run's privacy guarantee does not cover counts that depend on the rows" in caplog.text


def test_no_count_leaves_with_a_masked_upload(tmp_path):
    server = Server(tmp_path, "report-row-counts = true", ROWS, **DROP, **{"secure.enabled": True})
    round_ = type("Round", (), {"assignment": server.asked(), "policy": None})
    assert why_counts_stay(round_, server.exchange.method) == "a masked upload has no report"


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"cut_rows": 9.0}, "read_rows: expected at least"),
        ({"cut_rows": -1.0}, "cut_rows: expected a whole number"),
        ({"dropped_rows": 0.5}, "dropped_rows: expected a whole number"),
        ({"read_rows": 1e9}, "read_rows: expected a whole number"),
        ({"read_rows": None}, "read_rows: it must come with"),
    ],
)
def test_impossible_counts_are_refused(changed, named):
    report = {k: v for k, v in {**COUNTS.to_report(), **changed}.items() if v is not None}
    assert find_fault(report, 1000).startswith(named)
    assert find_fault(COUNTS.to_report(), 1000) == find_fault({"steps": 1.0}, 1000) == ""


def test_a_sites_own_log_of_rounds_has_the_counts(tmp_path, monkeypatch):
    """Whatever the policy permits: that file stays at the site."""
    server = Server(tmp_path, "", ROWS, **DROP)
    registry = WorkerRegistry(tmp_path, "s")
    registry.path.mkdir(parents=True)
    worker = service.WorkerService(registry, OwnerProcess(0, 0), memory_mb=0)
    worker._session = server.turns
    monkeypatch.setattr(server.turns, "run_round", lambda *_: ClientRoundResult([b"upload"], 0.0, COUNTS))
    head = {"key": "", "assignment": server.asked().to_json(), "bytes": 0}
    answer, _ = worker._turn(iter([json.dumps(head).encode()]), None)  # type: ignore[arg-type]
    line = json.loads(registry.turns.read_text())
    assert (line["dropped_rows"], line["cut_rows"], line["read_rows"]) == (1, 1, 9)
    assert {name: answer[name] for name in FIELDS} == {name: line[name] for name in FIELDS}
    assert last_row_counts(tmp_path) == [f"s: in the last client round, {COUNTS.words}"]
    registry.failed({"run": "r", "round": 1}, "TaskError: x")
    assert last_row_counts(tmp_path) == []
