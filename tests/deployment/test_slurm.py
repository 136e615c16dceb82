"""docs/slurm.md: its batch scripts run as Slurm would run them, and a site in one is ended as Slurm would end it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedveil.console.flower.machine import free_ports
from tests.conftest import ROOT, extract
from tests.deployment import slurm
from tests.deployment.slurm import Job

PAGE = (ROOT / "docs" / "slurm.md").read_text()
ONE_GPU, MORE_GPUS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# A job that notes what it was told, and stays until a signal ends it. It is the site's place in the fast tests.
RECORDER = """\
#!{python} -I
import json, os, signal, sys, time
note = open("recorded.jsonl", "a")
def write(**said):
    print(json.dumps(said), file=note, flush=True)
def ended(number, frame):
    write(signal=signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGINT, ended); signal.signal(signal.SIGTERM, ended)
write(argv=sys.argv[1:], threads=os.environ["OMP_NUM_THREADS"], tasks=os.environ.get("SLURM_STEP_NUM_TASKS"))
time.sleep(60)
"""


@dataclass(frozen=True)
class Cluster:
    """A login node: a folder, and an environment that finds Slurm's programs."""

    folder: Path
    env: dict[str, str]

    def run(self, *words: str, timeout: float = 120.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done

    def submit(self, script: str, *options: str) -> Job:
        (self.folder / "site.sbatch").write_text(script)
        stdout = self.run("sbatch", *options, "site.sbatch").stdout
        return Job(Path(self.env["STAND_IN_SLURM"]) / stdout.split()[-1])

    def recorded(self) -> list[dict]:
        file = self.folder / "recorded.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until(true: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def ended(job: Job, seconds: float = 60.0) -> str:
    until(lambda: job.state() not in ("PENDING", "RUNNING"), seconds, "the job ends")
    return job.state()


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "node").mkdir()
    made = Cluster(tmp_path / "node", slurm.install(tmp_path / "slurm"))
    yield made
    for folder in sorted((tmp_path / "slurm" / "jobs").glob("*"), key=lambda f: -int(f.name)):  # whatever failed above
        Job(folder).limit()
        ended(Job(folder))


@pytest.fixture
def recording(cluster):
    """The same, with a recorder in the place of venv/bin/fedveil."""
    program = cluster.folder / "venv" / "bin" / "fedveil"
    program.parent.mkdir(parents=True)
    program.write_text(RECORDER.format(python=sys.executable))
    program.chmod(0o755)
    return cluster


def test_the_script_starts_the_site_once_and_its_time_ends_it_by_itself(recording):
    job = recording.submit(ONE_GPU)
    until(recording.recorded, 20, "the site has started")
    (started,) = recording.recorded()
    assert started["argv"][:4] == ["site", "start", "--kit", "kit"]
    assert (started["threads"], started["tasks"]) == ("8", None)
    job.limit()
    assert ended(job) == "0"
    assert recording.recorded()[1:] == [{"signal": "SIGINT"}]


@pytest.mark.long
def test_without_b_the_signal_would_pass_the_site_by(recording):
    """Why the page says so: nothing is a step, so that only the limit itself ends the job."""
    job = recording.submit(ONE_GPU.replace("--signal=B:INT@60", "--signal=INT@1"))
    until(recording.recorded, 20, "the site has started")
    job.limit()
    assert ended(job) == "TIMEOUT"
    assert recording.recorded()[1:] == [{"signal": "SIGTERM"}]


@pytest.mark.long
def test_the_next_job_of_the_name_waits_for_this_one(recording):
    first, second = recording.submit(ONE_GPU), recording.submit(ONE_GPU)
    other = recording.submit(ONE_GPU, "--job-name=fedveil-south")
    until(lambda: len(recording.recorded()) == 2, 20, "north's first and south's only job run")
    assert (first.state(), second.state(), other.state()) == ("RUNNING", "PENDING", "RUNNING")
    recording.run("scancel", "--batch", "--signal=INT", first.folder.name)
    assert ended(first) == "0"
    until(lambda: second.state() == "RUNNING", 20, "the second has begun")


def test_the_script_for_more_gpus_says_how_many(recording):
    recording.submit(MORE_GPUS)
    until(recording.recorded, 20, "the site has started")
    (started,) = recording.recorded()
    assert started["argv"][-3:] == ["--processes", "4", "--shard-base"]
    assert (started["threads"], started["tasks"]) == ("32", None)


