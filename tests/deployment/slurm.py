"""Programs that do as Slurm's `sbatch`, `srun` and `scancel` do, on this machine, for what a site's job asks of them.

By Slurm's own pages (sbatch(1), srun(1), scancel(1), slurm.conf(5)):

| | here |
|---|---|
| `#SBATCH` lines | read up to the first command; the command line goes before them; an unknown option is refused |
| the batch script | runs once, in sbatch's folder, with its environment and SLURM_*; prints to slurm-JOB.out |
| `--dependency=singleton` | waits for the earlier jobs of its name |
| `--signal=B:INT@60` | 60 s before the limit, to the batch script's own process; without B: to srun's alone |
| the limit, and a cancelled job | SIGTERM to every process of the job, SIGKILL after KillWait |
| the batch script's end | the end of the job: what is left of it is killed |

Time is not waited for: `Job.limit` says that a job's time is over.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

KILL_WAIT_SECONDS = 30.0
_KNOWN = {"job-name", "dependency", "nodes", "ntasks", "cpus-per-task", "mem", "gres", "time", "signal"}
_FOLDER = "STAND_IN_SLURM"


def install(folder: Path) -> dict[str, str]:
    """Writes the programs; returns an environment that finds them first."""
    (folder / "bin").mkdir(parents=True)
    for name in ("sbatch", "srun", "scancel"):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {Path(__file__).resolve()} {name} "$@"\n')
        program.chmod(0o755)
    return {**os.environ, _FOLDER: str(folder / "jobs"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


@dataclass(frozen=True)
class Job:
    """What is known of a job."""

    folder: Path

    def state(self) -> str:
        """PENDING, RUNNING, TIMEOUT, CANCELLED before it began, or the batch script's exit code."""
        return (self.folder / "state").read_text()

    def left(self) -> list[str]:
        """Programs that were still running when the batch script had ended."""
        return json.loads((self.folder / "left").read_text())

    def limit(self) -> None:
        """The job's time is over, or over within the seconds of --signal."""
        (self.folder / "limit").touch()


