"""The policy that `fedveil site policy` prints: it permits the run it was made for, and no other."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedveil import strategies
from fedveil.client_app.policy.decisions import VerifiedBundle
from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.config import parse
from fedveil.console.doctor.policy_for_run import list_policy_warnings, write_policy_for_run
from fedveil.console.doctor.run_refusals import list_run_refusals
from fedveil.console.main import main
from fedveil.console.provisioning.policy_template import EMPTY_POLICY
from fedveil.contract.privacy import Adjacency, PrivacyBudget, SamplingPlan
from fedveil.errors import BudgetError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.privacy.ledger_account import RunTerms, SiteAccount

DIGEST = "5f" * 32
PLAIN = {"method.name": "fedavg", "run.name": "pilot-1", "run.rounds": 7, "train.batch-size": 16}
PRIVATE = PLAIN | {
    "dp.clip-norm": 1.0, "dp.noise-multiplier": 2.0, "dp.epsilon": 3.0, "task.max-tokens": 64, "train.max-steps": 8,
}  # fmt: skip
SECURE = PLAIN | {"secure.enabled": True, "secure.min-sites": 4, "secure.max-colluders": 1}


def write(flat, lora_spec, examples=None, bundle=VerifiedBundle(DIGEST)):  # immutable
    config = parse(flat)
    exchange = MessageExchange(strategies.create_method(config.method.name), config.method.name, lora_spec)
    up = exchange.largest("up")
    return write_policy_for_run(config, exchange, up, bundle, examples, "run.toml"), exchange, up


def refusals(text, folder: Path, flat, exchange, up, bundle=VerifiedBundle(DIGEST)):
    file = folder / "policy.toml"
    file.write_text(text)
    return [str(each) for each in list_run_refusals(file, bundle, exchange, parse(flat), up)]


@pytest.mark.parametrize(
    "flat",
    [
        PLAIN, SECURE, SECURE | {"secure.roster": "/roster/roster.json"},
        PLAIN | {"train.learning-rate": 5e-4, "run.seed": 3},
    ],
)  # fmt: skip
def test_the_policy_permits_its_run(tmp_path, lora_spec, flat):
    text, exchange, up = write(flat, lora_spec)
    assert refusals(text, tmp_path, flat, exchange, up) == []
    policy = SitePolicy.model_validate(tomllib.loads(text))
    assert policy.require_secure == flat.get("secure.enabled", False)
    assert policy.max_broadcast_change == 1.0


@pytest.mark.parametrize(
    "changed",
    [
        {"method.name": "fedrand"}, {"run.rounds": 8}, {"run.name": "pilot-2"}, {"train.batch-size": 15},
        {"train.learning-rate": 1e-2}, {"task.model": "other"}, {"secure.min-sites": 3}, {"secure.enabled": False},
    ],
)  # fmt: skip
def test_it_permits_no_other_run(tmp_path, lora_spec, changed):
    text, exchange, up = write(SECURE, lora_spec)
    assert refusals(text, tmp_path, SECURE | changed, exchange, up)
    assert refusals(text, tmp_path, SECURE, exchange, up, VerifiedBundle("0" * 64))


def test_what_protects_a_site_whatever_runs_is_kept_and_said(tmp_path, lora_spec):
    small = PLAIN | {"train.batch-size": 2, "train.max-steps": 1}
    text, exchange, up = write(small, lora_spec)
    said = refusals(text, tmp_path, small, exchange, up)
    assert any("min-batch of its policy" in each for each in said), said
    assert any("min-examples of its policy" in each for each in said) or len(said) == 1


def test_max_epsilon_is_what_the_run_reserves(tmp_path, lora_spec):
    """The ledger accepts the run's first charge under the printed figure, and refuses it just below."""
    text, _, _ = write(PRIVATE, lora_spec, examples=400)
    policy = SitePolicy.model_validate(tomllib.loads(text))
    claim = DpSgdConfig.from_config(parse(PRIVATE).dp)
    assert claim is not None
    assert policy.max_epsilon is not None
    assert policy.min_noise_multiplier == 2.0
    charges = claim.privacy_spent(SamplingPlan(1, 8, 16, 400, Adjacency.REPLACE_ONE))
    terms = RunTerms("pilot-1", claim.budget, 7, 7 * 3 * 2)
    SiteAccount(policy.budget).charge(terms, charges)
    lower = PrivacyBudget(policy.max_epsilon - 0.011, policy.delta, Adjacency(policy.adjacency))
    with pytest.raises(BudgetError, match="max-epsilon: this site permits at most"):
        SiteAccount(lower).charge(terms, charges)
    without, _, _ = write(PRIVATE, lora_spec)
    assert SitePolicy.model_validate(tomllib.loads(without)).max_epsilon is None
    assert "# The run's own limit is 3." in without


