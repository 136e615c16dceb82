"""A site of a secure run over gRPC that is killed between its write and its answer.

A site writes its state, then a line of its audit log, then it answers. A test that holds the lock of that log stops the
site between the two, and can kill it there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedveil.client_app.secure_round import FileSecAggStore
from fedveil.client_app.state.client_state import SECURE
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.federation.secagg.state import SiteSecAggState
from fedveil.records import audit_log
from fedveil.records.tensor_state import state_digest
from tests.conftest import ROOT
from tests.deployment.engine import until
from tests.deployment.loopback import build_in_process, lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TEXT = ROOT / "data" / "e2e"
SECONDS = 900  # at most until something happens, on a machine that has much else to do
CONFIG = {
    "run.seed": 4, "run.deterministic": True, "train.batch-size": 4, "train.max-steps": 2, "evaluate.every": 0,
    "evaluate.generate": "never", "secure.enabled": True, "cohort.deadline-seconds": 1800.0,
}  # fmt: skip


class Federation:
    """Sites over gRPC in one run, whose audit logs a test can hold."""

    def __init__(self, deployment: LocalDeployment, names: Sequence[str], at: Path, flat: Mapping[str, Any]) -> None:
        self.deployment, self.names, self._held = deployment, names, dict[str, ExitStack]()
        self.folder = at / str(flat["method.name"])
        self.hold(*names)
        self.run = deployment.run(ROOT, {**flat, "run.dir": str(at), "run.name": self.folder.name})

    def site(self, name: str) -> Path:
        return self.deployment.folder / "sites" / name

    def hold(self, *names: str) -> None:
        """From now on these sites stop between their next write and its line."""
        for name in names:
            self.site(name).mkdir(mode=0o700, parents=True, exist_ok=True)
            stack = self._held[name] = ExitStack()
            stack.enter_context(audit_log.locked_log(self.site(name) / audit_log.NAME))

    def let_go(self, *names: str) -> None:
        for name in names:
            self._held.pop(name).close()

    def events(self, name: str) -> list[tuple[str, int]]:
        """Return the events of the site's secure sums, with their rounds."""
        return [(line["event"], line.get("round", -1)) for line in audit_log.read_log(self.site(name) / audit_log.NAME)]

    def state(self, name: str) -> SiteSecAggState:
        """Return what the site has on disk."""
        stored = [FileSecAggStore(file.parent).load() for file in self.site(name).rglob(SECURE)]
        return (stored and stored[0]) or SiteSecAggState()

    def wait(self, ready: Callable[[], object], what: str) -> None:
        until(lambda: bool(ready()), SECONDS, what, 0.1)

    def progress(self) -> dict[str, Any]:
        return json.loads((self.folder / "progress.json").read_text())

    def kill(self, name: str) -> None:
        """Kill a site that is held, and let its log go."""
        self.deployment.kill_site(name)
        self.let_go(name)

    def restart(self, name: str) -> None:
        """Start a site again, and wait until Flower takes it: it takes the killed one for dead after a minute."""
        self.deployment.start_site(name)
        self.wait(lambda: self.deployment.online(name), f"{name} is online again")


@contextmanager
def running(names: Sequence[str], data: Path, at: Path, flat: Mapping[str, Any]) -> Iterator[Federation]:
    """A run whose sites all stop at their first line; on leaving, it has completed and no process is left."""
    sites = [LocalSite(name, data) for name in names]
    with LocalDeployment(sites, at / "federation", start_timeout=SECONDS) as deployment:
        federation = Federation(deployment, names, at, flat)
        yield federation
        ended = deployment.wait(federation.run, timeout=SECONDS)
        assert ended.completed, ended.reason
    assert deployment.processes.alive() == []


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [record for record in lines(folder / "metrics.jsonl") if record["round"] >= 0]


def test_a_site_of_a_whole_cohort_that_is_killed_at_its_write_costs_one_round_and_never_masks_twice_in_it(tmp_path):
    names = [f"site-{i}" for i in range(3)]
    killed, *others = names
    flat = CONFIG | {
        "method.name": "fedavg", "run.rounds": 2, "secure.min-sites": 3, "secure.whole-cohort": True,
        "cohort.sites": 3, "cohort.min-sites": 3, "cohort.max-retries": 1, "evaluate.eval-examples": 4,
        "task.evaluation": str(TEXT),
    }  # fmt: skip
    with running(names, TEXT, tmp_path, flat) as federation:
        for name in names:
            federation.wait(lambda name=name: federation.state(name).fence.masked == (0, 0), f"{name} has masked")
        at_its_death = federation.state(killed)
        federation.kill(killed)
        federation.wait(lambda: killed in federation.progress()["reasons"], "the server goes on without the site")
        federation.restart(killed)
        federation.let_go(*others)
    lost, counted = records_of(federation.folder)
    assert lost["unseen"]["lost"]
    assert set(counted["accepted"]) == set(names)
    assert at_its_death.fence.signed == 0
    assert at_its_death.live is None
    # Its upload of round 0 never left, and it has masked in round 1 alone since.
    assert federation.events(killed) == [("masked", 1)]
    assert [federation.events(name) for name in others] == [[("masked", 0), ("masked", 1)]] * 2
    assert [federation.state(name).fence.signed for name in names] == [1, 1, 1]
    assert lost["weights"] == ""
    reference = build_in_process(flat, TEXT, len(names))
    reference.round(1)  # from the weights of the start
    assert counted["weights"] == state_digest(reference.models()["server"])
