"""The run folder over the deaths of its ServerApp: what is kept, what is refused, and what is said."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys

import pytest
from flwr.app import ArrayRecord, Context, RecordDict
from rich.console import Console

from fedveil import rng, strategies
from fedveil.client_app.app import app
from fedveil.config import parse
from fedveil.console.runs import per_site
from fedveil.console.runs import run_reader as runs_folder
from fedveil.console.runs.progress_bar import RunProgress
from fedveil.console.web.report import run_page
from fedveil.errors import ConfigError, StateError
from fedveil.records import atomic_files, audit_log, disclosure_ledger
from fedveil.server_app import app as server
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.round_attempt import RoundAttempt
from fedveil.server_app.rounds import RoundLoop
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.wire.capture import MessageCapture
from tests.server_app.grid import LocalGrid, use_toy_task

SITES = ["north", "east", "south"]
BASIC = {
    "run.name": "run", "run.rounds": 4, "run.deterministic": True, "run.seed": 9, "run.capture-messages": True,
    "cohort.wait-seconds": 1.0, "cohort.deadline-seconds": 1.0, "cohort.min-sites": 3, "method.params": "rho = 0.5",
}  # fmt: skip


class Killed(BaseException):
    """What no code catches, as no code catches SIGKILL."""


class Runs:
    """One run, which may die and go on."""

    def __init__(self, monkeypatch, tmp_path) -> None:
        self.task, self.patch, self.at = use_toy_task(monkeypatch), monkeypatch, tmp_path / "runs" / "run"

    def go(self, resume=False, **changes) -> MethodStrategy:
        config = parse(BASIC | {key.replace("__", "."): value for key, value in changes.items()})
        method = strategies.create_method(config.method.name, config.method.params)
        settings = RunSettings.from_config(config, "run")
        grid = LocalGrid(app, SITES, self.at.parent / "sites", config.flat())
        with RunFolder(self.at, resume) as folder:
            folder.config(config, method)
            ours = MethodStrategy(
                method, settings, folder=folder, scores=lambda s, r: {"server": {"loss": float(r)}}, spec=self.task.spec
            )
            ours.start(grid, ArrayRecord(dict(self.task.initial(rng.initial_stream(9, "weights")))), config.run.rounds)
            folder.status("completed", config.run.rounds - 1, config.run.rounds)
        return ours

    def killed(self, where, name, when, resume=False, before=False, **changes) -> None:
        """The process dies in `where.name` at the call for which `when` holds."""
        real = getattr(where, name)

        def dies(*arguments):
            if before and when(*arguments):
                raise Killed
            result = real(*arguments)
            if when(*arguments):
                raise Killed
            return result

        with self.patch.context() as patch:
            patch.setattr(where, name, dies)
            with pytest.raises(Killed):
                self.go(resume, **changes)

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.at / name).read_text().splitlines()]


@pytest.fixture
def runs(monkeypatch, tmp_path) -> Runs:
    return Runs(monkeypatch, tmp_path)


def at_the_third_reply_of_round_1():
    sites = set()

    def when(attempt, reply, ctx):
        sites.update([ctx.client] if ctx.round == 1 else [])
        return len(sites) == 3

    return when


OTHER = {
    "method": ({"method__name": "fedavg", "method__params": ""}, r"method.name: expected 'fedrand', found 'fedavg'"),
    "field": ({"method__params": "rho = 0.9"}, r"method.params.rho: expected 0.5, found 0.9"),
    "deterministic": ({"run__deterministic": False}, "run.deterministic: expected True, found False"),
    "seed": ({"run__seed": 8}, "run.seed: expected 9, found 8"),
    "train": ({"train__learning-rate": 0.1}, "train.learning-rate: expected 0.0003, found 0.1"),
    "task": ({"task__alpha": 0.1}, "task.alpha: expected 0.5, found 0.1"),
    "dp": ({"dp__clip_norm": 1.0}, "dp.clip-norm: expected 0.0, found 1.0"),
    "cohort": ({"cohort__max-weight-fraction": 1.0}, "cohort.max-weight-fraction: expected 0.5, found 1.0"),
    "aggregate": ({"aggregate__rule": "median"}, "aggregate.rule: expected 'mean', found 'median'"),
    "fewer rounds": ({"run__rounds": 3}, "run.rounds: expected 4, found 3"),
}


@pytest.mark.parametrize("what", OTHER)
def test_a_resume_with_another_run_s_config_is_refused_by_key_and_the_folder_keeps_its_own(runs, what):
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 0)
    before = (runs.at / "config.json").read_bytes(), (runs.at / "metrics.jsonl").read_bytes()
    changes, reason = OTHER[what]
    with pytest.raises(ConfigError, match=f"run.resume: .*{reason}"):
        runs.go(resume=True, **changes)
    assert before == ((runs.at / "config.json").read_bytes(), (runs.at / "metrics.jsonl").read_bytes())


def test_other_files_of_the_base_model_are_another_run(runs, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(bytes(3_000_000))
    model = {"task__model": str(base)}
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 0, **model)
    (base / "model.safetensors").write_bytes(bytes(2_999_999) + b"\1")
    with pytest.raises(ConfigError, match="base: expected '[0-9a-f]{16}', found '[0-9a-f]{16}'"):
        runs.go(resume=True, **model)
    (base / "model.safetensors").write_bytes(bytes(3_000_000))
    assert len(runs.go(resume=True, **model).history) == 3


@pytest.mark.long
def test_more_rounds_are_refused_at_a_resume_where_rates_are_over_all_rounds(runs):
    for rates in ({"train__lr_schedule": "linear"}, {"train__warmup_ratio": 0.5}):
        runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 0, **rates)
        with pytest.raises(ConfigError, match=r"run.resume: .*run.rounds: expected 4, found 5"):
            runs.go(resume=True, run__rounds=5, **rates)
        assert len(runs.go(resume=True, **rates).history) == 3
        shutil.rmtree(runs.at)


@pytest.mark.long
def test_what_may_change_at_a_resume_is_recorded_beside_the_config_of_the_start(runs):
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 1)
    before = (runs.at / "config.json").read_bytes()
    changes = {"run__rounds": 5, "cohort__wait-seconds": 2.0, "evaluate__every": 2, "method__params": "rho=0.5"}
    assert [record.round for record in runs.go(resume=True, **changes).history] == [2, 3, 4]
    assert (runs.at / "config.json").read_bytes() == before
    (line,) = runs.lines("resumes.jsonl")
    assert line["round"] == 2
    assert line["changes"] == {"cohort.wait-seconds": [1.0, 2.0], "evaluate.every": [1, 2], "run.rounds": [4, 5]}
    page = run_page.run_page_html([runs_folder.load_run(runs.at)])
    assert "run was resumed at round 3 on" in page
    assert "run.rounds: [4, 5]" in page
    (logged,) = [x for x in audit_log.read_log(runs.at.parent / audit_log.NAME) if x["event"] == "resumed"]
    assert logged["changes"] == line["changes"]


@pytest.mark.long
def test_what_has_left_a_site_stays_on_record_when_the_round_is_interrupted(runs):
    """Round 1 loses two uploads that had arrived; then all three of it, just before the checkpoint."""
    runs.killed(RoundAttempt, "judge_reply", at_the_third_reply_of_round_1(), before=True)
    texts_before = (runs.at / "disclosure.jsonl").read_text(), (runs.at / "tap" / "index.jsonl").read_text()
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 1, resume=True, before=True)
    runs.go(resume=True)
    assert (runs.at / "disclosure.jsonl").read_text().startswith(texts_before[0])
    left = [
        message
        for message in disclosure_ledger.read_messages(runs.at / "disclosure.jsonl")
        if message["direction"] == "up"
    ]
    kinds = [json.dumps(line["fields"]) for line in runs.lines("disclosure.jsonl") if "form" in line]
    assert len(kinds) == len(set(kinds)) == 3  # both factors, A, B: two resumes go on with them
    assert len(left) == 4 * 3 + 2 + 3
    run = runs_folder.load_run(runs.at)
    assert [(row["round"], "interrupted" in str(row["failed"]), row.get("void", False)) for row in run.attempts] == [
        (0, False, False), (1, True, True), (1, False, True), (1, False, False), (2, False, False), (3, False, False),
    ]  # fmt: skip
    assert (run.rounds_done, run.final) == (4, {"loss": 3.0})
    assert run.curve("loss") == [(0, -1.0), (1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert run.uploaded[-1] == (4, sum(line["bytes"] for line in left)) == (4, run.upload_bytes)
    north = next(site for site in per_site.records_by_site(run) if site.name == "north")
    assert (north.asked, north.accepted) == (6, 4)
    assert north.failures[0][1].startswith("interrupted: the server ended before the round did")
    seen = list(MessageCapture(runs.at / "tap").messages())
    assert (runs.at / "tap" / "index.jsonl").read_text().startswith(texts_before[1])
    assert len({message.file for message in seen}) == len(seen)
    assert len(seen) == 4 * 3 * 2  # the messages that came again were the same, byte for byte


def test_a_message_that_comes_again_in_another_form_is_kept_beside_the_first(tmp_path):
    tap = MessageCapture(tmp_path / "tap")
    for data in (b"first", b"first", b"other", b"first", b"other"):
        tap.write(data, 3, 0, "site-1", "up", accepted=True)
    assert [tap.read(seen) for seen in tap.messages()] == [b"first", b"other"]


def test_the_scores_before_round_0_are_recorded_once(runs, capsys):
    runs.killed(RoundLoop, "run_round", lambda rounds, grid, round_, *_: round_ == 0, before=True)
    runs.go(resume=True)
    rows = runs.lines("metrics.jsonl")
    assert [row["round"] for row in rows if not row.get("resumed")] == [-1, 0, 1, 2, 3]
    with RunProgress(Console(width=200), runs.at, "run", 4) as progress:
        progress.tick({"state": "running"})
    assert "round 4/4" in capsys.readouterr().out


HOLDER = """
import sys
from pathlib import Path
from fedveil.server_app.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.status("running", 0, 4)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_a_folder_has_one_serverapp_and_a_dead_one_is_told_from_a_living_one(runs):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(runs.at)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        with pytest.raises(StateError, match=f"another ServerApp uses it: process {other.pid} on .* since"):
            RunFolder(runs.at, resume=True)
        with pytest.raises(StateError, match="it already contains a run; choose another run.name, or set run.re"):
            RunFolder(runs.at)
        assert runs_folder.load_run(runs.at).status["state"] == "running"
        other.kill()
    with pytest.raises(StateError, match="before any site was contacted; remove the folder to use its name"):
        RunFolder(runs.at)
    (runs.at / "disclosure.jsonl").touch()
    with pytest.raises(StateError, match="a run; choose another run.name"):
        RunFolder(runs.at)
    (runs.at / "disclosure.jsonl").unlink()
    status = runs_folder.load_run(runs.at).status
    assert status["state"] == "died"
    assert "its ServerApp ended without a message: killed" in status["reason"]
    assert f"resume it: fedveil submit --federation FOLDER --config {runs.at}/resume.toml" in status["reason"]
    with RunFolder(runs.at, resume=True) as folder:
        assert folder.notes["before"].startswith("killed")


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.long
def test_a_damaged_checkpoint_sends_the_run_back_to_the_one_before_and_says_so(runs):
    whole = runs.go()
    weights = whole.history[-1].weights
    runs.at = runs.at.with_name("run-2")
    sites = runs.at.parent / "sites"
    sites.rename(sites.with_name("sites-1"))
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 2)
    damage(runs.at / "checkpoint.safetensors")
    again = runs.go(resume=True)
    assert [record.round for record in again.history] == [2, 3]
    assert again.history[-1].weights == weights
    (line,) = runs.lines("resumes.jsonl")
    assert line["checkpoint"].startswith("went back to the checkpoint before the last one: ")
    assert "checksum" in line["checkpoint"]
    assert (runs.at / "checkpoint-damaged.safetensors").exists()
    for name in ("checkpoint.safetensors", "checkpoint-before.safetensors"):
        damage(runs.at / name)
    with pytest.raises(StateError, match="nor can the one before it be read .*: start a new run"):
        runs.go(resume=True)


