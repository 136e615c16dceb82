"""A site without a connection in a real federation: what its rounds end with is what they end with over the wire."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedveil.client_app.policy import run_config_rules
from fedveil.config import parse
from fedveil.console.commands.federation import app as console_app
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.flower.machine import format_toml
from fedveil.console.main import main
from fedveil.records import audit_log, disclosure_ledger
from fedveil.relay import keys
from tests.conftest import ROOT
from tests.deployment.engine import until
from tests.deployment.loopback import check_same, in_process, lines, over_grpc

DATA = ROOT / "data" / "e2e"
SITES, ROUNDS = 2, 2
FAR = "site-1"
CONFIG = {
    "run.deterministic": True, "run.seed": 4, "run.rounds": ROUNDS, "method.name": "fedrand",
    "task.evaluation": str(DATA), "train.max-steps": 2, "train.batch-size": 4, "evaluate.eval-examples": 4,
    "evaluate.generate": "never", "cohort.sites": SITES, "cohort.deadline-seconds": 86_400.0,
}  # fmt: skip


def carried(source: Path, target: Path, stop: threading.Event) -> None:
    """What a job behind a diode does: each new file, byte by byte, and every so often all of them once more."""
    rounds = 0
    while not stop.wait(0.2):
        rounds += 1
        for file in sorted(source.glob("*.relay")):
            if not (target / file.name).exists() or rounds % 20 == 0:
                shutil.copyfile(file, target / f".{file.name}.tmp")
                (target / f".{file.name}.tmp").replace(target / file.name)


class Relayed(LocalDeployment):
    """Its site FAR has no connection: one command at the server, one at the site, and files between them."""

    policy = ""

    def start_site(self, name: str) -> None:
        if name != FAR:
            super().start_site(name)
            return
        ends = {end: self.kit(end) for end in ("server", "site")}
        public = {end: keys.make_keys(kit / "keys") for end, kit in ends.items()}
        for end, other in (("server", "site"), ("site", "server")):
            (ends[end] / "keys" / "peer.pub").write_text(f"{public[other]}\n")
        env = {**self._env(), "OMP_NUM_THREADS": str(self.client_threads), "PYTHONPATH": os.pathsep.join(sys.path[:1])}
        self.processes.start(FAR, self.command("server", "export"), env, cwd=ROOT)
        self.processes.start("import", self.command("site", "import", "--follow", "--device", "cpu"), env, cwd=ROOT)

    def command(self, end: str, *words: str) -> list[str]:
        kit = self.kit(end)
        folders = (str(kit / "orders"), str(kit / "replies"))
        return [sys.executable, "-m", "fedveil.console.main", "relay", *words, "--kit", str(kit), *folders]

    def online(self, name: str) -> bool:
        if name != FAR:
            return super().online(name)
        self._require_alive(name)
        return f"site {FAR}: online".encode() in self.processes.log(name).read_bytes()

    def kit(self, end: str) -> Path:
        """As it lies unpacked at either end."""
        kit = self.folder / "far" / end
        if not kit.exists():
            for part in ("keys", "orders", "replies"):
                (kit / part).mkdir(mode=0o700, parents=True)
            about = {"federation": "pilot", "site": FAR, "superlink": f"127.0.0.1:{self._fleet_port}"}
            (kit / "site.toml").write_text(format_toml(about))
            node = {"data": str(DATA), "data-set": FAR, "state-dir": "state", "partition-id": 1, "num-partitions": 2}
            (kit / "node-config.toml").write_text(format_toml({**node, "policy": self.policy}))
        if end == "server":
            shutil.copy(self.folder / "ca.crt", kit)
            shutil.copy(self._key(FAR), kit / "keys" / "node.key")
        return kit

    @contextmanager
    def carrier(self) -> Iterator[None]:
        """Somebody who carries files, for as long as the block."""
        stop, server, site = threading.Event(), self.kit("server"), self.kit("site")
        ways = ((server / "orders", site / "orders", stop), (site / "replies", server / "replies", stop))
        threads = [threading.Thread(target=carried, args=way) for way in ways]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_rounds_by_files_are_those_of_the_wire_bit_for_bit(tmp_path, capsys):
    needed = run_config_rules.permits_for_run(parse({**CONFIG, "run.dir": str(tmp_path), "run.name": "fedrand"}))
    needed = needed.replace('"run.name" = "fedrand"', '"run.name" = ["fedrand", "by-hand"]')
    needed = needed.replace(f'"run.rounds" = {ROUNDS}', f'"run.rounds" = [1, {ROUNDS}]')
    policy = tmp_path / "policy.toml"
    digest = console_app.bundle_digest(ROOT)
    policy.write_text(f'app-digests = ["{digest}"]\nmethods = ["fedrand"]\ntasks = ["text-generation"]\n{needed}')
    share = (("num-partitions", SITES), ("policy", str(policy)))
    sites = [LocalSite(f"site-{i}", DATA, (("partition-id", i), *share)) for i in range(SITES)]
    federation = Relayed(sites, tmp_path / "federation")
    federation.policy = str(policy)
    with federation, federation.carrier():
        ended = over_grpc(federation, tmp_path, CONFIG, timeout=400)
        assert ended.completed, (ended.reason, federation.processes.log(FAR).read_text()[-3000:])
        left = federation.kit("server") / "orders"
        until(lambda: not list(left.glob("*.relay")), 20, "orders that were answered are taken back", 0.1)
        federation.processes.kill("import", 5.0)
        by_hand(federation, tmp_path, CONFIG | {"run.rounds": 1, "run.name": "by-hand", "run.dir": str(tmp_path)})
    assert federation.processes.alive() == []
    check_same(tmp_path / "fedrand", in_process(CONFIG, DATA, SITES), ROUNDS)
    check_records(federation, tmp_path, capsys)


def by_hand(federation: Relayed, at: Path, config: dict) -> None:
    """One round, for which somebody starts the command once the order is there."""
    (federation.kit("site") / "orders" / "letter.relay").write_bytes(b"nobody's")
    orders = federation.kit("site") / "orders"
    known = set(orders.glob("*.relay"))
    run = federation.run(ROOT, config)
    until(lambda: set(orders.glob("*.relay")) - known, 300, "an order of the next run has been carried", 0.2)
    once = subprocess.run(
        federation.command("site", "import", "--device", "cpu"), capture_output=True, text=True, cwd=ROOT, timeout=400,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert once.returncode == 1, (once.stdout, once.stderr)  # for what is no letter
    assert "letter.relay: it is not a relay file of version 1" in once.stdout
    assert "1 answered, 1 refused" in once.stdout
    ended = federation.wait(run, timeout=300)
    assert ended.completed, ended.reason
    assert lines(at / "by-hand" / "metrics.jsonl")[-1]["accepted"] == ["site-0", FAR]


def check_records(federation: Relayed, at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gate, audit log and disclosure of the far site are those of the near one."""
    far, near = federation.kit("site") / "state", federation.folder / "sites" / "site-0"
    logs = {name: audit_log.read_log(state / audit_log.NAME) for name, state in (("far", far), ("near", near))}
    assert [line["event"] for line in logs["far"]] == ["admitted", "sent"] * (ROUNDS + 1)
    for one, other in zip(logs["far"], logs["near"], strict=True):
        assert set(one) == set(other)
        same = {"event", "run", "round", "rounds", "method", "task", "model", "app", "policy", "signer"} & set(one)
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
    server = at / audit_log.NAME
    assert main(["log", "verify", str(far / audit_log.NAME), "--other", str(server), "--site", FAR]) == 0
    capsys.readouterr()
    messages = disclosure_ledger.read_messages(at / "fedrand" / "disclosure.jsonl")
    assert [(m["site"], m["direction"]) for m in messages].count((FAR, "up")) == ROUNDS
    events = [line["event"] for line in audit_log.read_log(far / "relay-log.jsonl")]
    once_more = ["refused", "taken", "answered"]
    assert events == [*["taken", "answered"] * ROUNDS, *once_more]  # though each order came many times
    assert lines(at / "fedrand" / "metrics.jsonl")[-1]["accepted"] == ["site-0", FAR]