@pytest.mark.parametrize("wrong", ["--ntask=1", "--gpu=1", "--time 24:00:00"])
def test_an_option_that_slurm_does_not_know_is_found(cluster, wrong):
    (cluster.folder / "site.sbatch").write_text(f"#!/bin/bash\n#SBATCH {wrong}\nexec true\n")
    done = cluster.run("sbatch", "site.sbatch", check=False)
    assert done.returncode != 0
    assert "unrecognized option" in done.stderr


@pytest.mark.long
def test_several_tasks_of_srun_are_refused_in_words(cluster):
    """Two SuperNodes with one key: the real command line says so, once a task, before it looks at anything else."""
    (cluster.folder / "policy.toml").touch()
    given = ["--superlink", "127.0.0.1:1", "--ca", "policy.toml", "--key", "policy.toml", "--name", "north"]
    fedveil = str(Path(sys.executable).parent / "fedveil")
    script = f"#!/bin/bash\nexec srun --ntasks=2 {fedveil} site start {' '.join(given)} --policy policy.toml\n"
    job = cluster.submit(script)
    assert ended(job) == "2"
    assert (cluster.folder / "slurm-1.out").read_text().count("srun: expected one task") == 2


@pytest.fixture
def north(cluster):
    """A server that runs, and a login node with the kit of its site `north`, registered."""
    fleet, control = free_ports(2)
    venv = cluster.folder / "venv" / "bin"
    venv.mkdir(parents=True)
    fedveil = str(Path(sys.executable).parent / "fedveil")
    (venv / "fedveil").symlink_to(fedveil)
    (cluster.folder / "federation.toml").write_text(
        f'name = "pilot"\nserver = ["127.0.0.1"]\nsites = ["north"]\nfleet-port = {fleet}\ncontrol-port = {control}\n'
    )
    cluster.run(fedveil, "provision", "federation.toml")
    with (cluster.folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [fedveil, "server", "start", "pilot"], cwd=cluster.folder, env=cluster.env, stdout=log, stderr=log
        )
    try:
        until(lambda: "next: fedveil" in (cluster.folder / "server.log").read_text(), 90, "the server is up")
        extract(cluster.folder / "pilot" / "kits" / "north.tar.gz", cluster.folder)
        (cluster.folder / "pilot-north").rename(cluster.folder / "kit")
        stdout = cluster.run(fedveil, "site", "init", "--kit", "kit").stdout
        fingerprint = re.findall(r"SHA256:\S+", stdout)[-1]
        cluster.run(fedveil, "members", "register", "pilot", "kit/keys/request.json", "--fingerprint", fingerprint)
        yield cluster
    finally:
        server.terminate()
        server.wait(30)


RUN = {
    "method.name": "fedavg", "run.rounds": "1", "train.max-steps": "2",
    "cohort.sites": "1", "cohort.min-sites": "1", "cohort.wait-seconds": "120.0",
}  # fmt: skip
POLICY = """\
methods = ["fedavg"]
tasks = ["text-generation"]
models = ["tiny"]
app-digests = ["{digest}"]
max-rounds = 5
max-bytes-a-round = 50_000_000
min-examples = 10
min-batch = 2
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_site_in_a_job_trains_and_the_next_job_goes_on_with_its_state(north):
    fedveil = "venv/bin/fedveil"
    set_options = [word for key, value in RUN.items() for word in ("--set", f"{key}={value}")]
    permits = north.run(fedveil, "explain", "--permits", *set_options).stdout
    digest = north.run(fedveil, "app", "digest").stdout.strip()
    (north.folder / "kit" / "site-policy.toml").write_text(POLICY.format(digest=digest) + permits)
    script = ONE_GPU.replace("/project/north/reports", str(ROOT / "data" / "e2e")).replace("/project/north", ".")
    script = script.replace("--device cuda", "--device cpu")
    first, second = north.submit(script), north.submit(script.replace(" --signal=B:INT@60", ""))
    for job, how in ((first, "130"), (second, "TIMEOUT")):
        out = north.folder / f"slurm-{job.folder.name}.out"
        until(lambda out=out: "site north: online" in out.read_text(), 120, f"{out.name}: online")
        done = north.run(fedveil, "submit", "--federation", "pilot", *set_options, timeout=480)
        assert "completed" in done.stdout
        job.limit()
        assert ended(job) == how, out.read_text()
        assert job.left() == []
    log_entries = [json.loads(line) for line in (north.folder / "state" / "audit-log.jsonl").read_text().splitlines()]
    assert [line["n"] for line in log_entries] == list(range(len(log_entries)))
    assert len({line["run"] for line in log_entries if line["event"] == "sent"}) == 2
    north.run(fedveil, "log", "verify", "state/audit-log.jsonl")
