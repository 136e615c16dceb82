"""A run that can never reach a policy's bounds on examples is refused before a row is looked at."""

from __future__ import annotations

import pytest

from fedveil import strategies
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import decisions, planned_examples, run_config_rules
from fedveil.config import parse
from fedveil.console.main import main
from fedveil.errors import PolicyError

DP = {"dp.clip-norm": 1.0, "train.max-steps": 1}
ONE = {"method.name": "random_binary"}
EPOCH = {**ONE, "method.params": 'exchange = "epoch"'}


@pytest.mark.parametrize(
    ("config", "most", "step"),
    [
        ({"train.batch-size": 16}, None, 16),
        ({"train.batch-size": 16, "train.max-steps": 3}, 96, 16),
        ({"train.batch-size": 16, "train.max-steps": 3, "train.gradient-accumulation-steps": 2}, 192, 32),
        ({"train.batch-size": 16, **DP}, 16, 16),
        ({"train.batch-size": 16, **DP, "train.gradient-accumulation-steps": 2}, 16, 16),
        ({"train.batch-size": 16, "dp.clip-norm": 1.0}, None, 16),
        ({"train.batch-size": 16, **DP, "dp.unit-column": "patient"}, None, 16),
        ({"train.batch-size": 16, **ONE, "train.max-steps": 9}, 16, 16),
        ({"train.batch-size": 16, **ONE, "method.params": 'exchange = "batch"'}, 16, 16),
        ({"train.batch-size": 16, **EPOCH}, None, 16),
        ({"train.batch-size": 16, "method.name": "dp_fpl", "task.name": "clip-prompt"}, 16, 16),
    ],
)
def test_what_a_client_round_can_use_by_hand(config, most, step):
    parsed = parse({"method.name": "fedavg", "task.max-tokens": 32, **config})
    assert planned_examples.most_examples(parsed) == most
    assert planned_examples.examples_per_step(parsed) == step


def test_the_methods_of_one_batch_are_those_that_send_a_gradient():
    sends = {name for name in strategies.list_methods() if _sends_gradient(name)}
    assert sends == planned_examples.ONE_BATCH


def _sends_gradient(name: str) -> bool:
    method = strategies.create_method(name, "")
    return method.upload_kind == "gradients"


def site(tmp_path, text: str, config: dict) -> ClientAssignment:
    flat = {"method.name": "fedavg", "task.max-tokens": 32, **config}
    parsed = parse(flat)
    (tmp_path / "policy.toml").write_text(f"{text}\n{run_config_rules.permits_for_run(parsed)}")
    order = {"round": 0, "is-new": True, "site": "s", "run": "r", "method": parsed.method.name, "fields": "{}"}
    node = {"site": "s", "state-dir": str(tmp_path / "state"), "data": str(tmp_path / "none"), "device": "cpu"}
    return ClientAssignment.from_instruction(order, flat, {**node, "policy": str(tmp_path / "policy.toml")})


@pytest.mark.parametrize(
    ("text", "config", "words"),
    [
        ("min-examples = 20", {**ONE, "train.batch-size": 16}, "uses at most 16 examples, .* at least 20"),
        ("min-examples = 20", {**DP, "train.batch-size": 16}, "uses at most 16 examples, .* at least 20"),
        ("min-batch = 20", {"train.batch-size": 16}, "steps of at most 16 examples, .* at least 20"),
        ("min-examples = 16\nmin-batch = 16", {**ONE, "train.batch-size": 16}, ""),
        ("min-examples = 20", {"train.batch-size": 16}, ""),  # as many steps as the site has rows
        ("", {**ONE, "train.batch-size": 1}, ""),
    ],
)
def test_the_guard_refuses_before_any_data_is_there_and_writes_nothing(text, config, words, tmp_path):
    """The data folder does not exist: whoever looked at a row would say so."""
    assignment = site(tmp_path, text, config)
    if not words:
        decisions.check_run(assignment)
        return
    with pytest.raises(PolicyError, match=words):
        decisions.check_run(assignment)
    assert not (tmp_path / "state").exists()


def test_explain_forbids_what_every_client_round_would_be_refused_for(tmp_path, capsys):
    flat = {"method.name": "random_binary", "train.batch-size": 16}
    policy = tmp_path / "policy.toml"
    policy.write_text(f"min-examples = 20\n{run_config_rules.permits_for_run(parse(flat))}")
    words = [
        "explain",
        "--policy",
        str(policy),
        *(w for key, value in flat.items() for w in ("--set", f"{key}={value}")),
    ]
    assert main(words) == 1
    assert "FORBIDS it: examples: a client round of this run uses at most 16" in capsys.readouterr().out
    policy.write_text(policy.read_text().replace("20", "16", 1))
    assert main(words) == 0
