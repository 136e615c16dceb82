"""What `fedveil site status` says of a site's privacy ledger."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import pytest

from fedveil.client_app.state.client_state import open_ledger
from fedveil.client_app.state.data_sets import FolderWitness
from fedveil.console.main import main
from fedveil.console.runs.ledger_summary import bound_of, ledger_lines
from fedveil.contract.privacy import Adjacency, PrivacyBudget, Step
from fedveil.encrypted_files import FileSeal, make_key
from fedveil.errors import StateError
from fedveil.privacy import accounting
from fedveil.privacy.ledger_account import Party, RunTerms

STEP, SUMMED = Step("gaussian", 0, 0, 2.0), {Step("summed", 0, 0, 3.0): 1, Step("own share", 0, 0, 1.0): 1}
OWN = PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)


def charge(state, charges, run="r", seal=None, own=OWN, most=2):
    open_ledger(state, seal or FileSeal()).charge(RunTerms(run, OWN, most, most), charges, own)


def epsilon(charges, delta=1e-5, neighbours=Adjacency.REPLACE_ONE) -> str:
    return (
        f"epsilon {accounting.compute_epsilon(charges, delta, neighbours):.4g} at delta {delta:g} ({neighbours.value})"
    )


def test_no_ledger_no_line(tmp_path, capsys):
    assert ledger_lines(tmp_path) == []
    assert main(["site", "ledger", "show", "--state-dir", str(tmp_path)]) == 0
    assert "no privacy ledger in" in capsys.readouterr().out


def test_what_holds_over_all_runs_and_what_is_reserved_against_each_party(tmp_path, capsys):
    own = replace(OWN, epsilon=2 * accounting.compute_epsilon({STEP: 2}, 1e-5 / 16, Adjacency.REPLACE_ONE))
    charge(tmp_path, {STEP: 1}, own=own)
    about = (
        f"at most epsilon {own.epsilon:.4g} at delta 1e-05 (replace-one) over all runs, regardless of decisions "
        f"between them; 50 % of it is reserved. {epsilon({STEP: 1})} so far, if all runs had been planned together"
    )
    lines = ledger_lines(tmp_path)
    assert lines == [
        "privacy ledger: 1 of at most 16 runs with a claim; 1 entries",
        f"privacy ledger: against the server with the colluding sites that the run tolerates: {about}",
        f"privacy ledger: against the other sites and holders of the model: {about}",
    ]
    main(["site", "status", "--state-dir", str(tmp_path)])
    assert set(lines) <= set(capsys.readouterr().out.splitlines())
    kit = tmp_path / "kit"
    kit.mkdir()
    (kit / "node-config.toml").write_text('state-dir = ".."\n')
    main(["site", "status", "--kit", str(kit)])
    assert lines[1] in capsys.readouterr().out
    assert main(["site", "ledger", "show", "--kit", str(kit)]) == 0
    shown = capsys.readouterr().out
    assert f"reserves epsilon {own.epsilon / 2:.4g} at delta 6.25e-07; 1 of 2 steps ('gaussian', 0, 0, 2.0" in shown
    main(["site", "status", "--kit", str(kit), "--state-dir", str(kit)])
    assert lines[1] not in capsys.readouterr().out


def test_above_sixteen_runs_no_limit_is_said_to_hold_over_all_runs(tmp_path):
    own = replace(OWN, epsilon=1e6)
    for i in range(17):
        charge(tmp_path, {STEP: 1}, str(i))  # the policy sets no max-epsilon yet
    standing = replace(open_ledger(tmp_path).read(own).account, own=own).standing(Party.SERVER)
    assert bound_of(standing, own).startswith("no limit over all runs: ")


def test_an_open_entry_is_shown_with_its_run(tmp_path, capsys):
    open_ledger(tmp_path).note_open("plain-1", "it has no privacy guarantee", OWN)
    charge(tmp_path, {STEP: 1})
    assert "over all runs, epsilon is infinite, because of run plain-1" in ledger_lines(tmp_path)[1]
    main(["site", "ledger", "show", "--state-dir", str(tmp_path)])
    assert "  run plain-1; open against everyone: it has no privacy guarantee" in capsys.readouterr().out


def test_noise_in_sums_has_a_third_party(tmp_path):
    charge(tmp_path, SUMMED)
    own = accounting.epsilon_against_all(SUMMED)
    (line,) = [line for line in ledger_lines(tmp_path) if "with all other sites" in line]
    assert line.endswith(f"no limit applies. {epsilon(own)} so far, if all runs had been planned together")


def test_the_policy_s_limit_is_shown_and_a_sealed_ledger_takes_its_key(tmp_path):
    seal, state = make_key(tmp_path / "key"), tmp_path / "state"
    charge(state, {STEP: 1}, seal=seal)
    policy = tmp_path / "policy.toml"
    policy.write_text("max-epsilon = 99.0\n")
    assert "at most epsilon 99 at delta 1e-05" in ledger_lines(state, str(policy), str(tmp_path / "key"))[1]
    (line,) = ledger_lines(state, str(policy))
    assert ": cannot be read: " in line
    (state / "north.toml").write_text(f'site = "north"\npolicy = "{policy}"\nkey-file = "{tmp_path / "key"}"\n')
    assert ledger_lines(state) == ledger_lines(state, str(policy), str(tmp_path / "key"))
    policy.write_text('delta = 1e-3\nadjacency = "zero-out"\n')
    assert "no run with a claim is permitted until it is changed back" in ledger_lines(state)[-1]


def test_a_limit_that_was_changed_is_shown(tmp_path):
    charge(tmp_path, {STEP: 1}, own=replace(OWN, epsilon=50.0))
    charge(tmp_path, {STEP: 1}, "second", own=replace(OWN, epsilon=80.0))
    assert "max-epsilon was 50, then 80, at delta 1e-05 (replace-one)" in ledger_lines(tmp_path)[-1]


def test_ledgers_of_an_early_version_are_counted_before_they_are_carried_over(tmp_path):
    (tmp_path / ".ledger").mkdir()
    old = {"fedveil-ledger": 1, "spent": [[[[list(STEP[:4]), 3]], ["ab" * 16]]]}
    for site in ("north", "south"):
        (tmp_path / ".ledger" / f"{site}.json").write_text(json.dumps(old))
    assert f"{epsilon({STEP: 6})} so far" in ledger_lines(tmp_path)[1]
    assert len(list((tmp_path / ".ledger").glob("*.json"))) == 2


@pytest.mark.parametrize("data", [b"", b"{}", b'{"fedveil-ledger": 99}'])
def test_a_ledger_that_cannot_be_read_is_said(tmp_path, data):
    (tmp_path / ".ledger").mkdir()
    (tmp_path / ".ledger" / "ledger.json").write_bytes(data)
    (line,) = ledger_lines(tmp_path)
    assert ": cannot be read: " in line


# --- adopt, recover


def private_data(tmp_path, name: str, run: str = "r"):
    """A data folder that was charged in the state folder of this name."""
    (tmp_path / "data").mkdir(exist_ok=True)
    witness = FolderWitness.open(tmp_path / "data", "")
    open_ledger(tmp_path / name).charge(RunTerms(run, OWN, 5, 5), {STEP: 1}, OWN, witness)
    return witness


@pytest.mark.long
def test_another_folder_s_history_is_adopted_by_command(tmp_path, capsys):
    private_data(tmp_path, "first")
    command = ["site", "ledger", "adopt", str(tmp_path / "data"), "--state-dir", str(tmp_path / "second")]
    assert main([*command, "--from", str(tmp_path / "nothing")]) == 2
    assert "expected a state folder with a ledger" in capsys.readouterr().err
    assert main([*command, "--from", str(tmp_path / "first")]) == 0
    assert "1 entries added" in capsys.readouterr().out
    private_data(tmp_path, "second")
    with pytest.raises(StateError, match="adopt"):
        private_data(tmp_path, "first")
    with pytest.raises(StateError, match="adopt"):
        private_data(tmp_path, "third")
    command[-1] = str(tmp_path / "third")
    assert main([*command, "--lost"]) == 0
    assert "because of run a lost ledger" in ledger_lines(tmp_path / "third")[1]


def test_a_restored_ledger_is_recovered_by_command(tmp_path, capsys):
    private_data(tmp_path, "state")
    backup = (tmp_path / "state" / ".ledger" / "ledger.json").read_bytes()
    private_data(tmp_path, "state")
    (tmp_path / "state" / ".ledger" / "ledger.json").write_bytes(backup)
    with pytest.raises(StateError, match="fedveil site ledger recover"):
        private_data(tmp_path, "state")
    command = ["site", "ledger", "recover", "--state-dir", str(tmp_path / "state")]
    assert main([*command, str(tmp_path / "none")]) == 2
    assert main([*command, str(tmp_path / "data")]) == 0
    assert "recovered: all runs used up" in capsys.readouterr().out
    private_data(tmp_path, "state", "next")


@pytest.mark.parametrize("action", [["recover"], ["adopt", "--lost"]])
@pytest.mark.parametrize("data_set", ["", 'data-set = "ward-7"'])
def test_a_data_folder_that_cannot_be_written_is_refused_before_anything_changes(
    tmp_path, capsys, monkeypatch, action, data_set
):
    private_data(tmp_path, "first" if "adopt" in action else "state")
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "north.toml").write_text(f'site = "north"\n{data_set}\n')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(tmp_path / "data")))
    command = ["site", "ledger", *action, str(tmp_path / "data"), "--state-dir", str(tmp_path / "state")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "DATA: expected a data folder that this user can write" in error
    assert "nothing was changed" in error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_recovery_of_data_that_never_had_a_mark_needs_no_writable_folder(tmp_path, capsys, monkeypatch):
    private_data(tmp_path, "state")
    (tmp_path / "state" / "north.toml").write_text('site = "north"\ndata-set = "ward-7"\n')
    (tmp_path / "bare").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(tmp_path / "bare")))
    command = ["site", "ledger", "recover", str(tmp_path / "bare"), "--state-dir", str(tmp_path / "state")]
    assert main(command) == 0
    assert "an open entry for those that may be missing" in capsys.readouterr().out
    assert list((tmp_path / "bare").iterdir()) == []


def test_a_state_folder_that_cannot_be_written_is_said_before_anything_changes(tmp_path, capsys):
    private_data(tmp_path, "state")
    (tmp_path / "state" / ".ledger" / "ledger.lock").unlink()
    (tmp_path / "state" / ".ledger" / "ledger.lock").mkdir()  # root may write everywhere else
    before = (tmp_path / "state" / ".ledger" / "ledger.json").read_bytes()
    command = ["site", "ledger", "recover", str(tmp_path / "data"), "--state-dir", str(tmp_path / "state")]
    assert main(command) == 2
    assert (
        "cannot lock the privacy ledger, because this user cannot write the file (IsADirectoryError"
        in capsys.readouterr().err
    )
    assert (tmp_path / "state" / ".ledger" / "ledger.json").read_bytes() == before
