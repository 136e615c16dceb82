"""A run among sites with keys, roster and policies in files, as people have them, and a server that has the roster."""

from __future__ import annotations

from collections import Counter

import pytest

from fedveil.client_app import app as client
from fedveil.config import parse
from fedveil.errors import QuorumError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest
from fedveil.records import audit_log
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.run_settings import RunSettings
from fedveil.strategies.fedavg import FedAvg
from tests.server_app.grid import LocalGrid, use_toy_task
from tests.server_app.test_flower_strategy import QUICK, initial

NAMES = ("east", "north", "south", "west")


def run(tmp_path, task, digest: str | None = None, other: str = ""):
    """One round. `digest` stands in the policies in place of the roster's; `other` has a key that is not in it."""
    secrets = {name: bytes([i + 1]) * 32 for i, name in enumerate(NAMES)}
    roster = {name: crypto.verifying_key(secret).hex() for name, secret in secrets.items()}
    (tmp_path / "roster.json").write_bytes(SigningKeyRoster(signing_keys=roster).to_bytes())
    config = {f"cohort.{key.replace('_', '-')}": value for key, value in QUICK.items()}
    config |= {"run.seed": 9, "run.deterministic": True, "method.name": "fedavg", "secure.enabled": True}
    config |= {"secure.roster": str(tmp_path / "roster.json"), "cohort.max-retries": 0}
    permits = "".join(
        f'"{key}" = {str(value).lower()}\n' for key, value in config.items() if key[:6] in ("cohort", "run.se")
    )
    text = f'require-secure = true\nroster = "{digest or roster_digest(roster)}"\nmethods = ["fedavg"]\n[permits]\n'
    (tmp_path / "policy.toml").write_text(f'{text}"run.deterministic" = true\n{permits}')
    grid = LocalGrid(client.app, NAMES, tmp_path / "state", config)
    for name, secret in secrets.items():
        file = tmp_path / f"{name}.key"
        file.write_bytes(bytes(32) if name == other else secret)
        file.chmod(0o600)
        grid.node_config[name] = {
            "site": name, "signing-key": str(file), "policy": str(tmp_path / "policy.toml"),
        }  # fmt: skip
    ours = MethodStrategy(FedAvg(), RunSettings.from_config(parse(config), "run"))
    ours.start(grid, initial(task), num_rounds=1)
    return ours.history


@pytest.mark.long
def test_sites_that_know_each_other_give_the_sum(tmp_path, monkeypatch):
    (record,) = run(tmp_path, use_toy_task(monkeypatch))
    assert record.accepted == list(NAMES)
    assert record.unseen == {
        "sites": 4, "cohort": 4, "quorum": 3, "threshold": 3, "neighbours": 0, "colluding": 1, "deaf": {},
    }  # fmt: skip
    assert record.reports == {}
    lines = [line for line in audit_log.read_log(tmp_path / "state" / audit_log.NAME) if "plan" in line]
    assert Counter((line["site"], line["event"]) for line in lines) == {
        (name, event): 1 for name in NAMES for event in ("masked", "opened")
    }  # the whole cohort's list is opened without signing it first
    assert len({line["plan"] for line in lines}) == len({line.get("list", "") for line in lines} - {""}) == 1


def test_who_signs_with_a_key_that_is_not_in_it_is_left_out_and_the_others_go_on(tmp_path, monkeypatch):
    (record,) = run(tmp_path, use_toy_task(monkeypatch), other="west")
    assert record.accepted == ["east", "north", "south"]
    assert "signed with its registered key" in record.failed["west"]


def test_sites_with_another_digest_join_nothing(tmp_path, monkeypatch):
    task, opened = use_toy_task(monkeypatch), []
    monkeypatch.setattr(type(task), "examples", lambda self, *a, **k: opened.append(a))
    with pytest.raises(QuorumError, match="roster: this site permits sha256:abab"):
        run(tmp_path, task, digest="sha256:" + "ab" * 32)
    assert opened == []
