"""One round over real processes: a SuperLink, two SuperNodes, TLS, node keys, signed messages. The one federation of
the fast tests.

So that a contributor's green says something about Flower. The other federations are marked long.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedveil.console.flower import instruction_key_files
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.runs.run_reader import load_run
from fedveil.federation.message_signatures.claims import ReplyClaims
from fedveil.federation.message_signatures.evidence import Evidence
from fedveil.federation.message_signatures.key_files import INSTRUCTION_KEYS, InstructionKeys, SiteSigners
from fedveil.records.audit_log import NAME, read_log
from tests.conftest import ROOT
from tests.deployment.loopback import check_same, in_process, over_grpc

DATA = ROOT / "data" / "e2e"
CONFIG = {
    "method.name": "fedavg", "run.deterministic": True, "run.rounds": 1, "train.max-steps": 1, "train.batch-size": 4,
    "train.received-loss-examples": 0, "cohort.sites": 2, "client.worker": False, "evaluate.generate": "never",
    "task.evaluation": str(DATA), "evaluate.eval-examples": 4,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(280)
def test_a_round_over_real_processes_ends_in_the_weights_of_one_process(tmp_path):
    sites = [LocalSite(f"site-{i}", DATA, (("partition-id", i), ("num-partitions", 2))) for i in range(2)]
    with LocalDeployment(sites, tmp_path / "federation", guarded=True) as federation:
        ended = over_grpc(federation, tmp_path, CONFIG, timeout=240)
        assert ended.completed, ended.reason
    check_same(tmp_path / "fedavg", in_process(CONFIG, DATA, 2), rounds=1)
    assert json.loads((tmp_path / "fedavg" / "status.json").read_text())["state"] == "completed"
    assert federation.processes.alive() == []
    check_evidence(tmp_path, tmp_path / "federation", [site.name for site in sites])
    (attempt,) = load_run(tmp_path / "fedavg").attempts
    assert (sorted(attempt["accepted"]), attempt["unsigned"]) == ([site.name for site in sites], [])


def check_evidence(runs: Path, folder: Path, sites: list[str]) -> None:
    """Both sides' logs hold what the other one signed, and a reader needs nothing but the public keys to check it."""
    signers = SiteSigners.from_json(json.loads(instruction_key_files.signers_file(folder).read_bytes()))
    pinned = InstructionKeys.from_file(folder / INSTRUCTION_KEYS)
    accepted = {line["site"]: line for line in read_log(runs / NAME) if line["event"] == "accepted"}
    assert sorted(accepted) == sites
    for site, line in accepted.items():
        replied = from_file(line)
        replied.require_signer(signers.sites[site].signing)
        reply = replied.claims
        assert isinstance(reply, ReplyClaims)
        assert (reply.site, reply.federation) == (site, signers.federation)
        (admitted,) = [entry for entry in site_log(folder, site) if entry["event"] == "admitted"]
        asked = from_file(admitted)
        asked.require_signer(pinned.keys[0])
        assert asked.claims.digest == reply.instruction
        (sent,) = [entry for entry in site_log(folder, site) if entry["event"] == "sent"]
        assert sent["signs"] == {name: getattr(reply, name) for name in ("content", "instruction")}


def from_file(line: dict[str, Any]) -> Evidence:
    """Return a line's signed message as `fedveil log prove` writes and `fedveil log check` reads it."""
    return Evidence.from_json(Evidence.from_line(line).to_json().encode())


def site_log(folder: Path, site: str) -> list[dict[str, Any]]:
    (file,) = folder.glob(f"**/{site}/**/{NAME}")
    return list(read_log(file))
