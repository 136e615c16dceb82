"""`fedveil explain`: the figures that it names are those of a real message."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile

import pytest

from fedveil import rng, strategies
from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.config import parse
from fedveil.console.commands.site import explain
from fedveil.console.doctor import run_refusals
from fedveil.console.doctor.run_refusals import list_run_refusals, verify_bundle
from fedveil.console.main import main
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import param_specs_of
from fedveil.contract.privacy import UNTIMED, Adjacency, Step
from fedveil.errors import ConfigError, PolicyError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.adversary_model import DEVIATING, SINGLE_SITE, server_learns
from fedveil.privacy import accounting
from fedveil.privacy.server_side_bound import promised_epsilon
from fedveil.records.disclosure_summary import what_is_learned, what_is_learned_in_sum
from fedveil.wire.envelope import describe_message
from tests.conftest import ToyTrainer


@pytest.mark.parametrize(
    "name,fields",
    [("fedavg", ""), ("fedrand", ""), ("random_binary", 'wire = "seeded"'), ("random_binary", "rate = 0.9")],
)
def test_the_largest_upload_is_what_is_sent_or_a_bound_of_it(name, fields, lora_spec, lora_weights):
    method = strategies.create_method(name, fields)
    exchange = MessageExchange(method, name, lora_spec)
    server = method.init(param_specs_of(lora_weights), lora_weights, rng.initial_stream(0, "weights"))
    sizes = []
    for seed in range(4):
        ctx = RoundContext(0, "north", True, bytes([seed]) * 32)
        _, parts = exchange.participate(exchange.broadcast(server, ctx), None, ToyTrainer(lora_spec), ctx)
        sizes.append(describe_message(b"".join(parts))["payload_bytes"])
    bound = exchange.largest("up")
    assert max(sizes) <= bound
    if name != "random_binary":
        assert max(sizes) == bound
    down = describe_message(exchange.broadcast(server, RoundContext(0, "north", True, b"s" * 32)))["payload_bytes"]
    assert exchange.largest("down") == down


def test_a_run_in_plain_words(tmp_path, capsys):
    policy = tmp_path / "site-policy.toml"
    permits = "max-rounds = 9\n[permits]\ncohort.fraction = {min = 0.5}"
    policy.write_text(f'methods = ["fedrand"]\nmax-bytes-a-round = 10_000_000\n{permits}')
    chosen = ["--set", "method.name=fedrand", "--set", "run.rounds=7", "--set", "cohort.fraction=0.5"]
    assert main(["explain", *chosen, "--policy", str(policy)]) == 0
    stdout = capsys.readouterr().out
    assert "fedrand on text-generation, base model tiny: 7 rounds, this site in about 50 % of rounds." in stdout
    assert "either 'A': " in stdout
    assert "either 'B': " in stdout
    assert "Epsilon: infinite." in stdout
    assert "The server learns:" in stdout
    assert "policy permits it" in stdout
    policy.write_text(f'methods = ["fedrand"]\nmax-bytes-a-round = 1000\n{permits}')
    assert main(["explain", *chosen, "--policy", str(policy)]) == 1
    assert "FORBIDS it: bytes per round: this site permits at most 1000" in capsys.readouterr().out
    policy.write_text(f'methods = ["fedavg"]\nmax-bytes-a-round = 1000\n{permits.replace("= 9", "= 1")}')
    assert main(["explain", *chosen, "--policy", str(policy)]) == 1
    forbidden = capsys.readouterr().out.partition("FORBIDS it: ")[2].splitlines()  # all of it, not the first alone
    assert [line.split(": this site permits")[0] for line in forbidden] == [
        "method.name", "and: run.rounds", "and: bytes per round", "and: bytes per round",
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b"\xff", b"methods = ", b"nonsense = 1"])
def test_a_policy_that_cannot_be_read_is_named_before_the_base_is_read(tmp_path, capsys, monkeypatch, content):
    monkeypatch.delattr("fedveil.tasks.load_task")
    policy = tmp_path / "site-policy.toml"
    policy.write_bytes(content)
    assert main(["explain", "--policy", str(policy)]) == 2
    assert f"--policy {policy}: the site's policy file" in capsys.readouterr().err


def test_the_run_config_comes_from_a_file_and_from_pairs(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[method]\nname = "fedavg"\n[run]\nrounds = 3\n')
    assert explain.parse_overrides(file, ["run.rounds=4", 'task.model="/models/x"', "task.data=plain text"]) == {
        "method.name": "fedavg",
        "run.rounds": 4,
        "task.model": "/models/x",
        "task.data": "plain text",
    }
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        explain.parse_overrides(None, ["run.rounds"])
    with pytest.raises(ConfigError, match="expected a TOML file"):
        explain.parse_overrides(tmp_path / "none", [])


def test_epsilon_is_the_methods_budget_and_infinite_where_nothing_keeps_it():
    config = parse({})
    private = strategies.create_method("dp_fpl", "epsilon = 2.0\ndelta = 1e-6")
    assert promised_epsilon(private, config, 1e-6) == promised_epsilon(private, config, 1e-5) == 2.0
    assert promised_epsilon(private, config, 1e-7) == float("inf")
    assert promised_epsilon(private, parse({"run.deterministic": True}), 1e-5) == float("inf")
    assert promised_epsilon(strategies.create_method("fedavg"), config, 1e-5) == float("inf")


@pytest.mark.long
def test_noise_in_the_sum_is_explained_with_whom_it_counts_on_and_where_the_own_share_is_computed(lora_spec):
    """h = 5 - 1."""
    flat = {
        "dp.clip-norm": 1.0, "dp.noise-multiplier": 2.0, "dp.epsilon": 3.0, "train.max-steps": 1,
        "secure.enabled": True, "secure.noise": "sum", "secure.min-sites": 5,
    }  # fmt: skip
    exchange = MessageExchange(strategies.create_method("fedavg"), "fedavg", lora_spec)
    policy = SitePolicy(roster=f"sha256:{'5f' * 32}")
    explanation = "\n".join(explain.explain_run(exchange, parse(flat), policy=policy))
    assert "Epsilon: at most 3 at delta = 1e-05 (replace-one) for any example, in this run;" in explanation
    assert "names no roster" not in explanation
    assert "Its noise is in the sum: the claim relies on 4 honest sites" in explanation
    assert UNTIMED in explanation
    assert "add --examples N" in explanation
    assert "and on a server that follows the protocol" in explanation
    by_unit = explain.explain_run(exchange, parse(flat | {"dp.unit-column": "patient"}), policy=policy, examples=160)
    words = 'all examples with its id in the column "patient"; relation: the unit is replaced by any other one'
    assert words in "\n".join(by_unit)
    given = "\n".join(explain.explain_run(exchange, parse(flat), policy=policy, examples=160))
    own = {Step("summed", 160, 16, 1.0, 1.0): 5}  # planned as too coarse for a continuous mechanism
    alone = accounting.compute_epsilon(own, 1e-5, Adjacency.REPLACE_ONE)
    assert f"epsilon {alone:.4g} at delta 1e-05 (replace-one) against all of them together" in given
    for alone in (None, SitePolicy()):
        explanation = "\n".join(explain.explain_run(exchange, parse(flat), policy=alone))
        assert "But this site's policy names no roster, so the server could be all other sites" in explanation
    plain = "\n".join(explain.explain_run(exchange, parse({})))
    assert "Its noise is in the sum" not in plain
    assert "names no roster" not in plain
    assert UNTIMED not in plain


@pytest.mark.long
def test_noise_without_a_bound_is_explained_by_the_epsilon_that_it_gives(lora_spec, capsys):
    noisy = ["dp.clip-norm=1.0", "dp.noise-multiplier=1.5", "train.batch-size=10", "method.name=fedavg"]
    asked = ["explain", *(word for pair in noisy for word in ("--set", pair))]
    assert main(asked) == 0
    stdout = capsys.readouterr().out
    assert "Epsilon: no bound is set (dp.epsilon)" in stdout
    assert "add --examples N" in stdout
    assert "says why" not in stdout
    assert main([*asked, "--examples", "100"]) == 0
    stdout = capsys.readouterr().out
    assert "This noise gives, for 100 examples in this run alone: epsilon 4.16" in stdout
    assert "unit: one example of one site's data set" in stdout
    assert "Warning" not in stdout


def test_values_before_the_noise_are_explained_as_infinite_against_the_server(lora_spec):
    method = strategies.create_method("dp_fpl", 'mode = "paper"\nepsilon = 1.0')
    explanation = "\n".join(explain.explain_run(MessageExchange(method, "dp_fpl", lora_spec), parse({}), examples=100))
    assert "infinite at delta = 1e-05 against the server, which gets values without noise" in explanation
    assert "epsilon infinite at delta 1e-05 (replace-one) against the server and all of them together" in explanation


def test_a_delta_other_than_the_run_s_is_refused(capsys):
    noisy = ["explain", "--set", "dp.clip-norm=1.0", "--set", "dp.noise-multiplier=1.5", "--set", "method.name=fedavg"]
    assert main([*noisy, "--delta", "1e-6"]) == 2
    assert "--delta: expected the run's own delta, 1e-05, found 1e-06" in capsys.readouterr().err
    assert main([*noisy, "--delta", "1e-5"]) == 0


@pytest.mark.long
def test_settings_that_promise_nothing_are_warned_of(tmp_path, capsys):
    policy = tmp_path / "site-policy.toml"
    policy.write_text('methods = ["fedavg"]\nmin-examples = 50\ndelta = 0.02\nmax-epsilon = 9\n')
    noisy = ["dp.clip-norm=1.0", "dp.noise-multiplier=1e-9", "dp.delta=0.021", "method.name=fedavg"]
    main(["explain", *(word for pair in noisy for word in ("--set", pair)), "--policy", str(policy)])
    stdout = capsys.readouterr().out
    for words in (
        "Warning: delta 0.021 is at least 0.01",
        "Warning: a noise multiplier of 1e-09 hides nothing",
        "Warning: in this site's policy: delta 0.02 is at least 0.01",
        "Warning: in this site's policy: max-epsilon 9",
    ):
        assert words in stdout


@pytest.mark.parametrize(
    "name,fields,partial",
    [
        ("fedavg", "", False),
        ("ffa_lora", "", False),
        ("fedrand", "", False),
        ("fedrand", "rho = 1.0", False),
        ("hetlora", "", False),
        ("hetlora", "ranks = {north = 4}", False),
        ("flora", "ranks = {north = 4}", False),
        ("fedqsn", "", False),
        ("fedper", "", False),
        ("random_binary", "", True),
    ],
)
def test_entries_of_one_site_are_named_for_each_method_that_has_them(name, fields, partial, capsys):
    about = [f"method.name={name}", f"method.params={fields}", "secure.enabled=true", "secure.min-sites=3"]
    assert main(["explain", *(word for pair in about for word in ("--set", pair))]) == 0
    stdout = capsys.readouterr().out
    assert stdout.count(SINGLE_SITE) == (2 if partial else 0)  # of the claim, and of what the server learns
    assert DEVIATING in stdout


def test_ranks_that_could_never_be_sent_are_refused_for_the_sites_that_are_asked_about(capsys):
    about = [
        "--set",
        "method.name=hetlora",
        "--set",
        "method.params=ranks = {north = 4}",
        "--set",
        "secure.enabled=true",
    ]
    assert main(["explain", "--sites", "3", *about]) != 0
    assert (
        "ranks: secure.enabled requires that at least 3 of the 3 sites in a round have the largest rank"
        in capsys.readouterr().err
    )
    assert main(["explain", "--sites", "5", *about]) == 0


def test_under_secure_aggregation_the_server_learns_a_sum_and_no_site_s_own_values(capsys):
    """As the lines above it have it: "not sent: its number of examples"."""
    for method in ("fedrand", "dp_fpl"):
        words = what_is_learned(method)
        assert sum(line.startswith("The server learns: ") for line in words) == 1
        assert not any(
            line.startswith("The server learns: e") for line in what_is_learned_in_sum(words, server_learns(False))
        )
    assert main(["explain", "--set", "method.name=fedrand", "--set", "secure.enabled=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("not sent: its number of examples" in line for line in lines)
    (server,) = [line for line in lines if line.startswith("The server learns: ")]
    assert server.removeprefix("The server learns: ") == server_learns(False)
    assert "and n_k" in next(line for line in lines if line.startswith("Without secure aggregation it would be: one "))


def test_scores_of_held_out_rows_are_named_before_anyone_takes_part(tmp_path, capsys):
    policy = tmp_path / "site-policy.toml"
    asked = ["--set", "method.name=fedavg", "--set", "evaluate.held-out=0.25"]
    policy.write_text('methods = ["fedavg"]\nmax-scores = 7\n')
    assert main(["explain", *asked, "--policy", str(policy)]) == 0
    stdout = capsys.readouterr().out
    assert "hold out 25 % of its examples" in stdout
    assert "reporting loss_held_out and rows_held_out with each upload" in stdout
    assert "This site would do so at most 7 times (max-scores)." in stdout
    policy.write_text('methods = ["fedavg"]\n')
    assert main(["explain", *asked, "--policy", str(policy)]) == 0
    assert "This site would refuse: its policy permits no scores" in capsys.readouterr().out
    assert main(["explain", "--set", "method.name=fedavg"]) == 0
    assert "held_out" not in capsys.readouterr().out


def test_an_own_model_is_judged_by_the_digest_of_its_file_in_the_bundle(lora_spec, tmp_path, monkeypatch):
    out, text = io.BytesIO(), b"def model():\n    ...\n"
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("fedveil/own/__init__.py", '"""Own models."""\n')
        archive.writestr("fedveil/own/heart.py", text)
    monkeypatch.setattr(run_refusals, "build_bundle", lambda app: out.getvalue())
    digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
    exchange = MessageExchange(strategies.create_method("fedavg", ""), "fedavg", lora_spec)

    def found(config: dict[str, object], **policy: object) -> list[str]:
        file = tmp_path / "policy.toml"
        file.write_text(
            "".join(f"{key} = {json.dumps(value)}\n" for key, value in {"methods": ["fedavg"], **policy}.items())
        )
        asked = parse(config)
        refusals = list_run_refusals(file, verify_bundle(None, asked), exchange, asked, 1)
        return [str(refusal) for refusal in refusals if "module" in str(refusal)]

    run = {"task.name": "own-model", "task.module": "heart"}
    assert found(run, modules=[digest]) == []
    for policy in ({}, {"modules": []}, {"modules": [f"sha256:{'0' * 64}"]}):
        (refusal,) = found(run, **policy)
        assert f"with the digest {digest}; ask the site to review the file" in refusal
    with pytest.raises(PolicyError, match=r"but also contains heart\.py; remove it"):
        found(run | {"task.module": "unet"}, modules=[digest])
