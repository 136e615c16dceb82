"""The privacy ledger in a site's own turn."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedveil import rng, strategies, tasks
from fedveil.client_app import app as client
from fedveil.client_app import client_session
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import run_config_rules
from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.state.client_state import open_ledger
from fedveil.client_app.worker import connection
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.privacy import Adjacency, SamplingPlan, Step
from fedveil.errors import BudgetError, ConfigError, PolicyError, StateError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy import accounting
from fedveil.privacy.ledger_account import Party, SiteAccount
from fedveil.server_app.run import prepare_strategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_plan import RunPlan
from tests.prompt_toy import LENGTH, PromptTask, examples

FIELDS = {"rank": 3, "adapter": {"length": LENGTH}, "noise_local": 20.0, "noise_global": 20.0, "sampling": "disjoint"}
ROWS = examples(12)


def assignment(tmp_path, round_=0, run="r", deterministic=False, node=(), **fields) -> ClientAssignment:
    (tmp_path / "data").mkdir(exist_ok=True)
    order = {
        "round": round_, "is-new": round_ == 0, "site": "s", "run": run, "method": "dp_fpl",
        "fields": json.dumps({**FIELDS, **fields}),
    }  # fmt: skip
    text = "\n".join(f"{k} = {json.dumps(v)}" for k, v in {**FIELDS, **fields}.items() if k != "adapter")
    config = {"method.name": "dp_fpl", "train.batch-size": 4, "run.deterministic": deterministic}
    config |= {"method.params": f"{text}\nadapter.length = {LENGTH}", "task.max-tokens": 96}
    return ClientAssignment.from_instruction(
        order, config, {"site": "s", "state-dir": str(tmp_path / "state"), "data": str(tmp_path / "data"), **dict(node)}
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


def allowed(epochs: int) -> float:
    charges = {Step("gaussian", 0, 0, 20 / 2**0.5): epochs}
    return accounting.compute_epsilon(charges, 1e-5, Adjacency.REPLACE_ONE) * 1.001


def account(tmp_path) -> SiteAccount:
    return open_ledger(tmp_path / "state").read(SitePolicy().budget).account


def test_a_run_ends_for_a_site_when_its_claim_is_spent_over_restarts_and_whatever_was_drawn(tmp_path, take):
    """Each round has one batch of an epoch, and is charged to all rows like a whole epoch."""
    for round_ in range(2):
        take(assignment(tmp_path, round_, epsilon=allowed(2)))
    ledger = tmp_path / "state" / ".ledger" / "ledger.json"
    before = ledger.read_bytes()
    for rows in (ROWS, ROWS[::-1], examples(12, seed=2)):
        with pytest.raises(BudgetError, match="replace-one"):
            take(assignment(tmp_path, 2, epsilon=allowed(2)), rows)
    assert ledger.read_bytes() == before
    take(assignment(tmp_path, 0, "another", epsilon=allowed(2)))  # a claim is for its run alone
    with pytest.raises(BudgetError, match="fixed"):
        take(assignment(tmp_path, 2, epsilon=allowed(3)))


def policed(tmp_path, text: str, what: ClientAssignment) -> ClientAssignment:
    """The assignment under a policy that permits it otherwise. The private draws of few rows move far, by chance."""
    text += "\nmax-broadcast-change = 1000\nmax-broadcast-drift = 1000"
    (tmp_path / "policy.toml").write_text(f"{text}\n{run_config_rules.permits_for_run(what.config)}")
    return replace(what, site=what.site.model_copy(update={"policy": str(tmp_path / "policy.toml")}))


def test_two_site_names_on_one_state_folder_share_one_account(tmp_path, take):
    """Way 1: names open no second budget; the policy's limit is for all runs and names together."""
    most = accounting.compute_epsilon({Step("gaussian", 0, 0, 20 / 2**0.5): 2}, 1e-5 / 16, Adjacency.REPLACE_ONE)
    text = f"max-epsilon = {1.9 * most}"
    take(policed(tmp_path, text, assignment(tmp_path, epsilon=allowed(2), node={"site": "north"}.items())))
    second = assignment(tmp_path, run="second", epsilon=allowed(2), node={"site": "north-2"}.items())
    with pytest.raises(BudgetError, match="over all runs together"):
        take(policed(tmp_path, text, second))
    assert {path.name for path in (tmp_path / "state" / ".ledger").iterdir()} == {"ledger.json", "ledger.lock"}


def test_a_second_state_folder_on_the_data_is_refused(tmp_path, take):
    """Way 1, with a state folder of its own; also for a run without a claim, whose trace would be elsewhere."""
    take(assignment(tmp_path, epsilon=allowed(2)))
    second = {"state-dir": str(tmp_path / "second")}.items()
    for fields in ({"epsilon": allowed(2)}, {}):
        with pytest.raises(StateError, match="site ledger adopt"):
            take(assignment(tmp_path, node=second, **fields))
    with pytest.raises(StateError, match="site ledger adopt"):
        take(assignment(tmp_path, node=second, deterministic=True))


def test_a_folder_that_cannot_be_written_trains_on_the_site_s_word_and_the_log_says_so(
    tmp_path, tmp_path_factory, take, monkeypatch, caplog
):
    named, bare = {"data-set": "ward-7"}.items(), tmp_path_factory.mktemp("bare")
    take(assignment(tmp_path, epsilon=allowed(2), node=named))
    assert "cannot be written" not in caplog.text
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == tmp_path / "state")
    second = {"data-set": "ward-7", "state-dir": str(tmp_path / "second")}
    with pytest.raises(StateError, match="site ledger adopt"):
        take(assignment(tmp_path, epsilon=allowed(2), node=second.items()))
    take(assignment(tmp_path, run="b", epsilon=allowed(2), node={**second, "data": str(bare)}.items()))
    assert "cannot be written, so nothing in it names this site's ledger" in caplog.text
    assert list(bare.iterdir()) == []


