"""`fedveil log policies`: which policy was in force when."""

from __future__ import annotations

import pytest

from fedveil.client_app.policy.policy_copies import find_copy, keep_copy
from fedveil.console.main import main
from fedveil.console.runs.policy_history import list_policies
from fedveil.errors import StateError
from fedveil.records import audit_log


@pytest.fixture
def state(tmp_path):
    """Return a state folder whose log has decisions by two policies, and lines without one."""
    policy, folder = tmp_path / "site-policy.toml", tmp_path / "state"
    for text, runs in (("max-rounds = 2", ("a", "b", "a")), ("max-rounds = 3", ("c",)), ("max-rounds = 2", ("d",))):
        policy.write_text(text)
        digest = keep_copy(folder, str(policy))
        for run in runs:
            audit_log.append_entry(folder / audit_log.NAME, "admitted", {"run": run, "policy": digest})
    audit_log.append_entry(folder / audit_log.NAME, "purged", {"run": "e"})
    audit_log.append_entry(folder / audit_log.NAME, "refused", {"policy": ""})
    return folder


def test_each_policy_has_its_decisions_runs_and_copy(state):
    lines = audit_log.read_log(state / audit_log.NAME)
    two, three = list_policies(state / audit_log.NAME)
    assert (two.decisions, two.runs) == (4, ("a", "b", "d"))
    assert (two.first, two.last) == (lines[0]["time"], lines[4]["time"])
    assert two.copy.read_text() == "max-rounds = 2"
    assert (three.decisions, three.runs, three.first) == (1, ("c",), three.last)
    assert three.copy == find_copy(state, three.digest)


def test_a_lost_copy_is_said(state, capsys):
    two, three = list_policies(state / audit_log.NAME)
    two.copy.unlink()
    assert main(["log", "policies", str(state / audit_log.NAME)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("  copy")] == [
        "  copy: none in this state folder", f"  copy: {three.copy}",
    ]  # fmt: skip
    assert out[0].startswith(two.digest[:12])
    assert out[0].endswith(", 4 decisions")


def test_a_log_without_policies_is_refused(tmp_path, capsys):
    audit_log.append_entry(tmp_path / audit_log.NAME, "accepted", {"run": "a"})
    assert main(["log", "policies", str(tmp_path / audit_log.NAME)]) == 2
    assert "expected a site's log, whose lines name its policy" in capsys.readouterr().err


def test_a_missing_log_is_said_and_a_damaged_line_is_left_out(state, tmp_path):
    with pytest.raises(StateError, match="expected a site's audit log, found none"):
        list_policies(tmp_path / "nothing" / audit_log.NAME)
    file = state / audit_log.NAME
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0].replace(b"admitted", b"refused_"), *lines[1:]]))
    assert [used.decisions for used in list_policies(file)] == [3, 1]
