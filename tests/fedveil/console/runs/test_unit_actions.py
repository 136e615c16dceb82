"""What a person may ask of a site: `fedveil site exposure` and `fedveil site withdraw`, from the site's own records."""

from __future__ import annotations

import io
import json
import math
import re
import shlex

import pytest

from fedveil.client_app.state.client_state import open_ledger
from fedveil.client_app.state.data_sets import PREPARED
from fedveil.client_app.state.withdrawn_units import WithdrawalRecord
from fedveil.console.main import main, make_parser
from fedveil.console.runs.re_encrypt import re_encrypt_files, require_key
from fedveil.contract.privacy import Adjacency, PrivacyBudget, Step
from fedveil.data.units import plain_id
from fedveil.encrypted_files import FileSeal, make_key
from fedveil.errors import StateError
from fedveil.privacy import accounting
from fedveil.privacy.ledger_account import ROW, UNIT, RunTerms
from fedveil.records import audit_log

STEP = Step("poisson", 50, 5, 1.0)
OWN = PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)
CLAIM = PrivacyBudget(20.0, 1e-5, Adjacency.REPLACE_ONE)
SERVER = "the server with the colluding sites that the run tolerates"


@pytest.fixture
def state(tmp_path):
    """A site that took part in a private run by units from its second round on, and in one without a claim."""
    state, data = tmp_path / "state", tmp_path / "data"
    data.mkdir()
    rows = [{"mr": str(i), "ref": "b", "patient": f"Secret-{i % 3}"} for i in range(8)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "test.jsonl").write_text(json.dumps({"mr": "x", "ref": "y", "patient": "secret-2 "}) + "\n")
    (data / "notes.jsonl").write_text('{"text": "z"}\n')
    state.mkdir()
    (state / "north.toml").write_text(f'site = "north"\ndata = "{data}"\nunit-column = "patient"\n')
    log = state / audit_log.NAME
    for run, method, round_ in (
        ("trial-0a1b2c3d", "fedavg", 1),
        ("trial-0a1b2c3d", "fedavg", 2),
        ("open-1", "fedsp", 0),
    ):
        about = {"run": run, "site": "north", "method": method, "round": round_, "rounds": 4}
        audit_log.append_entry(log, "admitted", about)
        audit_log.append_entry(log, "sent", about)
    ledger = open_ledger(state)
    for _ in range(2):
        ledger.charge(RunTerms("trial-0a1b2c3d", CLAIM, 4, 4, UNIT), {STEP: 3}, OWN)
    ledger.note_open("open-1", "it has no privacy guarantee", OWN)
    (state / "trial-0a1b2c3d" / "north").mkdir(parents=True)
    (state / "trial-0a1b2c3d" / "north" / "secret").write_bytes(bytes(64))
    (state / PREPARED / "north" / "set").mkdir(parents=True)
    (state / PREPARED / "north" / "set" / "ids.bin").write_bytes(b"Secret-2")
    return state


def did(capsys, *words) -> str:
    assert main(["site", *map(str, words)]) == 0
    return capsys.readouterr().out


def is_exact(epsilon: float) -> bool:
    """Whether this is the epsilon of the private run's two client rounds, as printed: rounded up by at most 1 %."""
    true = accounting.compute_epsilon({STEP: 6}, 1e-5, Adjacency.REPLACE_ONE)
    return true * 0.9995 <= epsilon <= true * 1.01


def test_exposure_names_runs_rounds_methods_and_epsilon_against_each_adversary(state, capsys):
    out = did(capsys, "exposure", "--unit", "Secret-2", "--state-dir", state)
    assert 'rows in the data now: 1 in test.jsonl, 2 in train.jsonl (column "patient"' in out
    assert re.search(r'rows in notes\.jsonl: unknown: dp\.unit-column: ".*notes\.jsonl" has no column', out)
    assert "which runs drew this unit's rows is not recorded, because that is secret" in out
    assert "run trial-0a1b2c3d: fedavg; rounds 2 to 3 of 4, 2 uploads from " in out
    assert "each record drawn independently with probability 0.1" in out
    assert is_exact(float(out.partition(f"  against {SERVER}: epsilon ")[2].split()[0]))
    assert "run open-1: fedsp; rounds 1 of 4, 1 uploads" in out
    assert f"  against {SERVER}: no bound: it has no privacy guarantee" in out
    assert f"over all runs, against {SERVER}: over all runs, epsilon is infinite, because of run open-1." in out
    assert "each epsilon is for one row" not in out
    assert "the site stores 64 bytes of private state" in out