def test_a_site_with_units_refuses_a_guarantee_for_one_row_unless_the_run_says_so(tmp_path, take):
    with_units = {"unit-column": "patient"}.items()
    asked = assignment(tmp_path, epsilon=allowed(2), node=with_units)
    with pytest.raises(ConfigError, match=r'dp.unit-column: .* node config names a unit-column.* dp.unit = "row"'):
        take(asked)
    assert not (tmp_path / "state" / ".ledger").exists()
    take(replace(asked, config=parse({**asked.config.flat(), "dp.unit": "row"})))
    take(assignment(tmp_path, 1, epsilon=allowed(2)))  # a site without units needs no word
    assert [entry.run for entry in account(tmp_path).entries] == ["r"]


def test_a_run_without_a_guarantee_is_not_asked_for_units(tmp_path, take):
    take(assignment(tmp_path, deterministic=True, node={"unit-column": "patient"}.items()))
    assert [entry.run for entry in account(tmp_path).entries] == ["r"]


def test_a_mode_whose_server_sees_the_gradient_is_open_against_it(tmp_path, take):
    """Way 2."""
    take(assignment(tmp_path, mode="paper", epsilon=8.0, sampling="poisson"))
    assert [bool(account(tmp_path).standing(party).because) for party in Party] == [True, True, False]


def test_a_run_without_a_claim_and_a_deterministic_one_leave_an_open_entry(tmp_path, take):
    """Way 3."""
    with pytest.raises(ConfigError, match="run.deterministic"):
        take(assignment(tmp_path, deterministic=True, epsilon=3.0))
    assert take(assignment(tmp_path, deterministic=True)) == take(assignment(tmp_path, deterministic=True))
    assert [(entry.run, entry.why) for entry in account(tmp_path).entries] == [("r", "its noise is seeded")]
    private = assignment(tmp_path, run="private", epsilon=allowed(2))
    with pytest.raises(BudgetError, match="after-open"):
        take(policed(tmp_path, 'after-open = "refuse"', private))
    take(policed(tmp_path, 'after-open = "say"', private))


def test_a_claim_without_a_site_of_its_own_is_refused(tmp_path, take):
    """Way 4: the server's word for the site would name it."""
    with pytest.raises(ConfigError, match="node config: site: a run with a privacy guarantee needs the site's name"):
        take(assignment(tmp_path, epsilon=allowed(2), node={"site": ""}.items()))
    assert not (tmp_path / "state" / ".ledger").exists()


def test_links_copies_and_other_folders_are_charged_to_the_one_account(tmp_path, take):
    """Way 5: an account names no file. A copied folder has the id, or gets one of the same ledger."""
    take(assignment(tmp_path, epsilon=allowed(2)))
    (tmp_path / "link").symlink_to(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "bare").mkdir()
    take(assignment(tmp_path, 1, epsilon=allowed(2), node={"data": str(tmp_path / "link")}.items()))
    for folder in ("link", "copy", "bare"):
        with pytest.raises(BudgetError, match="after this round"):
            take(assignment(tmp_path, 2, epsilon=allowed(2), node={"data": str(tmp_path / folder)}.items()))


def test_a_restored_state_folder_is_found_by_the_data_folder(tmp_path, take):
    take(assignment(tmp_path, epsilon=allowed(2)))
    shutil.copytree(tmp_path / "state" / ".ledger", tmp_path / "backup")
    take(assignment(tmp_path, 1, epsilon=allowed(2)))
    shutil.rmtree(tmp_path / "state" / ".ledger")
    shutil.copytree(tmp_path / "backup", tmp_path / "state" / ".ledger")
    with pytest.raises(StateError, match="site ledger recover"):
        take(assignment(tmp_path, 1, epsilon=allowed(2)))


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
    """A claim under zero-out is held to the site's replace-one too, where the same charges cost more."""
    epsilon = cost(2, Adjacency.REPLACE_ONE)
    assert cost(3, Adjacency.ZERO_OUT) < epsilon
    for run, relation in enumerate(Adjacency):
        for round_ in range(2):
            take(assignment(tmp_path, round_, f"r{run}", **under(relation.value, epsilon)))
        with pytest.raises(BudgetError, match="after this round"):
            take(assignment(tmp_path, 2, f"r{run}", **under(relation.value, epsilon)))


@pytest.mark.long
def test_a_site_may_judge_by_another_relation_or_delta(tmp_path, take):
    def asked(text, **fields):
        return policed(tmp_path, text, assignment(tmp_path, **fields))

    with pytest.raises(BudgetError, match='sampling: no epsilon is known for "fixed"'):
        take(asked('adjacency = "zero-out"', sampling="fixed"))
    fields = under("zero-out", cost(1, Adjacency.ZERO_OUT))
    for text in ("", 'adjacency = "zero-out"\ndelta = 1e-9'):
        with pytest.raises(BudgetError, match="for its first client round"):
            take(asked(text, **fields))
    take(asked('adjacency = "zero-out"', **fields))
    with pytest.raises(BudgetError, match="adjacency: this site's ledger was made for zero-out"):
        take(asked("", **fields))


def test_under_a_policy_the_order_s_fields_are_those_that_the_policy_has_judged(tmp_path, take):
    """A policy reads the run config; what trains is made from the order."""
    honest = policed(tmp_path, "", assignment(tmp_path))
    take(honest)
    with pytest.raises(PolicyError, match="order.fields: these differ from the run config's"):
        take(replace(honest, order=assignment(tmp_path, noise_local=1e-9).order))
