"""A real federation on this machine: SuperLink, three SuperNodes, gRPC, TLS, node keys; real text, real training."""

from __future__ import annotations

import json

import pytest

from fedveil.console.flower.local_federation import LocalFederation, LocalSite
from fedveil.records import disclosure
from tests.conftest import ROOT
from tests.deployment.loopback import check_same, in_process, over_grpc

DATA = ROOT / "data" / "e2e"
SITES = 3
CONFIG = {
    "run.deterministic": True,
    "run.seed": 4,
    "task.evaluation": str(DATA),
    "train.max-steps": 3,
    "train.batch-size": 4,
    "evaluate.max-examples": 4,
    "evaluate.generate": "never",
    "cohort.fraction": 0.6,
    "cohort.sites": SITES,
    "cohort.deadline-seconds": 200.0,
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    sites = [LocalSite(f"site-{i}", DATA, (("partition-id", i), ("num-partitions", SITES))) for i in range(SITES)]
    with LocalFederation(sites, tmp_path_factory.mktemp("federation")) as running:
        yield running
    assert running.processes.alive() == []


@pytest.mark.timeout(280)
@pytest.mark.parametrize("method,worker,rounds", [("fedavg", False, 1), ("fedrand", True, 2)])
def test_grpc_and_in_process_end_bit_identical(method, worker, rounds, federation, tmp_path):
    overrides = CONFIG | {"method.name": method, "client.worker": worker, "run.rounds": rounds}
    ended = over_grpc(federation, tmp_path, overrides)
    assert ended.completed, ended.reason
    check_same(tmp_path / method, in_process(overrides, DATA, SITES), rounds)
    for line in disclosure.messages(tmp_path / method / "disclosure.jsonl"):
        if method == "fedrand" and line["direction"] == "up":
            assert {name[-1] for name, *_ in line["fields"]} == {line["variant"]}


@pytest.mark.timeout(120)
def test_a_bad_field_fails_the_run_in_one_line_before_any_site_is_asked(federation, tmp_path):
    overrides = CONFIG | {"method.fields": "rho = 1.5", "run.dir": str(tmp_path), "run.name": "bad"}
    ended = federation.wait(federation.run(ROOT, overrides), timeout=100)
    assert not ended.completed
    status = json.loads((tmp_path / "bad" / "status.json").read_text())
    assert status["reason"] == "rho: expected a probability from 0 to 1, found 1.5"
    assert not (tmp_path / "bad" / "disclosure.jsonl").exists()
