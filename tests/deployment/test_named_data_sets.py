"""Sites with several data sets, over real processes: Flower flattens the tables of a node config on the way."""

from __future__ import annotations

import pytest

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from tests.conftest import ROOT
from tests.deployment.loopback import lines, over_grpc

ROWS = (ROOT / "data" / "e2e" / "train.jsonl").read_text().splitlines()[:40]
CONFIG = {
    "method.name": "fedavg", "run.rounds": 1, "train.max-steps": 0, "train.batch-size": 4, "cohort.sites": 2,
    "cohort.min-sites": 2, "client.worker": False, "evaluate.generate": "never",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(400)
def test_each_run_trains_on_the_data_set_that_it_names(tmp_path):
    sites = []
    for place, name in enumerate(("north", "south")):
        tables = {}
        for count, data_set in ((6, "icu"), (9, "ct")):
            folder = tmp_path / name / data_set
            folder.mkdir(parents=True)
            (folder / "train.jsonl").write_text("\n".join(ROWS[place * 15 : place * 15 + count]) + "\n")
            tables[data_set] = {"data": str(folder)}
        sites.append(LocalSite(name, None, (("num-partitions", 1), ("partition-id", 0), ("data-sets", tables))))
    with LocalDeployment(sites, tmp_path / "federation", guarded=True) as federation:
        for data_set, rows in (("icu", 6), ("ct", 9)):
            ended = over_grpc(federation, tmp_path / data_set, {**CONFIG, "task.data-set": data_set})
            assert ended.completed, ended.reason
            (row,) = [row for row in lines(tmp_path / data_set / "fedavg" / "metrics.jsonl") if row["round"] == 0]
            assert {site: report["num_examples"] for site, report in row["reports"].items()} == dict.fromkeys(
                ("north", "south"), rows
            )
    assert federation.processes.alive() == []
