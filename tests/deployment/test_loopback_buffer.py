"""Server steps that do not wait for a slow site, over gRPC with real processes (`cohort.buffer-size`)."""

from __future__ import annotations

import pytest

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.records import audit_log, disclosure_ledger
from tests.conftest import ROOT
from tests.deployment.loopback import lines, over_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SITES, SLOW, ROUNDS = 3, "site-2", 8
CONFIG = {
    "method.name": "fedavg",
    "run.rounds": ROUNDS,
    "train.epochs": 1,
    "train.batch-size": 4,
    "task.max-tokens": 96,
    "train.received-loss-examples": 0,
    "evaluate.eval-examples": 32,
    "evaluate.generate": "never",
    "cohort.sites": SITES,
    "cohort.max-weight-fraction": 0.5,
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Two sites with 8 rows, and one with 800, whose epoch takes a hundred times as many steps."""
    at, rows = tmp_path_factory.mktemp("buffer"), (ROOT / "data" / "e2e" / "train.jsonl").read_text().splitlines()
    test = (ROOT / "data" / "e2e" / "test.jsonl").read_bytes()
    sites = []
    for number in range(SITES):
        name = f"site-{number}"
        folder = at / "data" / name
        folder.mkdir(parents=True)
        count = 800 if name == SLOW else 8
        mine = [rows[(1000 * number + place) % len(rows)] for place in range(count)]
        (folder / "train.jsonl").write_text("".join(f"{row}\n" for row in mine))
        (folder / "test.jsonl").write_bytes(test)
        sites.append(LocalSite(name, folder))
    with LocalDeployment(sites, at / "federation") as running:
        yield running


def test_a_slow_site_does_not_set_the_pace_and_its_upload_counts_once(federation, tmp_path):
    flat = CONFIG | {"task.evaluation": str(ROOT / "data" / "e2e")}
    taken = {}
    for kind, keys in (("rounds", {}), ("buffer", {"cohort.buffer-size": 2, "cohort.max-staleness": 20})):
        ended = over_grpc(federation, tmp_path / kind, flat | keys, timeout=600)
        assert ended.completed, ended.reason
        taken[kind] = [row for row in lines(tmp_path / kind / "fedavg" / "metrics.jsonl") if "cohort" in row]
        print(kind, ended.seconds, [(row["seconds"], row["scores"]["server"]["loss"]) for row in taken[kind]])
    assert all(len(row["accepted"]) == SITES for row in taken["rounds"])
    steps = taken["buffer"]
    assert [row["round"] for row in steps] == list(range(ROUNDS))
    assert all(len(row["accepted"]) == 2 and not row["failed"] for row in steps)
    late = [row["staleness"][SLOW] for row in steps if SLOW in row["accepted"]]
    assert not late or max(late) >= 1
    assert sum(SLOW in row["accepted"] for row in steps) < ROUNDS
    assert steps[-1]["scores"]["server"]["loss"] < steps[0]["scores"]["server"]["loss"]
    folder = tmp_path / "buffer" / "fedavg"
    uploads = [m for m in disclosure_ledger.read_messages(folder / "disclosure.jsonl") if m["direction"] == "up"]
    assert len(uploads) == 2 * ROUNDS
    assert len({(m["site"], m["round"], m["attempt"]) for m in uploads}) == 2 * ROUNDS
    accepted = [row for row in audit_log.read_log(tmp_path / "buffer" / audit_log.NAME) if row["event"] == "accepted"]
    assert all(row["step"] - row["round"] == row["staleness"] for row in accepted)


def test_noise_at_the_sites_is_charged_once_for_each_state(federation, tmp_path):
    """A site's replay guard refuses a second turn for one round, so a server that asked twice would end the run."""
    keys = {
        "cohort.buffer-size": 2, "dp.clip-norm": 1.0, "dp.noise-multiplier": 2.0, "dp.learning-rate": 0.1,
        "train.epochs": 0, "train.max-steps": 1, "train.batch-size": 2, "run.rounds": 4,
    }  # fmt: skip
    ended = over_grpc(federation, tmp_path, CONFIG | keys, timeout=300)
    assert ended.completed, ended.reason
    rows = [row for row in lines(tmp_path / "fedavg" / "metrics.jsonl") if "cohort" in row]
    asked = [
        m for m in disclosure_ledger.read_messages(tmp_path / "fedavg" / "disclosure.jsonl") if m["direction"] == "down"
    ]
    for site in (f"site-{number}" for number in range(SITES)):
        rounds = [m["round"] for m in asked if m["site"] == site]
        assert len(rounds) == len(set(rounds)) <= 4
    assert len(rows) == 4
