"""Whole turns of four sites whose noise is in the sum: what is sent, what is charged, and where it is refused."""

from __future__ import annotations

import json

import pytest

from fedveil import rng, strategies, tasks
from fedveil.client_app import client_session, secure_round
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.state.client_state import open_ledger
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.privacy import Adjacency, Step
from fedveil.errors import BudgetError, ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.flatten import FixedPointSums
from fedveil.federation.secagg.in_process import secagg_config_of
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.federation.secagg.plan import broadcast_digest, config_digest
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest
from fedveil.federation.secagg.server import SecAggCoordinator
from fedveil.privacy import accounting
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.privacy.ledger_account import Party
from fedveil.wire.header import message_digest
from tests.prompt_toy import LENGTH, PromptTask, examples

SITES = ["s0", "s1", "s2", "s3"]
FIELDS = {"rank": 3, "adapter": {"length": LENGTH}, "noise_local": 30.0, "noise_global": 40.0, "sampling": "disjoint"}


class Run:
    """Sites with folders of their own, and a server that passes on what it should."""

    def __init__(self, at, monkeypatch, fields=FIELDS, has_roster=True, **config):
        monkeypatch.setattr(tasks, "load_task", lambda config, adapter, device: PromptTask(config, examples(12)))
        text = "\n".join(f"{k} = {json.dumps(v)}" for k, v in fields.items() if k != "adapter")
        self.flat = {
            "method.name": "dp_fpl", "method.params": f"{text}\nadapter.length = {LENGTH}", "train.batch-size": 4,
            "secure.enabled": True, "secure.noise": "sum", "secure.min-sites": 4, "task.max-tokens": 96, **config,
        }  # fmt: skip
        self.at, self.fields, self.config = at, fields, parse(self.flat)
        (at / "data").mkdir(parents=True)
        self.method = strategies.create_from_json("dp_fpl", json.dumps(fields))
        self.exchange = MessageExchange(self.method, "dp_fpl", PromptTask().spec)
        self.state = self.method.init(
            self.exchange.spec, PromptTask().initial(rng.initial_stream(0, "w")), rng.initial_stream(0, "m")
        )
        digest = config_digest(self.config.flat(), "dp_fpl", json.dumps(self.fields))
        keys = {name: self.write_keys(name) for name in SITES}
        self.roster = keys if has_roster else {}
        policy = "max-broadcast-change = 10.0\nmax-broadcast-drift = 10.0\n"
        (at / "policy.toml").write_text(policy + (f'roster = "{roster_digest(keys)}"' if has_roster else ""))
        self.coordinator = SecAggCoordinator("r", secagg_config_of(self.config.secure), digest, self.roster)

    def write_keys(self, site: str) -> str:
        """Write the site's signing key. Returns its public half."""
        secret, file = bytes([SITES.index(site) + 1]) * 32, self.at / f"{site}.key"
        file.write_bytes(secret)
        file.chmod(0o600)
        return crypto.verifying_key(secret).hex()

    def assignment(self, site: str, round_: int = 0, plan: str = "") -> ClientAssignment:
        order = {
            "round": round_, "is-new": round_ == 0, "site": site, "run": "r", "method": "dp_fpl",
            "fields": json.dumps(self.fields), "secure": plan,
            "roster": SigningKeyRoster(signing_keys=self.roster).to_bytes().decode() if self.roster and plan else "",
        }  # fmt: skip
        node = {
            "site": site, "state-dir": str(self.at / site), "data": str(self.at / "data"),
            "signing-key": str(self.at / f"{site}.key"), "policy": str(self.at / "policy.toml"),
            "simulated": True,
        }  # fmt: skip
        return ClientAssignment.from_instruction(order, self.flat, node)

    def round(self, round_: int = 0) -> FixedPointSums:
        sites = {name: secure_round.open_secagg_site(self.assignment(name, round_), SitePolicy()) for name in SITES}
        request = self.coordinator.request()
        for name, site in sites.items():
            self.coordinator.admit(name, site.ready(request))
        down = self.exchange.broadcast(self.state, RoundContext(round_, "s0", round_ == 0, bytes(32)))
        attempt = self.coordinator.attempt(round_, 0, SITES, broadcast_digest(message_digest(down)))
        summed = MaskedUploadCodec.from_exchange(self.exchange, round_, 32, guarantee_of(self.method, self.config))
        plan = attempt.plan.to_bytes().decode()
        for name in SITES:
            what = self.assignment(name, round_, plan)
            ctx = RoundContext(round_, name, round_ == 0, bytes(32), address=what.order.address)
            reply = client_session.ClientSession().run_round(
                lambda ctx=ctx: self.exchange.broadcast(self.state, ctx), what
            )
            _, vector, attached = summed.receive(b"".join(reply.parts), what.order.address)
            attempt.add(name, vector, attached)
        attempt.close()
        for name, asked in attempt.open_requests().items():
            attempt.take_opening(name, sites[name].open(asked))
        return FixedPointSums(summed.slots, summed.ring(attempt.plan), attempt.total(), {site: {} for site in SITES})

    def spent(self, site: str) -> tuple[float, float]:
        """Epsilon against the server, and against all others together."""
        account = open_ledger(self.at / site).read(SitePolicy().budget).account
        return account.standing(Party.SERVER).composed, account.standing(Party.ALL).composed