def test_exposure_as_json_has_the_same_figures_and_no_id(state, capsys):
    text = did(capsys, "exposure", "--unit", "Secret-2", "--json", "--state-dir", state)
    about = json.loads(text)
    assert about["rows"]["files"] == {"test.jsonl": 1, "train.jsonl": 2}
    assert [run["run"] for run in about["runs"]] == ["trial-0a1b2c3d", "open-1"]
    trial, open_ = about["runs"]
    assert trial["rounds"] == [{"round": 2, "uploads": 1}, {"round": 3, "uploads": 1}]
    assert is_exact(trial["epsilon"][SERVER])
    assert (open_["epsilon"][SERVER], open_["why-infinite"]) == ("infinite", "it has no privacy guarantee")
    assert (about["unit"], about["delta"]) == (UNIT, 1e-5)
    assert "secret-2" not in text.lower()


def test_every_data_set_of_a_site_is_searched(state, tmp_path, capsys):
    """A withdrawal applies to all of them, so each one is searched, and one in which no id can be found is named."""
    (tmp_path / "ct").mkdir()
    (tmp_path / "ct" / "train.jsonl").write_text('{"mr": "a", "ref": "b", "person": "Secret-2"}\n')
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "train.jsonl").write_text('{"mr": "a", "ref": "b"}\n')
    (state / "north.toml").write_text(
        f'site = "north"\nunit-column = "patient"\n[data-sets.icu]\ndata = "{tmp_path / "data"}"\n'
        f'[data-sets.ct]\ndata = "{tmp_path / "ct"}"\nunit-column = "person"\n'
        f'[data-sets.lab]\ndata = "{tmp_path / "lab"}"\n'
    )
    asked = ("--unit", "secret-2", "--state-dir", state)
    output = did(capsys, "exposure", *asked)
    assert f'1 in train.jsonl (column "person" of {tmp_path / "ct"})' in output
    assert f'(column "patient" of {tmp_path / "data"})' in output
    assert "rows in train.jsonl: unknown:" in output
    found = json.loads(did(capsys, "exposure", *asked, "--json"))["data_sets"]
    assert found["ct"]["files"] == {"train.jsonl": 1}
    assert sum(found["icu"]["files"].values()) == 3
    assert found["lab"]["problems"]
    only = did(capsys, "exposure", *asked, "--data-set", "ct")
    assert str(tmp_path / "data") not in only
    output = did(capsys, "withdraw", *asked)
    assert str(tmp_path / "ct") in output
    assert "does not train on data in which it cannot find withdrawn units" in output
    assert main(["site", "exposure", *map(str, asked), "--data-set", "none"]) == 2
    assert "no data set of this name" in capsys.readouterr().err


def test_an_unknown_place_and_an_unknown_unit_are_said(state, tmp_path, capsys):
    assert "rows in the data now: none (" in did(capsys, "exposure", "--unit", "7", "--state-dir", state)
    (state / "north.toml").unlink()
    assert "set --data" in did(capsys, "exposure", "--unit", "7", "--state-dir", state)
    out = did(capsys, "exposure", "--unit", "7", "--data", tmp_path / "data", "--state-dir", state)
    assert "set --unit-column" in out
    none = did(capsys, "exposure", "--unit", "7", "--state-dir", tmp_path / "none")
    assert "according to this site's records, no run has trained here" in none
    assert main(["site", "exposure", "--unit", " ", "--state-dir", str(state)]) == 2
    assert "found a blank one" in capsys.readouterr().err


def test_a_ledger_of_rows_says_that_it_bounds_no_person(tmp_path, capsys):
    open_ledger(tmp_path).charge(RunTerms("r", CLAIM, 4, 4, ROW), {STEP: 1}, OWN)
    out = did(capsys, "exposure", "--unit", "a", "--state-dir", tmp_path)
    assert "each epsilon is for one row, and gives no bound for a person with several rows" in out


def test_withdraw_leaves_no_id_behind_and_says_what_retraining_takes(state, capsys, monkeypatch):
    before = open_ledger(state).read(OWN).account
    monkeypatch.setattr("sys.stdin", io.StringIO("Secret-2\n"))
    out = did(capsys, "withdraw", "--unit", "-", "--state-dir", state)
    assert out.startswith("withdrawn: no client round that starts from now on will train on this unit's rows\n")
    assert "rows in the data now: 1 in test.jsonl, 2 in train.jsonl" in out
    assert "this site does not train on data in which it cannot find withdrawn units" in out  # notes.jsonl
    assert "run trial-0a1b2c3d may have used the rows: rounds 2 to 3 of 4" in out
    assert "run open-1 may have used the rows: rounds 1 of 4" in out
    commands = [line.strip() for line in out.splitlines() if line.startswith("    fedveil")]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)[1:]
        assert callable(make_parser(words[0]).parse_args(words).run)
    assert "--config runs/trial/resume.toml --set run.resume=false --set run.name=trial-again" in commands[0]
    assert WithdrawalRecord.open(state).read().find(plain_id("secret-2"))
    assert open_ledger(state).read(OWN).account == before  # nothing is given back
    assert not list((state / PREPARED).glob("*/*"))
    assert [line["event"] for line in audit_log.read_log(state / audit_log.NAME)][-2:] == ["purged", "withdrawn"]
    assert not [path for path in state.rglob("*") if path.is_file() and b"secret-2" in path.read_bytes().lower()]
    assert "secret-2" not in out.lower()
    assert "this unit was already withdrawn" in did(capsys, "withdraw", "--unit", "SECRET-2", "--state-dir", state)
    assert "withdrawn since 20" in did(capsys, "exposure", "--unit", "Secret-2", "--state-dir", state)
    main(["site", "status", "--state-dir", str(state)])
    assert "withdrawn units: 1, whose rows no run trains on" in capsys.readouterr().out
    (state / ".withdrawn" / "units.json").write_text("{}")
    main(["site", "status", "--state-dir", str(state)])
    assert "withdrawn units: cannot be read: " in capsys.readouterr().out