def test_a_name_from_outside_stays_a_value(lora_spec):
    """A run config may come from a server: nothing in it may become a line of the policy."""
    hostile = 'x"]\nmax-rounds = 9999\n#\x1b[2J'
    text, _, _ = write(PLAIN | {"task.model": hostile}, lora_spec)
    policy = tomllib.loads(text)
    assert policy["models"] == [hostile]
    assert policy["max-rounds"] == 7
    assert "\x1b" not in text


@pytest.mark.parametrize("text", ["a\u2028b {mr}", "a\u0085b {mr}", "a\u202eb {mr}", "a\x7fb {mr}", "a\nb {mr}"])
def test_separators_and_direction_marks_are_escaped(tmp_path, lora_spec, text):
    flat = PLAIN | {"task.source-template": text}
    policy, exchange, up = write(flat, lora_spec)
    assert tomllib.loads(policy)["permits"]["task.source-template"] == text
    assert all(each.isprintable() for line in policy.split("\n") for each in line)
    assert refusals(policy, tmp_path, flat, exchange, up) == []


def test_what_a_site_should_not_take_over_without_thinking_is_said(lora_spec):
    weak = SECURE | {"secure.min-sites": 2, "secure.max-colluders": 0, "task.data": "/home/registry"}
    text, _, _ = write(weak, lora_spec)
    for warning in list_policy_warnings(parse(weak)):
        assert warning.split()[0] in text
    assert len(list_policy_warnings(parse(weak))) == 3
    assert list_policy_warnings(parse(SECURE)) == []


def test_the_kits_policy_names_every_key():
    names = {field.alias or name for name, field in SitePolicy.model_fields.items()}
    told = {line.removeprefix("# ").partition(" = ")[0] for line in EMPTY_POLICY.splitlines() if " = " in line}
    assert names - {"permits"} <= told
    whole = "\n".join(
        line.removeprefix("# ") if line.startswith("# ") and " = " in line and "`" not in line else line
        for line in EMPTY_POLICY.splitlines()
    ).replace("# [permits]", "[permits]")
    values = tomllib.loads(whole.replace("5f0c...", DIGEST))
    assert names <= set(values)


@pytest.mark.long
def test_the_command_prints_a_policy_that_explain_accepts(tmp_path, capsys):
    run = tmp_path / "run.toml"
    run.write_text('[method]\nname = "fedavg"\n[run]\nname = "pilot-1"\nrounds = 3\n[train]\nbatch-size = 16\n')
    out = tmp_path / "site-policy.toml"
    assert main(["site", "policy", "--from", str(run), "--out", str(out)]) == 0
    assert main(["explain", "--config", str(run), "--policy", str(out)]) == 0
    assert "permits it" in capsys.readouterr().out
    assert main(["site", "policy", "--from", str(run), "--out", str(out)]) == 2
    assert "a policy is never replaced" in capsys.readouterr().err
    assert main(["site", "policy", "--from", str(run), "--set", "train.batch-size=2"]) == 1
    captured = capsys.readouterr()
    assert "This policy still refuses the run: train.batch-size: this run takes steps of at most 2" in captured.err
    assert tomllib.loads(captured.out)["permits"]["train.batch-size"] == 2