@pytest.mark.long
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
        assert counted == pytest.approx(
            accounting.compute_epsilon({Step("summed", 0, 0, z): 1}, 1e-5, Adjacency.REPLACE_ONE)
        )
        assert alone == pytest.approx(
            accounting.compute_epsilon({Step("summed", 0, 0, own): 1}, 1e-5, Adjacency.REPLACE_ONE)
        )
        assert counted < alone


def test_a_site_without_a_roster_charges_its_own_share_alone(tmp_path, monkeypatch):
    """The server could be all other sites, and so know their noise."""
    run = Run(tmp_path, monkeypatch, has_roster=False)
    run.round()
    own = accounting.compute_epsilon(
        {Step("summed", 0, 0, (30**-2 + 3 * 40**-2) ** -0.5): 1}, 1e-5, Adjacency.REPLACE_ONE
    )
    for site in SITES:
        assert run.spent(site) == pytest.approx((own, own))


@pytest.mark.parametrize("has_roster", [True, False])
def test_a_budget_for_the_sum_does_not_suffice_without_a_roster(has_roster, tmp_path, monkeypatch):
    z = (30**-2 + 40**-2) ** -0.5
    once = accounting.compute_epsilon({Step("summed", 0, 0, z): 1}, 1e-5, Adjacency.REPLACE_ONE)
    run = Run(tmp_path, monkeypatch, FIELDS | {"epsilon": once * 1.01}, has_roster)
    if has_roster:
        run.round()
        return
    with pytest.raises(BudgetError, match="for its first client round.*Note that this site's policy names no roster"):
        run.round()


def test_a_deterministic_run_is_open_against_everyone(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, **{"run.deterministic": True})
    run.round()
    (entry,) = open_ledger(tmp_path / "s0").read(SitePolicy().budget).account.entries
    assert (entry.run, entry.open, entry.steps) == ("r", frozenset(Party), ())


def test_a_budget_of_the_sum_ends_the_run_at_the_site(tmp_path, monkeypatch):
    z = (30**-2 + 40**-2) ** -0.5
    once = accounting.compute_epsilon({Step("summed", 0, 0, z): 1}, 1e-5, Adjacency.REPLACE_ONE)
    run = Run(tmp_path, monkeypatch, FIELDS | {"epsilon": once * 0.99})
    with pytest.raises(BudgetError, match="for its first client round") as caught:
        run.round()
    assert "roster" not in str(caught.value)


def test_a_site_trains_for_no_run_whose_noise_cannot_be_in_the_sum(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, **{"secure.enabled": False})
    with pytest.raises(ConfigError, match="secure.noise"):
        client_session.ClientSession().run_round(bytes, run.assignment("s0"))
    assert not (tmp_path / "s0" / ".ledger").exists()
