"""Secure aggregation over gRPC, among sites that know each other by signing keys and a roster, under policies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.cards import card
from fedveil.client_app.policy import run_config_rules
from fedveil.config import parse
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.runs.ledger_summary import ledger_lines
from fedveil.console.runs.retained_state import list_retained
from fedveil.console.runs.secagg_summary import secagg_of_site
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.adversary_model import DEVIATING
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest
from fedveil.records import audit_log
from fedveil.records.tensor_state import state_digest
from fedveil.wire import header
from fedveil.wire.capture import MessageCapture
from tests.conftest import ROOT
from tests.deployment.loopback import in_process, lines, over_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = ROOT / "data" / "e2e"
NAMES = ("site-0", "site-1", "site-2")
CONFIG = {
    "run.seed": 4, "run.rounds": 2, "train.max-steps": 1, "train.batch-size": 4, "evaluate.eval-examples": 4,
    "evaluate.generate": "never", "cohort.sites": 3, "cohort.min-sites": 3, "cohort.max-retries": 0,
    "secure.enabled": True, "secure.min-sites": 3, "secure.threshold": 3, "task.evaluation": str(TEXT),
    "run.capture-messages": True,
}  # fmt: skip
CLEAR = CONFIG | {"method.name": "fedrand", "run.deterministic": True}
NOISY = CONFIG | {
    "method.name": "fedavg", "secure.noise": "sum", "secure.clip-bound": 4.0, "dp.clip-norm": 0.5,
    "dp.noise-multiplier": 30.0, "dp.learning-rate": 0.1, "task.max-tokens": 96,
}  # fmt: skip


class Named:
    """Three sites with keys of their own. Their policies demand sums of three, and name the roster."""

    def __init__(self, at: Path) -> None:
        secrets = {name: bytes([i + 1]) * 32 for i, name in enumerate(NAMES)}
        self.at, self.roster = at, {name: crypto.verifying_key(secret).hex() for name, secret in secrets.items()}
        (at / "roster.json").write_bytes(SigningKeyRoster(signing_keys=self.roster).to_bytes())
        sites = []
        for i, (name, secret) in enumerate(secrets.items()):
            (file := at / f"{name}.key").write_bytes(secret)
            file.chmod(0o600)
            node = {"partition-id": i, "num-partitions": 3, "signing-key": str(file), "policy": str(self.policy)}
            sites.append(LocalSite(name, TEXT, tuple(node.items())))
        self.federation = LocalDeployment(sites, at / "federation")

    @property
    def policy(self) -> Path:
        return self.at / "policy.toml"

    def run(self, at: Path, flat: dict, digest: str = ""):
        """Under a policy that permits this run and no other."""
        flat = flat | {"secure.roster": str(self.at / "roster.json")}
        needed = run_config_rules.permits_for_run(parse(flat | {"run.dir": str(at), "run.name": flat["method.name"]}))
        demands = f'require-secure = true\nmin-cohort = 3\nroster = "{digest or roster_digest(self.roster)}"\n'
        demands += "max-broadcast-change = 100.0\nmax-broadcast-drift = 100.0\n"  # NOISY's noise is 30 times the clip
        self.policy.write_text(f'{demands}methods = ["fedavg", "fedrand"]\n{needed}\n')
        return over_grpc(self.federation, at, flat), flat

    def state(self, site: str) -> Path:
        return self.federation.folder / "sites" / site


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> Iterator[Named]:
    deployment = Named(tmp_path_factory.mktemp("named"))
    with deployment.federation:
        yield deployment


def test_the_sum_is_what_one_process_finds_and_every_site_knows_whom_it_holds_against(named, tmp_path):
    ended, flat = named.run(tmp_path, CLEAR)
    assert ended.completed, ended.reason
    metrics = lines(tmp_path / "fedrand" / "metrics.jsonl")
    reference = in_process(flat, TEXT, 3)
    assert metrics[-1]["weights"] == state_digest(reference.models()["server"])
    for record in metrics[1:]:
        assert (record["failed"], record["reports"]) == ({}, {})
        assert record["unseen"] == {
            "sites": 3, "cohort": 3, "quorum": 3, "threshold": 3, "neighbours": 0, "colluding": 1, "deaf": {},
        }  # fmt: skip
    tap = MessageCapture(tmp_path / "fedrand" / "tap")
    ups = [header.header_of_slices([tap.read(seen)]) for seen in tap.messages() if seen.direction == "up"]
    assert [[field[0] for field in up["fields"]] for up in ups] == [["attached", "sum"]] * 6
    site_traffic = {
        site.site: (site.up, site.up_bytes) for site in card.read_card(tmp_path / "fedrand" / "final").traffic
    }
    for name in NAMES:
        sent = [line for line in lines(named.state(name) / audit_log.NAME) if line["event"] == "sent"]
        assert site_traffic[name] == (len(sent), sum(line["up_bytes"] for line in sent))  # keys and shares among them
        (run,) = [run for run in list_retained(named.state(name)) if run.run.startswith("fedrand-")]
        secagg_lines = secagg_of_site(named.state(name), run, str(named.policy))
        assert any(line.startswith("Holds against a server that lies alone, if every site") for line in secagg_lines)
        assert DEVIATING not in secagg_lines


def test_noise_in_the_sum_is_charged_at_every_site_with_both_figures(named, tmp_path):
    ended, _ = named.run(tmp_path, NOISY)
    assert ended.completed, ended.reason
    for name in NAMES:
        lines_ = ledger_lines(named.state(name), str(named.policy))
        assert any("against the server with all other sites: no limit applies. epsilon" in line for line in lines_)


def test_a_roster_that_the_sites_do_not_know_gets_no_sum_and_no_row_is_charged(named, tmp_path):
    ledgers = {path: path.read_bytes() for path in named.federation.folder.rglob(".ledger/*.json")}
    ended, _ = named.run(tmp_path, NOISY, digest="sha256:" + "ab" * 32)
    assert not ended.completed
    assert "roster: this site permits sha256:abab" in ended.reason
    assert {path: path.read_bytes() for path in named.federation.folder.rglob(".ledger/*.json")} == ledgers