def test_a_crash_between_two_checkpoints_leaves_the_older_one(runs):
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 2)
    (runs.at / "checkpoint.safetensors").unlink()
    assert [record.round for record in runs.go(resume=True).history] == [2, 3]


def test_a_damaged_id_is_found_and_comes_back_from_the_checkpoint(runs):
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 1)
    good = (runs.at / "id").read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            (runs.at / "id").write_bytes(bytes(bad))
            with pytest.raises(StateError, match="the run's id is missing or damaged; resume the run"):
                _ = RunFolder.id.fget(type("", (), {"folder": runs.at})())
    assert [record.round for record in runs.go(resume=True).history] == [2, 3]
    assert (runs.at / "id").read_bytes() == good


def test_a_missing_id_beside_a_checkpoint_comes_back(runs):
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 1)
    good = (runs.at / "id").read_bytes()
    (runs.at / "id").unlink()
    assert [record.round for record in runs.go(resume=True).history] == [2, 3]
    assert (runs.at / "id").read_bytes() == good


def test_a_lost_checkpoint_is_not_taken_for_a_run_that_asked_no_site(runs):
    """Before, such a run began again at round 0: rounds twice in its records, and sites charged twice."""
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 1)
    checkpoint = (runs.at / "checkpoint.safetensors").read_bytes()
    for name in ("checkpoint.safetensors", "checkpoint-before.safetensors"):
        (runs.at / name).unlink()
    before = {file.name: file.read_bytes() for file in runs.at.iterdir() if file.is_file()}
    words = "is missing in .*, although sites took part up to round 2 .*restore it from a backup, or start a new run"
    for _ in range(2):
        with pytest.raises(StateError, match=words):
            runs.go(resume=True)
    assert {file.name: file.read_bytes() for file in runs.at.iterdir() if file.is_file()} == before
    (runs.at / "checkpoint.safetensors").write_bytes(checkpoint)
    assert [record.round for record in runs.go(resume=True).history] == [2, 3]