def test_a_site_s_first_round_that_is_the_last_may_be_undone_by_a_resume(state, capsys):
    about = {"run": "late-00000000", "site": "north", "method": "fedavg", "round": 3, "rounds": 9}
    audit_log.append_entry(state / audit_log.NAME, "sent", about)
    out = did(capsys, "withdraw", "--unit", "Secret-2", "--state-dir", state)
    assert "the run can resume from before it" in out
    assert "    fedveil submit --federation FOLDER --config runs/late/resume.toml\n" in out
    assert out.count("can resume from before it") == 1


def test_units_are_counted_and_what_a_run_would_refuse_is_named_by_its_rows(state, tmp_path, capsys):
    command = ["site", "units", "--state-dir", str(state)]
    assert main(command) == 1  # because of notes.jsonl
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith('notes.jsonl: cannot be counted: dp.unit-column: "')
    assert lines[1:] == [
        "test.jsonl: 1 units in 1 rows, at most 1 per unit",
        "train.jsonl: 3 units in 8 rows, at most 3 per unit",
    ]
    (tmp_path / "data" / "notes.jsonl").unlink()
    assert main(command) == 0
    ids = ["Zoe-1", "1e3", "zoe-1", "\u200b", None, "1000", "B-7", *["\u2003"] * 10]
    rows = "".join(json.dumps({"patient": each}) + "\n" for each in ids)
    (tmp_path / "data" / "train.jsonl").write_text(rows)
    capsys.readouterr()
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "train.jsonl: 3 units in 17 rows, at most 2 per unit\n" in out
    assert (
        "12 rows without an ID, which may belong to the same person: rows 4, 5, 8, 9, 10, 11, 12, 13, 14, 15, ...;"
        in out
    )
    assert "2 IDs in several spellings, first in rows 1 and 3; 2 and 6;" in out
    assert "zoe" not in out.lower()
    assert "1000" not in out
    assert main([*command, "--data", str(tmp_path / "none")]) == 2
    assert "--data: expected a folder with row files" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["{", "", '{"fedveil-ledger": 99}'])
def test_a_damaged_ledger_stops_no_withdrawal_and_is_said(state, capsys, damage):
    (state / ".ledger" / "ledger.json").write_text(damage)
    out = did(capsys, "withdraw", "--unit", "Secret-2", "--state-dir", state)
    assert out.startswith("withdrawn: ")
    assert "privacy ledger: cannot be read, so the runs below come from the audit log: " in out
    assert "run trial-0a1b2c3d may have used the rows: rounds 2 to 3 of 4" in out
    assert WithdrawalRecord.open(state).read().find(plain_id("secret-2"))
    assert audit_log.read_log(state / audit_log.NAME)[-1]["event"] == "withdrawn"
    assert (state / ".ledger" / "ledger.json").read_text() == damage
    assert main(["site", "exposure", "--unit", "Secret-2", "--state-dir", str(state)]) == 2
    assert "site ledger adopt DATA --lost" in capsys.readouterr().err


def test_withdraw_needs_a_column_and_a_sealed_site_seals_the_list(state, tmp_path, capsys):
    (state / "north.toml").unlink()
    assert main(["site", "withdraw", "--unit", "Secret-2", "--state-dir", str(state)]) == 2
    assert "--unit-column: expected the column" in capsys.readouterr().err
    assert not (state / ".withdrawn").exists()
    did(capsys, "withdraw", "--unit", "Secret-2", "--unit-column", "patient", "--state-dir", state)
    seal = make_key(tmp_path / "key")
    with pytest.raises(StateError):
        require_key(state, seal)
    assert state / ".withdrawn" / "units.json" in re_encrypt_files(state, FileSeal(), seal)
    require_key(state, seal)
    assert WithdrawalRecord.open(state, seal).read().find(plain_id("Secret-2"))
