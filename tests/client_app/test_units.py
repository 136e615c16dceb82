"""A site's whole round with patients as units: what leaves the site, what is charged, and what is refused."""

from __future__ import annotations

import json

import pytest

from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.state.client_state import open_ledger
from fedveil.contract.privacy import Step
from fedveil.errors import BudgetError, ConfigError, PolicyError, TaskError
from fedveil.privacy.ledger_account import UNIT
from fedveil.wire import header
from tests.client_app.one_site import Server

UNITS = {
    "dp.unit-column": "patient", "dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0, "train.batch-size": 3,
    "train.epochs": 2, "train.max-steps": 0,
}  # fmt: skip
ROWS = [
    {"mr": f"name[Aromi {i}]", "ref": f"Aromi {i} is a pub.", "patient": f"Secret-{i % 5}"} for i in range(12)
]  # 3, 3, 2, 2 and 2 rows
TWICE = [*ROWS, *(row for row in ROWS for _ in "ab" if row["patient"] == "Secret-1")]


def sent(tmp_path, rows, text="min-examples = 3", **config):
    tmp_path.mkdir(exist_ok=True)
    server = Server(tmp_path, text, rows, **UNITS, **config)
    return header.header_of_slices([server.send(server.initial)])


@pytest.mark.long
def test_what_a_server_sees_beside_the_gradient_is_the_same_for_a_patient_with_more_rows(tmp_path, caplog):
    heads = []
    for name, rows in (("few", ROWS), ("many", TWICE)):
        head = sent(tmp_path / name, rows)
        assert (head["num_examples"], head["report"]["steps"]) == (5, 2.0)
        assert not [key for key in head["report"] if "seconds" in key]  # a batch's size shows in its time
        without_checksums = [entry[:-1] for entry in head["fields"]]  # which are those of noised tensors
        heads.append({**head, "turn": "", "fields": without_checksums})
        charged = open_ledger(tmp_path / name).read(SitePolicy().budget).account
        assert charged.used == {Step("poisson", 5, 3, 1.0): 2}
        assert charged.unit == UNIT
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file() and path.name != "train.jsonl"]
        assert files
        assert not [path for path in files if b"Secret-" in path.read_bytes()]
    assert heads[0] == heads[1]
    assert len(TWICE) == 12 + 2 * 3
    assert "Secret-" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("first", ["", "patient"])
def test_a_site_protects_rows_or_patients_and_never_both(tmp_path, first):
    second = {"": "patient", "patient": ""}[first]
    server = Server(tmp_path, "", ROWS, **{**UNITS, "dp.unit-column": first})
    server.send(server.initial)
    ledger = tmp_path / ".ledger" / "ledger.json"
    before = ledger.read_bytes()
    other = Server(tmp_path, "", ROWS, **{**UNITS, "dp.unit-column": second})
    with pytest.raises(BudgetError, match="this site's ledger counts runs that protect (one row|a unit .*), but"):
        other.send(other.initial)
    assert ledger.read_bytes() == before


@pytest.mark.long
def test_min_examples_counts_patients_and_not_rows(tmp_path):
    """q = 3 / 5, two steps: 5 (1 - 0.4^2) = 4.2 patients are expected, of 12 rows."""
    sent(tmp_path / "enough", ROWS, "min-examples = 4")
    with pytest.raises(PolicyError, match="at least 5 examples, found fewer"):
        sent(tmp_path / "few", ROWS, "min-examples = 5")


def test_a_site_with_fewer_patients_than_a_batch_is_refused_and_names_none(tmp_path):
    rows = [{**row, "patient": f"Secret-{i % 2}"} for i, row in enumerate(ROWS)]
    with pytest.raises(ConfigError, match="at most the site's 2 examples, found 3"):
        sent(tmp_path, rows)


@pytest.mark.parametrize(
    "config,reason",
    [
        ({"dp.unit-column": "person"}, r'has no column "person"; it has mr, ref, patient'),
        ({"task.examples-per-site": 6}, r"task.examples-per-site = 6, a choice that depends on how many rows"),
        ({"dp.clip-norm": 0.0, "dp.noise-multiplier": 0.0}, "fedavg without .dp., which has no guarantee"),
        ({"train.gradient-accumulation-steps": 2}, "train.gradient-accumulation-steps = 2"),
        ({"evaluate.held-out": 0.5}, "evaluate.held-out: expected 0 with a privacy claim"),
    ],
)
def test_what_cannot_be_by_units_is_refused(tmp_path, config, reason):
    server = Server(tmp_path, "max-scores = 5", ROWS, **{**UNITS, **config})
    with pytest.raises((ConfigError, TaskError), match=reason):
        server.send(server.initial)
    assert not (tmp_path / ".ledger" / "ledger.json").exists()


@pytest.mark.long
def test_rows_of_a_patient_that_change_between_rounds_are_grouped_anew(tmp_path):
    server = Server(tmp_path, "", ROWS, **UNITS)
    assert header.header_of_slices([server.send(server.initial)])["num_examples"] == 5
    more = [*ROWS, {"mr": "name[Zizzi]", "ref": "Zizzi.", "patient": "New"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    assert header.header_of_slices([server.send(server.initial, 1)])["num_examples"] == 6
