"""Signatures over real processes, against a SuperLink that has everything but the keys.

The SuperLink of these tests is honest; what it could forge is forged by exchanging a key: whoever sends a message in
another's name has to sign it with another key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedveil.console.flower import instruction_key_files
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite, RunOutcome
from fedveil.federation.secagg import crypto
from fedveil.records.atomic_files import write_atomic
from fedveil.records.audit_log import NAME, read_log
from tests.conftest import ROOT
from tests.deployment.loopback import over_grpc

pytestmark = pytest.mark.long

DATA = ROOT / "data" / "e2e"
CONFIG = {
    "method.name": "fedavg", "run.rounds": 1, "train.max-steps": 1, "train.batch-size": 4, "cohort.sites": 2,
    "cohort.min-sites": 1, "cohort.max-retries": 0, "client.worker": False, "evaluate.generate": "never",
    "evaluate.every": 0, "train.received-loss-examples": 0,
}  # fmt: skip


class Pilot:
    """A federation of two sites that sign."""

    def __init__(self, federation: LocalDeployment, at: Path) -> None:
        self.federation, self.at, self.runs = federation, at, 0

    def run(self) -> RunOutcome:
        self.runs += 1
        return over_grpc(self.federation, self.at / f"run-{self.runs}", CONFIG)

    def events(self, event: str, key: str) -> dict[str, str]:
        """By site, what the server's log of the last run says of an event."""
        lines = read_log(self.at / f"run-{self.runs}" / NAME)
        return {line["site"]: str(line.get(key, "")) for line in lines if line["event"] == event}

    def log_of(self, site: str) -> list[dict[str, Any]]:
        (file,) = self.federation.folder.glob(f"**/{site}/**/{NAME}")
        return list(read_log(file))


@pytest.mark.timeout(900)
def test_a_message_in_anothers_name_does_not_count(tmp_path):
    sites = [LocalSite(name, DATA, (("partition-id", i), ("num-partitions", 2))) for i, name in enumerate("ab")]
    with LocalDeployment(sites, tmp_path / "federation", guarded=True) as federation:
        pilot = Pilot(federation, tmp_path)
        assert pilot.run().completed
        assert sorted(pilot.events("accepted", "signed")) == ["a", "b"]

        # The list has a key that b does not have: b says so, and trains nothing that would not count.
        listed = instruction_key_files.signers_file(federation.folder)
        before = listed.read_bytes()
        own = instruction_key_files.public_key(federation.folder / "keys" / "b.signing")
        write_atomic(listed, before.replace(own.encode(), crypto.verifying_key(os.urandom(32)).hex().encode()))
        assert pilot.run().completed
        assert list(pilot.events("accepted", "signed")) == ["a"]
        assert "signing-key: the server lists" in pilot.events("failed", "reason")["b"]
        assert pilot.log_of("b")[-1]["event"] == "refused"
        write_atomic(listed, before)

        # A SuperLink that makes an instruction has no instruction key.
        write_atomic(instruction_key_files.current_file(federation.folder), os.urandom(32))
        trained = [len(pilot.log_of(site)) for site in "ab"]
        assert not pilot.run().completed
        assert pilot.events("accepted", "signed") == {}
        for site, lines in zip("ab", trained, strict=True):
            (line,) = pilot.log_of(site)[lines:]
            assert line["event"] == "refused"
            assert "it has no valid signature by this federation's instruction key" in line["reason"]