def options(script: str, given: list[str]) -> dict[str, str]:
    """By name, of the script's #SBATCH lines and of the command line, which goes first. Raises SystemExit."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            words += shlex.split(line.removeprefix("#SBATCH "))
        elif line.strip() and not line.startswith("#"):
            break
    option_values = {}
    for word in [*words, *given]:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not equals or name not in _KNOWN:
            raise SystemExit(f"sbatch: unrecognized option '{word}'")
        option_values[name] = value
    return option_values


def of_options(asked: dict[str, str], job: int) -> dict[str, str]:
    """The environment that a batch script gets for its options."""
    env = {"SLURM_JOB_ID": str(job), "SLURM_NTASKS": asked.get("ntasks", "1")}
    if "cpus-per-task" in asked:
        env["SLURM_CPUS_PER_TASK"] = asked["cpus-per-task"]
    if "gres" in asked:
        env["SLURM_GPUS_ON_NODE"] = asked["gres"].rpartition(":")[2]
    return env


def sbatch(arguments: list[str]) -> int:
    """Queues a script, and leaves."""
    *given, file = arguments
    script = Path(file).read_text()
    asked = options(script, given)
    jobs = Path(os.environ[_FOLDER])
    jobs.mkdir(exist_ok=True)
    job = len(list(jobs.iterdir())) + 1
    folder = jobs / str(job)
    folder.mkdir()
    (folder / "script").write_text(script)
    (folder / "script").chmod(0o755)
    (folder / "asked.json").write_text(json.dumps(asked))
    _say(folder, "PENDING")
    with Path(f"slurm-{job}.out").open("wb") as out:
        subprocess.Popen(
            [sys.executable, "-I", __file__, "manage", str(folder)], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    print(f"Submitted batch job {job}")
    return 0


def manage(arguments: list[str]) -> int:
    """A job from its queue to its end."""
    folder = Path(arguments[0])
    asked, job = json.loads((folder / "asked.json").read_text()), int(folder.name)
    while asked.get("dependency") == "singleton" and any(_before(folder, asked.get("job-name", ""))):
        if (folder / "limit").exists():
            _say(folder, "CANCELLED")
            return 0
        time.sleep(0.1)
    env = {**os.environ, **of_options(asked, job)}
    batch = subprocess.Popen([str(folder / "script")], env=env, start_new_session=True)
    (folder / "batch").write_text(str(batch.pid))
    _say(folder, "RUNNING")
    while batch.poll() is None and folder.exists() and not (folder / "limit").exists():
        time.sleep(0.05)
    reached = batch.poll() is None and _end(batch, folder, asked.get("signal", ""))
    left = _of_job(job)
    names = json.dumps([process.name() for process in left])
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    (folder / "left").write_text(names)
    _say(folder, "TIMEOUT" if reached else str(batch.wait()))
    return 0


def _say(folder: Path, state: str) -> None:
    """At one go: a reader never finds half of it."""
    (folder / "new").write_text(state)
    (folder / "new").replace(folder / "state")


def _before(folder: Path, name: str) -> list[Path]:
    """Earlier jobs of this name that have not ended."""
    return [
        other
        for other in folder.parent.iterdir()
        if int(other.name) < int(folder.name)
        and json.loads((other / "asked.json").read_text()).get("job-name", "") == name
        and (other / "state").read_text() in ("PENDING", "RUNNING")
    ]


def _end(batch: subprocess.Popen[bytes], folder: Path, asked: str) -> bool:
    """What is asked for before the limit, then the limit; returns whether that was reached."""
    if asked:
        whose, _, what = asked.rpartition(":")
        name, _, seconds = what.partition("@")
        number = getattr(signal, f"SIG{name.removeprefix('SIG')}")
        processes = [psutil.Process(batch.pid)] if whose == "B" else _of_steps(folder)
        _signal(processes, number)
        if _gone(batch, float(seconds or 60)):
            return False
    _signal(_of_job(int(folder.name)), signal.SIGTERM)
    if not _gone(batch, KILL_WAIT_SECONDS):
        batch.kill()
        batch.wait()
    return True


def _gone(batch: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        batch.wait(seconds)
    return batch.returncode is not None


def _of_job(job: int) -> list[psutil.Process]:
    """Every process that has the job's number in its environment: Slurm knows them by their cgroup."""
    own, processes = os.getpid(), []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            env = process.environ()
            ours = env.get("SLURM_JOB_ID") == str(job) and env.get(_FOLDER) == os.environ[_FOLDER]
            if ours and process.pid != own and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def _of_steps(folder: Path) -> list[psutil.Process]:
    """What srun has started in the job."""
    return [p for p in _of_job(int(folder.name)) if "SLURM_STEP_NUM_TASKS" in p.environ()]


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def srun(arguments: list[str]) -> int:
    """Runs a command once a task, at the same time; the highest of the exit codes."""
    given, command = [], list(arguments)
    while command[0].startswith("--"):
        given.append(command.pop(0).removeprefix("--").partition("="))
    asked = {name: value for name, _, value in given}
    if set(asked) - {"ntasks"}:
        raise SystemExit(f"srun: unrecognized option in {sorted(asked)}")
    tasks = asked.get("ntasks", os.environ.get("SLURM_NTASKS", "1"))
    env = {**os.environ, "SLURM_STEP_NUM_TASKS": tasks}
    started = [subprocess.Popen(command, env=env) for _ in range(int(tasks))]
    return max(process.wait() for process in started)


def scancel(arguments: list[str]) -> int:
    """With --batch and --signal: to the batch script's own process."""
    *given, job = arguments
    if sorted(given) != ["--batch", "--signal=INT"]:
        raise SystemExit(f"scancel: expected --batch --signal=INT, found {given}")
    os.kill(int((Path(os.environ[_FOLDER]) / job / "batch").read_text()), signal.SIGINT)
    return 0


if __name__ == "__main__":
    programs = {"manage": manage, "sbatch": sbatch, "srun": srun, "scancel": scancel}
    sys.exit(programs[sys.argv[1]](sys.argv[2:]))
