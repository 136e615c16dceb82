"""The privacy ledger in a site's own turn."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedveil import rng, strategies, tasks
from fedveil.client_app import app as client
from fedveil.client_app import client_session
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import run_config_rules
from fedveil.client_app.worker import connection
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.privacy import Adjacency, SamplingPlan, Step
from fedveil.errors import BudgetError, ConfigError, PolicyError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy import accounting
from fedveil.server_app.run import prepare_strategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_plan import RunPlan
from tests.prompt_toy import LENGTH, PromptTask, examples

FIELDS = {"rank": 3, "adapter": {"length": LENGTH}, "noise_local": 20.0, "noise_global": 20.0, "sampling": "disjoint"}
ROWS = examples(12)


def assignment(tmp_path, round_=0, run="r", deterministic=False, **fields) -> ClientAssignment:
    (tmp_path / "data").mkdir(exist_ok=True)
    order = {
        "round": round_, "is-new": round_ == 0, "site": "s", "run": run, "method": "dp_fpl",
        "fields": json.dumps({**FIELDS, **fields}),
    }  # fmt: skip
    text = "\n".join(f"{k} = {json.dumps(v)}" for k, v in {**FIELDS, **fields}.items() if k != "adapter")
    config = {"method.name": "dp_fpl", "train.batch-size": 4, "run.deterministic": deterministic}
    config["method.params"] = f"{text}\nadapter.length = {LENGTH}"
    return ClientAssignment.from_instruction(
        order, config, {"state-dir": str(tmp_path / "state"), "data": str(tmp_path / "data")}
    )


@pytest.fixture
def take(monkeypatch):
    """A turn in a process of its own."""

    def go(what: ClientAssignment, rows=ROWS) -> bytes:
        monkeypatch.setattr(tasks, "load_task", lambda config, adapter, device: PromptTask(config, rows))
        method = strategies.create_from_json("dp_fpl", what.order.fields)
        exchange = MessageExchange(method, "dp_fpl", PromptTask().spec)
        server = method.init(
            exchange.spec, PromptTask().initial(rng.initial_stream(0, "w")), rng.initial_stream(0, "m")
        )
        ctx = RoundContext(what.order.round, "s", what.order.is_new, bytes(32), address=what.order.address)
        reply = client_session.ClientSession().run_round(lambda: exchange.broadcast(server, ctx), what)
        up = exchange.receive(b"".join(reply.parts), what.order.round, what.order.address)
        assert torch.isfinite(up.payload.fields["prompt"]).all()
        return b"".join(reply.parts)

    return go


def allowed(epochs: float) -> float:
    charges = {Step("gaussian", 0, 0, 20 / 2**0.5): epochs}
    return accounting.compute_epsilon(charges, 1e-5, Adjacency.REPLACE_ONE) * 1.001


def test_a_run_ends_for_a_site_whose_records_have_spent_their_budget(tmp_path, take):
    """3 batches an epoch, one a round: the budget of two epochs lasts six rounds, over restarts and over runs."""
    for round_ in range(3):
        take(assignment(tmp_path, round_, epsilon=allowed(2)))
    for round_ in range(3):
        take(assignment(tmp_path, round_, "another", epsilon=allowed(2)))
    ledger = tmp_path / "state" / ".ledger" / "s.json"
    before = ledger.read_bytes()
    for run in ("r", "another", "third"):
        with pytest.raises(BudgetError, match="replace-one"):
            take(assignment(tmp_path, 3, run, epsilon=allowed(2)))
    assert ledger.read_bytes() == before
    take(assignment(tmp_path, 3, "third", epsilon=allowed(3)))


def test_what_rows_hold_and_their_order_do_not_matter_and_new_rows_start_anew(tmp_path, take):
    for round_ in range(3):
        take(assignment(tmp_path, round_, epsilon=allowed(1)))
    renamed = [replace(row, folder="elsewhere", class_names=("a",)) for row in ROWS]
    for rows in (ROWS[::-1], renamed, examples(12, seed=2)):
        with pytest.raises(BudgetError):
            take(assignment(tmp_path, 3, epsilon=allowed(1)), rows)
    take(assignment(tmp_path, 3, epsilon=allowed(1)), examples(24)[12:])


def test_without_an_epsilon_the_ledger_counts_and_stops_nothing(tmp_path, take):
    take(assignment(tmp_path))
    assert (tmp_path / "state" / ".ledger" / "s.json").exists()


def test_a_deterministic_turn_is_refused_with_an_epsilon_and_not_charged_without(tmp_path, take):
    with pytest.raises(ConfigError, match="run.deterministic"):
        take(assignment(tmp_path, deterministic=True, epsilon=3.0))
    assert take(assignment(tmp_path, deterministic=True)) == take(assignment(tmp_path, deterministic=True))
    assert not (tmp_path / "state" / ".ledger").exists()


def test_the_server_learns_why():
    assert "spent" in client.public_reason(BudgetError("epsilon: 3 spent"))
    assert "spent" in client.public_reason(connection.ClientRoundError("BudgetError", "epsilon: 3 spent"))
    assert "row" not in client.public_reason(connection.ClientRoundError("ValueError", "row 4711"))


def test_a_server_refuses_a_deterministic_run_with_an_epsilon_before_it_contacts_anybody(tmp_path):
    config = parse(
        {
            "run.deterministic": True,
            "method.name": "dp_fpl",
            "method.params": "epsilon = 2.0",
            "task.name": "clip-prompt",
            "task.class-names": "a,b",
        }
    )
    with pytest.raises(ConfigError, match="run.deterministic"):
        prepare_strategy(RunPlan.from_config(config, "r"), RunFolder(tmp_path / "run"))


def test_plans_of_the_ledger_and_of_the_whole_run_agree():
    method = strategies.create_from_json("dp_fpl", json.dumps(FIELDS))
    whole = method.privacy_spent(SamplingPlan(6, 1, 4, 12, Adjacency.REPLACE_ONE))
    assert list(whole.values()) == [2]
    assert replace(method, exchange="epoch").privacy_spent(SamplingPlan(6, 3, 4, 12, Adjacency.REPLACE_ONE)) == {
        next(iter(whole)): 6
    }


def under(relation: str, epsilon: float) -> dict[str, object]:
    shared = {"sampling": "poisson", "noise_local": 1.8, "noise_global": 1.8}
    return {**shared, "neighbours": relation, "epsilon": epsilon}


def cost(turns: int, relation: Adjacency) -> float:
    """Of so many turns of `under`."""
    return 1.001 * accounting.compute_epsilon({Step("poisson", 12, 4, 1.8 / 2**0.5): turns}, 1e-5, relation)


@pytest.mark.long
def test_a_server_gains_no_budget_by_another_relation(tmp_path, take):
    """What is refused under replace-one is refused under zero-out, where the same charges cost less."""
    epsilon = cost(2, Adjacency.REPLACE_ONE)
    assert cost(3, Adjacency.ZERO_OUT) < epsilon
    for round_ in range(2):
        take(assignment(tmp_path, round_, **under("replace-one", epsilon)))
    for relation in Adjacency:
        with pytest.raises(BudgetError, match=r"replace-one\) for every record, found .* after this round"):
            take(assignment(tmp_path, 2, relation.value, **under(relation.value, epsilon)))


def test_a_site_may_judge_by_another_relation_or_delta(tmp_path, take):
    def asked(text, **fields):
        client_assignment = assignment(tmp_path, **fields)
        (tmp_path / "policy.toml").write_text(f"{text}\n{run_config_rules.permits_for_run(client_assignment.config)}")
        return replace(
            client_assignment, site=client_assignment.site.model_copy(update={"policy": str(tmp_path / "policy.toml")})
        )

    with pytest.raises(BudgetError, match='sampling: expected "poisson" or "disjoint" at this site'):
        take(asked('adjacency = "zero-out"', sampling="fixed"))
    fields = under("zero-out", cost(1, Adjacency.ZERO_OUT))
    with pytest.raises(BudgetError, match="replace-one"):
        take(asked("", **fields))
    with pytest.raises(BudgetError, match="at delta 1e-09"):
        take(asked('adjacency = "zero-out"\ndelta = 1e-9', **fields))
    take(asked('adjacency = "zero-out"', **fields))


def test_under_a_policy_the_order_s_fields_are_those_that_the_policy_has_judged(tmp_path, take):
    """A policy reads the run config; what trains is made from the order."""
    honest = assignment(tmp_path)
    (tmp_path / "policy.toml").write_text(run_config_rules.permits_for_run(honest.config))
    site = honest.site.model_copy(update={"policy": str(tmp_path / "policy.toml")})
    take(replace(honest, site=site))
    with pytest.raises(PolicyError, match="order.fields: expected those of the run config"):
        take(replace(honest, site=site, order=assignment(tmp_path, noise_local=1e-9).order))
