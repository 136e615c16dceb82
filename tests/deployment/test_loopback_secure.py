"""Secure aggregation over gRPC, among sites that know each other by signing keys and a roster, under policies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.cards import card
from fedveil.client_app.site import permits
from fedveil.config import parse
from fedveil.console.flower.local_federation import LocalFederation, LocalSite
from fedveil.console.runs.kept import kept
from fedveil.console.runs.spent import spent
from fedveil.console.runs.unseen import of_site
from fedveil.federation.secure import keys
from fedveil.federation.secure.membership import Roster, roster_digest
from fedveil.records import audit_log
from fedveil.records.state import digest
from fedveil.wire import header
from fedveil.wire.tap import Tap
from tests.conftest import ROOT
from tests.deployment.loopback import in_process, lines, over_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = ROOT / "data" / "e2e"
NAMES = ("site-0", "site-1", "site-2")
CONFIG = {
    "run.seed": 4, "run.rounds": 2, "train.max-steps": 1, "train.batch-size": 4, "evaluate.max-examples": 4,
    "evaluate.generate": "never", "cohort.sites": 3, "cohort.min-sites": 3, "cohort.repeats": 0,
    "secure.enabled": True, "secure.min-sites": 3, "secure.threshold": 3, "task.evaluation": str(TEXT), "run.tap": True,
}  # fmt: skip
CLEAR = CONFIG | {"method.name": "fedrand", "run.deterministic": True}
NOISY = CONFIG | {
    "method.name": "fedavg", "secure.noise": "sum", "secure.bound": 4.0, "dp.clip": 0.5, "dp.noise": 30.0,
    "dp.learning-rate": 0.1,
}  # fmt: skip


class Named:
    """Three sites with keys of their own. Their policies demand sums of three, and name the roster."""

    def __init__(self, at: Path) -> None:
        secrets = {name: bytes([i + 1]) * 32 for i, name in enumerate(NAMES)}
        self.at, self.roster = at, {name: keys.verifying_key(secret).hex() for name, secret in secrets.items()}
        (at / "roster.json").write_bytes(Roster(signing_keys=self.roster).to_bytes())
        sites = []
        for i, (name, secret) in enumerate(secrets.items()):
            (file := at / f"{name}.key").write_bytes(secret)
            file.chmod(0o600)
            node = {"partition-id": i, "num-partitions": 3, "signing-key": str(file), "policy": str(self.policy)}
            sites.append(LocalSite(name, TEXT, tuple(node.items())))
        self.federation = LocalFederation(sites, at / "federation")

    @property
    def policy(self) -> Path:
        return self.at / "policy.toml"

    def run(self, at: Path, flat: dict, digest: str = ""):
        """Under a policy that permits this run and no other."""
        flat = flat | {"secure.roster": str(self.at / "roster.json")}
        needed = permits.needed(parse(flat | {"run.dir": str(at), "run.name": flat["method.name"]}))
        demands = f'require-secure = true\nmin-cohort = 3\nroster = "{digest or roster_digest(self.roster)}"\n'
        self.policy.write_text(f'{demands}methods = ["fedavg", "fedrand"]\n{needed}\n')
        return over_grpc(self.federation, at, flat), flat

    def state(self, site: str) -> Path:
        return self.federation.folder / "sites" / site


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> Iterator[Named]:
    found = Named(tmp_path_factory.mktemp("named"))
    with found.federation:
        yield found


def test_the_sum_is_what_one_process_finds_and_every_site_knows_whom_it_holds_against(named, tmp_path):
    ended, flat = named.run(tmp_path, CLEAR)
    assert ended.completed, ended.reason
    metrics = lines(tmp_path / "fedrand" / "metrics.jsonl")
    reference = in_process(flat, TEXT, 3)
    assert metrics[-1]["weights"] == digest(reference.deployed()["server"])
    for record in metrics[1:]:
        assert (record["failed"], record["reports"]) == ({}, {})
        assert record["unseen"] == {"sites": 3, "holders": 3, "threshold": 3, "deaf": {}}
    tap = Tap(tmp_path / "fedrand" / "tap")
    ups = [header.of_slices([tap.read(seen)]) for seen in tap.messages() if seen.direction == "up"]
    assert [[field[0] for field in up["fields"]] for up in ups] == [["attached", "sum"]] * 6
    told = {site.site: (site.up, site.up_bytes) for site in card.read(tmp_path / "fedrand" / "final").traffic}
    for name in NAMES:
        sent = [line for line in lines(named.state(name) / audit_log.NAME) if line["event"] == "sent"]
        assert told[name] == (len(sent), sum(line["up_bytes"] for line in sent))  # keys and shares among them
        (run,) = [run for run in kept(named.state(name)) if run.run.startswith("fedrand-")]
        said = of_site(named.state(name), run, str(named.policy))
        assert "Holds against a server that deviates and up to 1 site with it." in said


def test_noise_in_the_sum_is_charged_at_every_site_with_both_figures(named, tmp_path):
    ended, _ = named.run(tmp_path, NOISY)
    assert ended.completed, ended.reason
    for name in NAMES:
        (line,) = spent(named.state(name), str(named.policy))
        assert "against the server and all other sites together epsilon" in line


def test_a_roster_that_the_sites_do_not_know_gets_no_sum_and_no_row_is_charged(named, tmp_path):
    ledgers = {path: path.read_bytes() for path in named.federation.folder.rglob(".ledger/*.json")}
    ended, _ = named.run(tmp_path, NOISY, digest="sha256:" + "ab" * 32)
    assert not ended.completed
    assert "roster: this site permits sha256:abab" in ended.reason
    assert {path: path.read_bytes() for path in named.federation.folder.rglob(".ledger/*.json")} == ledgers
