"""One round over real processes: a SuperLink, two SuperNodes, TLS, node keys. The one federation of the fast tests.

So that a contributor's green says something about Flower. The other federations are marked long.
"""

from __future__ import annotations

import json

import pytest

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from tests.conftest import ROOT
from tests.deployment.loopback import check_same, in_process, over_grpc

DATA = ROOT / "data" / "e2e"
CONFIG = {
    "method.name": "fedavg", "run.deterministic": True, "run.rounds": 1, "train.max-steps": 1, "train.batch-size": 4,
    "train.received-loss-examples": 0, "cohort.sites": 2, "client.worker": False, "evaluate.generate": "never",
    "task.evaluation": str(DATA), "evaluate.eval-examples": 4,
}  # fmt: skip


@pytest.mark.timeout(280)
def test_a_round_over_real_processes_ends_in_the_weights_of_one_process(tmp_path):
    sites = [LocalSite(f"site-{i}", DATA, (("partition-id", i), ("num-partitions", 2))) for i in range(2)]
    with LocalDeployment(sites, tmp_path / "federation") as federation:
        ended = over_grpc(federation, tmp_path, CONFIG, timeout=240)
        assert ended.completed, ended.reason
    check_same(tmp_path / "fedavg", in_process(CONFIG, DATA, 2), rounds=1)
    assert json.loads((tmp_path / "fedavg" / "status.json").read_text())["state"] == "completed"
    assert federation.processes.alive() == []