def test_a_run_that_died_before_its_first_record_leaves_a_line_at_its_resume(runs):
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == -1, before=True)
    assert not (runs.at / "disclosure.jsonl").exists()
    assert [record.round for record in runs.go(resume=True).history] == [0, 1, 2, 3]
    (line,) = runs.lines("resumes.jsonl")
    assert line["round"] == 0
    assert [entry["event"] for entry in audit_log.read_log(runs.at.parent / audit_log.NAME)].count("resumed") == 1


def test_a_torn_last_line_is_cut_off_and_kept_in_the_note_and_one_in_the_middle_is_named(runs):
    runs.killed(RunFolder, "checkpoint", lambda folder, state, loop: loop["round"] == 1)
    for name in ("metrics.jsonl", "disclosure.jsonl"):
        with (runs.at / name).open("a") as file:
            file.write('{"round": 2, "att')
    runs.go(resume=True)
    (line,) = runs.lines("resumes.jsonl")
    assert line["torn"] == dict.fromkeys(("metrics.jsonl", "disclosure.jsonl"), '{"round": 2, "att')
    assert runs_folder.load_run(runs.at).rounds_done == 4
    whole = (runs.at / "disclosure.jsonl").read_text()
    (runs.at / "disclosure.jsonl").write_text(whole.replace('"round": 1', '"rou', 1))
    line_number = [line.get("round", 0) for line in map(json.loads, whole.splitlines())].index(1) + 1
    with pytest.raises(
        StateError, match=f"disclosure.jsonl, line {line_number}: this is neither a message nor a kind of"
    ):
        runs.go(resume=True)


