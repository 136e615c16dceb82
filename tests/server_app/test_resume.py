"""A server that dies at any point and is started again, over a Grid in this process. Sites keep only their disks."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Error, Message

from fedveil import rng, strategies
from fedveil.client_app.app import app
from fedveil.config import CohortConfig, ServerConfig
from fedveil.errors import QuorumError
from fedveil.records.tensor_state import state_digest
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from tests.server_app.grid import LocalGrid, use_toy_task

SITES = ["north", "east", "south"]
KEEPS = {
    "fedrand": "",
    "fedrand selected": 'downlink = "selected"',
    "fedper": "layers = 1",
    "fedpara": "",
    "random_binary": "",
    "random_binary locked": 'mask_period = "never"\nexchange = "epoch"',
    "fedavg": "",
    "fedavg adam": "",
}
OPTIMIZERS = {"fedavg adam": ServerConfig(optimizer="fedadam")}


class Killed(BaseException):
    """What no code catches, as no code catches SIGKILL."""


class Runs:
    """Runs of one method, each with a folder of the server and one of the sites."""

    def __init__(self, monkeypatch, tmp_path: Path, method: str) -> None:
        self.task, self.at = use_toy_task(monkeypatch), tmp_path
        self.name, fields = method.split()[0], KEEPS[method]
        self.method = strategies.create_method(self.name, fields)
        self.server = OPTIMIZERS.get(method, ServerConfig())
        self.config = {"run.deterministic": True, "run.seed": 9, "run.rounds": 4}
        self.config |= {"method.name": self.name, "method.params": fields}

    def start(self, name: str, resume: bool = False, grid: LocalGrid | None = None, **cohort) -> tuple[str, list[int]]:
        """Digest of the end of a run, and the rounds that it went through."""
        with RunFolder(self.at / name, resume) as folder:
            folder.status("running", 0, 4)
            return self._started(folder, grid or LocalGrid(app, SITES, self.at / f"sites-{name}", self.config), cohort)

    def _started(self, folder: RunFolder, grid: LocalGrid, cohort: dict[str, object]) -> tuple[str, list[int]]:
        quick = {"min_sites": 3, "deadline_seconds": 1.0, "wait_seconds": 1.0} | cohort
        settings = RunSettings(CohortConfig(**quick), seed=9, deterministic=True, method=self.name, server=self.server)
        strategy = MethodStrategy(self.method, settings, folder=folder, spec=self.task.spec)
        weights = ArrayRecord(dict(self.task.initial(rng.initial_stream(9, "weights"))))
        end = strategy.start(grid, weights, num_rounds=4)
        return state_digest(end.arrays.to_torch_state_dict()), [record.round for record in strategy.history]

    def states(self, name: str) -> dict[str, str]:
        """The private states at the sites' disks by site: digest of the newest."""
        digests_by_site = {}
        for site in SITES:
            files = sorted(self.at.glob(f"sites-{name}/*/{site}/turn-*.safetensors"))
            digests_by_site[site] = files[-1].name + hashlib.sha256(files[-1].read_bytes()).hexdigest() if files else ""
        return digests_by_site


@pytest.fixture(params=KEEPS)
def runs(request, monkeypatch, tmp_path) -> Runs:
    return Runs(monkeypatch, tmp_path, request.param)


@pytest.mark.long
@pytest.mark.parametrize("died", [-1, 0, 2])
def test_a_server_that_dies_with_a_round_s_uploads_ends_where_an_unbroken_one_does(runs, monkeypatch, died):
    """All sites have gone on and all uploads are lost: the worst moment, just before a checkpoint."""
    whole, _ = runs.start("whole")
    real = RunFolder.checkpoint

    def dies(folder, server, loop):
        if loop["round"] == died:
            raise Killed
        real(folder, server, loop)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "checkpoint", dies)
        with pytest.raises(Killed):
            runs.start("broken")
    end, rounds = runs.start("broken", resume=True)
    assert rounds == list(range(max(died, 0), 4))
    assert end == whole
    assert runs.states("broken") == runs.states("whole")


@pytest.mark.long
def test_a_lost_reply_and_a_missed_quorum_leave_nothing_behind(runs):
    """The reply of one site is lost in round 1, and all sites train that round again."""
    whole, _ = runs.start("whole")
    lost = []

    def lose(message: Message, reply: Message) -> Message:
        if message.content.config_records["order"]["round"] != 1 or lost:
            return reply
        lost.append(message)
        return Message(Error(5, "node unavailable"), reply_to=message)

    grid = LocalGrid(app, SITES, runs.at / "sites-broken", runs.config, tamper={"east": lose})
    end, rounds = runs.start("broken", grid=grid)
    assert lost
    assert rounds == [0, 1, 1, 2, 3]
    assert end == whole
    assert runs.states("broken") == runs.states("whole")


@pytest.mark.long
def test_a_server_that_lost_its_last_checkpoint_goes_on_from_the_one_before(runs, monkeypatch):
    whole, _ = runs.start("whole")
    real = RunFolder.checkpoint

    def dies(folder, server, loop):
        if loop["round"] == 3:
            raise Killed
        real(folder, server, loop)
        if loop["round"] == 1:
            shutil.copy(runs.at / "broken" / "checkpoint.safetensors", runs.at / "older")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "checkpoint", dies)
        with pytest.raises(Killed):
            runs.start("broken")
    shutil.copy(runs.at / "older", runs.at / "broken" / "checkpoint.safetensors")
    end, rounds = runs.start("broken", resume=True)
    assert rounds == [2, 3]
    assert end == whole


@pytest.mark.long
def test_below_the_quorum_in_every_attempt_the_run_ends_and_can_be_resumed(runs):
    whole, _ = runs.start("whole")

    def lose(message: Message, reply: Message) -> Message:
        late = message.content.config_records["order"]["round"] == 2
        return Message(Error(5, "node unavailable"), reply_to=message) if late else reply

    sites = runs.at / "sites-broken"
    with pytest.raises(QuorumError):
        runs.start("broken", grid=LocalGrid(app, SITES, sites, runs.config, tamper={"east": lose}), max_retries=1)
    assert runs.start("broken", resume=True)[0] == whole


@pytest.mark.parametrize("runs", ["fedrand"], indirect=True)
def test_a_site_that_lost_its_disk_goes_on_as_a_newcomer(runs):
    def lose(message: Message, reply: Message) -> Message:
        if message.content.config_records["order"]["round"] == 0:
            shutil.rmtree(next(runs.at.glob("sites-run/*/east")))
        return reply

    grid = LocalGrid(app, SITES, runs.at / "sites-run", runs.config, tamper={"east": lose})
    _, rounds = runs.start("run", grid=grid, min_sites=2)
    assert rounds == [0, 1, 2, 3]
    asked = [
        (m.content.config_records["order"]["site"], m.content.config_records["order"]["is-new"]) for m in grid.pushed
    ]
    assert [new for site, new in asked if site == "east"] == [True, False, True, False]
