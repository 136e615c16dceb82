"""Whole turns of four sites whose noise is in the sum: what is sent, what is charged, and where it is refused."""

from __future__ import annotations

import json

import pytest

from fedveil import rng, strategies, tasks
from fedveil.client_app import turn
from fedveil.client_app.site import secure
from fedveil.client_app.site.assignment import Assignment
from fedveil.client_app.site.private import ledger_of
from fedveil.config import parse
from fedveil.contract.budget import Budget, Neighbours
from fedveil.contract.method import RoundContext
from fedveil.errors import BudgetError, ConfigError
from fedveil.federation.exchange import Exchange
from fedveil.federation.secure.server import Coordinator
from fedveil.federation.summed.local import settings_of
from fedveil.federation.summed.summands import RingSums
from fedveil.federation.summed.uploads import Summed
from fedveil.privacy import accounting
from fedveil.privacy.claims import claim_of
from tests.prompt_toy import LENGTH, PromptTask, examples

SITES = ["s0", "s1", "s2", "s3"]
FIELDS = {"rank": 3, "adapter": {"length": LENGTH}, "noise_local": 30.0, "noise_global": 40.0, "sampling": "disjoint"}


class Run:
    """Sites with folders of their own, and a server that passes on what it should."""

    def __init__(self, at, monkeypatch, fields=FIELDS, **config):
        monkeypatch.setattr(tasks, "load", lambda config, adapter, device: PromptTask(config, examples(12)))
        text = "\n".join(f"{k} = {json.dumps(v)}" for k, v in fields.items() if k != "adapter")
        self.flat = {
            "method.name": "dp_fpl", "method.fields": f"{text}\nadapter.length = {LENGTH}", "train.batch-size": 4,
            "secure.enabled": True, "secure.noise": "sum", "secure.min-sites": 4, **config,
        }  # fmt: skip
        self.at, self.fields, self.config = at, fields, parse(self.flat)
        (at / "data").mkdir(parents=True)
        self.method = strategies.create_from_json("dp_fpl", json.dumps(fields))
        self.exchange = Exchange(self.method, "dp_fpl", PromptTask().spec)
        self.state = self.method.init(
            self.exchange.spec, PromptTask().initial(rng.initial(0, "w")), rng.initial(0, "m")
        )
        self.coordinator = Coordinator("r", settings_of(self.config.secure))

    def assignment(self, site: str, round_: int = 0, plan: str = "") -> Assignment:
        order = {
            "round": round_, "is-new": round_ == 0, "site": site, "run": "r", "method": "dp_fpl",
            "fields": json.dumps(self.fields), "secure": plan,
        }  # fmt: skip
        return Assignment.of(order, self.flat, {"state-dir": str(self.at / site), "data": str(self.at / "data")})

    def round(self, round_: int = 0) -> RingSums:
        sites = {name: secure.site_of(self.assignment(name, round_)) for name in SITES}
        for name, site in sites.items():
            self.coordinator.admit(name, site.hello(self.coordinator.hello()))
        setup = self.coordinator.settle_on(SITES)
        for name, site in sites.items():
            self.coordinator.keep(name, site.join(setup))
        attempt = self.coordinator.attempt(round_, 0, SITES)
        summed = Summed.of(self.exchange, round_, 32, claim_of(self.method, self.config))
        plan = attempt.plan.to_bytes().decode()
        for name in SITES:
            what = self.assignment(name, round_, plan)
            ctx = RoundContext(round_, name, round_ == 0, bytes(32), address=what.order.address)
            found = turn.Turns().take(lambda ctx=ctx: self.exchange.broadcast(self.state, ctx), what)
            _, vector, attached = summed.receive(b"".join(found.parts), what.order.address)
            attempt.add(name, vector, attached)
        for name, asked in attempt.questions().items():
            attempt.answer(name, sites[name].unmask(asked))
        return RingSums(summed.slots, summed.ring(attempt.plan), attempt.total(), {site: {} for site in SITES})

    def spent(self, site: str) -> tuple[float, float]:
        """Epsilon of a row against the server, and against all others together."""
        ledger, budget = ledger_of(self.at / site, site), Budget(8.0, 1e-5, Neighbours.REPLACE_ONE)
        (history,) = {tuple(sorted(spent.items())) for spent in ledger._read()[0].values()}
        return tuple(
            accounting.epsilon(c, 1e-5, budget.neighbours)
            for c in (dict(history), accounting.against_all(dict(history)))
        )


def test_the_sum_has_the_noise_and_each_ledger_both_figures(tmp_path, monkeypatch):
    """z P = 40 * 10 / 4 for h = 3 of 4 sites, so 4 / 3 of its variance in the sum; batches of 4 of 12 rows."""
    run = Run(tmp_path, monkeypatch)
    sums = run.round()
    sums.check(1e6)
    noise = sums.mean("prompt") * 4
    assert float(noise.std()) == pytest.approx(100 * (4 / 3) ** 0.5, rel=0.5)
    z, own = (30**-2 + 40**-2) ** -0.5, (30**-2 + 3 * 40**-2) ** -0.5
    for site in SITES:
        counted, alone = run.spent(site)
        assert counted == pytest.approx(accounting.epsilon({("summed", 0, 0, z): 1}, 1e-5, Neighbours.REPLACE_ONE))
        assert alone == pytest.approx(accounting.epsilon({("summed", 0, 0, own): 1}, 1e-5, Neighbours.REPLACE_ONE))
        assert counted < alone


def test_a_deterministic_run_is_not_charged(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, **{"run.deterministic": True})
    run.round()
    assert not (tmp_path / "s0" / ".ledger").exists()


def test_a_budget_of_the_sum_ends_the_run_at_the_site(tmp_path, monkeypatch):
    z = (30**-2 + 40**-2) ** -0.5
    once = accounting.epsilon({("summed", 0, 0, z): 1}, 1e-5, Neighbours.REPLACE_ONE)
    run = Run(tmp_path, monkeypatch, FIELDS | {"epsilon": once * 0.99})
    with pytest.raises(BudgetError, match="after this turn"):
        run.round()


def test_a_site_trains_for_no_run_whose_noise_cannot_be_in_the_sum(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, **{"secure.enabled": False})
    with pytest.raises(ConfigError, match="secure.noise"):
        turn.Turns().take(bytes, run.assignment("s0"))
    assert not (tmp_path / "s0" / ".ledger").exists()
