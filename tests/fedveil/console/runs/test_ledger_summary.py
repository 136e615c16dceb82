"""What `fedveil site status` says of a site's privacy ledger."""

from __future__ import annotations

import json

import pytest

from fedveil.client_app.state.client_state import open_ledger
from fedveil.console.main import main
from fedveil.console.runs.ledger_summary import ledger_lines
from fedveil.contract.privacy import Adjacency, PrivacyBudget, Step
from fedveil.encrypted_files import make_key
from fedveil.privacy import accounting

STEP, SUMMED = Step("gaussian", 0, 0, 2.0), {Step("summed", 0, 0, 3.0): 1, Step("own share", 0, 0, 1.0): 1}
BUDGET = PrivacyBudget(1e9, 1e-5, Adjacency.REPLACE_ONE)


def charge(state, charges, rows, seal=None):
    ledger = open_ledger(state, "north", seal) if seal else open_ledger(state, "north")
    ledger.charge(ledger.names([("d", "f", row) for row in rows]), charges, BUDGET)


def epsilon(charges, delta=1e-5, neighbours=Adjacency.REPLACE_ONE) -> str:
    return (
        f"epsilon {accounting.compute_epsilon(charges, delta, neighbours):.4g} at delta {delta:g} ({neighbours.value})"
    )


def test_no_ledger_no_line(tmp_path):
    assert ledger_lines(tmp_path) == []


def test_the_most_charged_row_over_all_runs(tmp_path, capsys):
    charge(tmp_path, {STEP: 2}, range(5))
    charge(tmp_path, {STEP: 1}, [2])
    (line,) = ledger_lines(tmp_path)
    words = "5 examples charged over all runs; the highest charge is"
    assert line == f"privacy ledger of north: {words} {epsilon({STEP: 3})}"
    main(["site", "status", "--state-dir", str(tmp_path)])
    assert line in capsys.readouterr().out
    kit = tmp_path / "kit"
    kit.mkdir()
    (kit / "node-config.toml").write_text('state-dir = ".."\n')
    main(["site", "status", "--kit", str(kit)])
    assert line in capsys.readouterr().out
    main(["site", "status", "--kit", str(kit), "--state-dir", str(kit)])
    assert line not in capsys.readouterr().out


def test_noise_in_sums_has_a_second_figure(tmp_path):
    charge(tmp_path, SUMMED, [1])
    (line,) = ledger_lines(tmp_path)
    own = accounting.epsilon_against_all(SUMMED)
    assert line.endswith(f"{epsilon(SUMMED)}, against the server and all other sites together {epsilon(own)}")
    assert accounting.compute_epsilon(own, 1e-5, Adjacency.REPLACE_ONE) > accounting.compute_epsilon(
        SUMMED, 1e-5, Adjacency.REPLACE_ONE
    )


def test_delta_and_relation_are_the_policy_s_and_a_sealed_ledger_takes_its_key(tmp_path):
    seal, state = make_key(tmp_path / "key"), tmp_path / "state"
    charge(state, {STEP: 1}, [1], seal)
    policy = tmp_path / "policy.toml"
    policy.write_text('delta = 1e-3\nadjacency = "zero-out"\n')
    (line,) = ledger_lines(state, str(policy), str(tmp_path / "key"))
    assert line.endswith(epsilon({STEP: 1}, 1e-3, Adjacency.ZERO_OUT))
    (line,) = ledger_lines(state, str(policy))
    assert ": cannot be read: " in line
    (state / "north.toml").write_text(f'site = "north"\npolicy = "{policy}"\nkey-file = "{tmp_path / "key"}"\n')
    assert ledger_lines(state) == ledger_lines(state, str(policy), str(tmp_path / "key"))


def test_what_all_rows_of_a_ledger_of_an_early_version_begin_with_is_counted(tmp_path):
    (tmp_path / ".ledger").mkdir()
    old = {"fedveil-ledger": 1, "spent": [[[[list(STEP[:4]), 3]], ["ab" * 16]]]}
    (tmp_path / ".ledger" / "north.json").write_text(json.dumps(old))
    (line,) = ledger_lines(tmp_path)
    assert line.endswith(f"0 examples charged over all runs; the highest charge is {epsilon({STEP: 3})}")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"fedveil-ledger": 99}'])
def test_a_ledger_that_cannot_be_read_is_said(tmp_path, data):
    (tmp_path / ".ledger").mkdir()
    (tmp_path / ".ledger" / "north.json").write_bytes(data)
    (line,) = ledger_lines(tmp_path)
    assert ": cannot be read: " in line
