"""Sites of a secure run over gRPC that are killed between a write and its answer: on masking, signing and opening.

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
from fedveil.console.flower.processes import LaunchError
from fedveil.federation.secagg.state import Phase, SiteSecAggState
from fedveil.records import audit_log
from fedveil.records.tensor_state import state_digest
from tests.conftest import ROOT
from tests.deployment.engine import until
from tests.deployment.loopback import CLASSES, build_in_process, lines, write_pictures

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

    def pass_line(self, event: str, round_: int, *names: str) -> None:
        """Let these sites write the line of this event, and hold them again."""
        self.let_go(*names)
        for name in names:
            self.wait(lambda name=name: (event, round_) in self.events(name), f"{name}: {event}")
        self.hold(*names)

    def events(self, name: str) -> list[tuple[str, int]]:
        """Return the events of the site's secure sums, with their rounds."""
        return [(line["event"], line.get("round", -1)) for line in audit_log.read_log(self.site(name) / audit_log.NAME)]

    def state(self, name: str) -> SiteSecAggState:
        """Return what the site has on disk."""
        stored = [FileSecAggStore(file.parent).load() for file in self.site(name).rglob(SECURE)]
        return (stored and stored[0]) or SiteSecAggState()

    def wait(self, ready: Callable[[], object], what: str) -> None:
        until(lambda: bool(ready()), SECONDS, what, 0.1)

    def wait_for_phase(self, phase: Phase, round_: int, *names: str) -> None:
        """Wait until these sites have written that they masked, signed or opened in a round."""

        def is_there(state: SiteSecAggState) -> bool:
            masked, live = state.fence.masked, state.live
            return masked is not None and masked[0] == round_ and live is not None and live.phase == phase

        for name in names:
            self.wait(lambda name=name: is_there(self.state(name)), f"{name}: {phase} in round {round_}")

    def progress(self) -> dict[str, Any]:
        return json.loads((self.folder / "progress.json").read_text())

    def kill(self, name: str) -> None:
        """Kill a site that is held, and let its log go."""
        self.deployment.kill_site(name)
        self.let_go(name)

    def restart(self, name: str) -> None:
        """Start a site again, until Flower takes it: its SuperNode ends while the killed one counts as alive."""

        def is_online() -> bool:
            try:
                return self.deployment.online(name)
            except LaunchError:
                self.deployment.start_site(name)
                return False

        self.deployment.start_site(name)
        self.wait(is_online, f"{name} is online again")


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


def test_dp_fpl_sums_what_its_sites_sent_though_one_is_killed_at_each_write(tmp_path):
    """Five sites with private prompts, of which three must agree; three rounds.

    In round 0 a site is killed on opening. In round 1 one is killed on masking and another on signing. All are back in
    round 2, and continue from their last private prompts that are in a sum.
    """
    names = [f"site-{i}" for i in range(5)]
    masking, signing, opening, third, last = names
    write_pictures(tmp_path / "pictures")
    flat = CONFIG | {
        "method.name": "dp_fpl", "run.rounds": 3, "secure.min-sites": 3, "secure.threshold": 3,
        "secure.max-colluders": 0, "secure.clip-bound": 256.0, "cohort.sites": 5, "cohort.min-sites": 3,
        "cohort.max-retries": 0, "task.name": "clip-prompt", "task.target-column": "label", "task.partition": "iid",
        "task.class-names": ",".join(sorted(CLASSES)), "task.evaluation": str(tmp_path / "pictures"),
    }  # fmt: skip
    with running(names, tmp_path / "pictures", tmp_path, flat) as federation:
        federation.wait_for_phase("masked", 0, *names)
        federation.pass_line("masked", 0, masking, signing, opening, third)
        federation.let_go(last)
        federation.wait_for_phase("opened", 0, masking, signing, opening, third)
        federation.kill(opening)
        federation.restart(opening)

        federation.pass_line("opened", 0, masking, signing, third)
        federation.wait_for_phase("masked", 1, masking)
        federation.hold(last)
        federation.kill(masking)
        federation.wait(lambda: masking in federation.progress()["reasons"], "the server goes on without the site")
        federation.restart(masking)
        federation.pass_line("masked", 1, signing, third)
        federation.wait_for_phase("masked", 1, last)
        federation.let_go(last)
        federation.wait_for_phase("signed", 1, signing, third)
        federation.kill(signing)
        federation.restart(signing)
        federation.let_go(third)
    records = records_of(federation.folder)
    sums = [set(names), set(names) - {masking}, set(names)]
    assert [set(record["accepted"]) for record in records] == sums
    assert [list(record["failed"]) for record in records] == [[], [masking], []]
    for name, (event, round_) in {opening: ("opened", 0), masking: ("masked", 1), signing: ("signed", 1)}.items():
        assert (event, round_) not in federation.events(name), "killed before its line"
    for name in names:
        assert ("masked", 2) in federation.events(name)
        assert "sum-refused" not in {event for event, _ in federation.events(name)}
        assert federation.state(name).fence.kept
    reference, digests = build_in_process(flat, tmp_path / "pictures", len(names)), []
    for record in records:
        reference.sites, reference.silent = record["cohort"], set(record["cohort"]) - set(record["accepted"])
        reference.round(record["round"])
        digests.append(state_digest(reference.models()["server"]))
    assert [record["weights"] for record in records] == digests


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