class Named(LocalGrid):
    @property
    def run(self):
        return type("Run", (), {"fab_hash": "5f"})()


def started(runs, **changes):
    """main() itself."""
    config = BASIC | {"run.dir": str(runs.at.parent)} | changes
    flat = parse(config).flat()
    grid = Named(app, SITES, runs.at.parent / "sites", flat)
    server.main(grid, Context(7, 1, {}, RecordDict(), flat))


def test_a_full_disk_is_in_the_status_all_the_same(runs, monkeypatch):
    """The disk is full from the first checkpoint on, but for what the run folder had reserved."""
    real, append, full = atomic_files.write_atomic, audit_log.append_entry, []

    def write(path, data, keep=None):
        if path.name == "checkpoint.safetensors" and (runs.at / "metrics.jsonl").exists():
            full.append("now")
        if full and (runs.at / ".reserve").exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, data, keep)

    def no_log(*arguments):
        if full:
            raise StateError("audit log: no space")
        return append(*arguments)

    for module in ("fedveil.records.atomic_files", "fedveil.records.tensor_state"):
        monkeypatch.setattr(f"{module}.write_atomic", write)
    monkeypatch.setattr(audit_log, "append_entry", no_log)
    with pytest.raises(OSError, match="No space left"):
        started(runs)
    status = json.loads((runs.at / "status.json").read_text())
    assert status["state"] == "failed"
    assert "No space left on device" in status["reason"]
    assert "the server's disk is full: free some disk space" in status["reason"]
    assert f"resume it: fedveil submit --federation FOLDER --config {runs.at}/resume.toml" in status["reason"]


def test_a_run_says_that_it_runs_before_its_number_is_known_to_those_who_wait(runs, monkeypatch):
    seen = []
    monkeypatch.setattr(RunFolder, "flower_run", lambda folder, run: seen.append(runs_folder.load_run(runs.at).status))
    started(runs)
    assert seen[0]["state"] == "running"
    assert "ended" not in seen[0]
    assert runs_folder.load_run(runs.at).status["ended"] >= runs_folder.load_run(runs.at).config["started"]
    assert {"pid", "memory_mb", "peak_mb", "limit_mb", "oom_kills", "boot"} <= set(seen[0]["process"])
