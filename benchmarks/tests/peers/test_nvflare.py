"""NVFlare: its environment or the message that it is missing, its description, and the output of its job."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.tests.peers.test_e2e import SETTINGS, done, said_of
from fedveil.console.flower import local_deployment
from fedveil.errors import ConfigError
from fedveil_bench import folders
from fedveil_bench import runner as presets
from fedveil_bench.peers import e2e, environments, nvflare, shared
from fedveil_bench.peers.costs import COSTS, PeerRun
from fedveil_bench.runner import BenchOptions
from tests.conftest import ROOT

PINS = environments.parse_pins((folders.find_folder(nvflare.JOB) / "requirements.txt").read_text())
NAMES = [f"layer.lora_{part}.weight" for part in "AB"]


def pretend_python(folder, script):
    """An "environment" whose python3 is a shell script."""
    program = folder / "bin" / "python3"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {nvflare.VARIABLE: str(program.with_name("python")), "PATH": os.environ["PATH"]}


def says(versions):
    return f"echo 'a warning first'; echo '{json.dumps(versions)}'"


def notes(rounds, uploads):
    return json.dumps({"seconds": [1.5] * rounds, "seen": [NAMES] * uploads})


@pytest.mark.parametrize("variables", [{}, {nvflare.VARIABLE: ""}])
def test_without_the_variable_the_row_is_left_out_in_words(variables):
    found = environments.find_environment(nvflare.PEER, variables)
    assert found.python is None
    assert re.search(
        r"NVFlare FedAvg is left out: FEDVEIL_NVFLARE_PYTHON: .*found no such variable; .*README", found.said
    )


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo \"ModuleNotFoundError: No module named 'nvflare'\" >&2; exit 1", "No module named 'nvflare'"),
        ('echo "ImportError: cannot import name x ($0)" >&2; exit 1', "cannot import name x ..."),
        ("exit 3", "no output"),
        (None, "none that runs next to that path (FileNotFoundError)"),
    ],
)
def test_an_environment_without_nvflare_is_none_and_the_sentence_names_no_path(tmp_path, script, why):
    variables = {nvflare.VARIABLE: str(tmp_path / "python")} if script is None else pretend_python(tmp_path, script)
    found = environments.find_environment(nvflare.PEER, variables)
    assert found.python is None
    assert why in found.said
    assert str(tmp_path) not in found.said


def test_an_environment_of_the_pinned_versions_is_taken_without_a_word(tmp_path):
    found = environments.find_environment(
        nvflare.PEER, pretend_python(tmp_path, says(PINS | {"torch": f"{PINS['torch']}+cpu"}))
    )
    assert found == environments.PeerEnvironment(tmp_path / "bin" / "python3", "")


def test_other_versions_are_told(tmp_path):
    found = environments.find_environment(nvflare.PEER, pretend_python(tmp_path, says(PINS | {"peft": "0.1"})))
    assert found.python is not None
    assert found.said.endswith(f"than those in requirements.txt: peft 0.1 in place of {PINS['peft']}")


def test_the_pins_are_those_of_the_lock_where_both_sides_have_a_package():
    lock = {}
    for name in ("cpu.txt", "run.txt"):
        text = (ROOT / "lock" / name).read_text()
        lock |= {found[1]: found[2].partition("+")[0] for found in re.finditer(r"(?m)^([\w-]+)==(\S+)", text)}
    assert PINS.pop("nvflare") == "2.9.0"
    assert {name: lock[name] for name in PINS} == PINS
    assert {"torch", "transformers", "peft"} <= set(PINS)


def test_what_comes_along_with_a_package_is_pinned_too():
    pinned = environments.parse_pins((folders.find_folder(nvflare.JOB) / "constraints.txt").read_text())
    assert PINS.items() <= pinned.items()
    assert {"grpcio", "cryptography", "protobuf"} <= set(pinned)


@pytest.mark.parametrize("line", ["torch", "torch>=2.13"])
def test_a_requirement_without_a_pin_is_refused(line):
    assert environments.parse_pins("# words\n\npeft==1.0\n") == {"peft": "1.0"}
    with pytest.raises(ConfigError, match=r"requirements.txt: expected NAME==VERSION in each line, found 'torch"):
        environments.parse_pins(f"peft==1.0\n{line}\n")


def test_sites_reach_the_server_through_the_relay_over_grpc():
    found = json.loads(nvflare.build_project(4000, 5000, 2))
    server, *sites, user = found["participants"]
    assert (server["fed_learn_port"], server["admin_port"]) == (4000, 4000)
    assert [site["name"] for site in sites] == ["site-0", "site-1"]
    assert all(site["connect_to"]["port"] == 5000 for site in sites)
    assert "connect_to" not in user
    schemes = [builder["args"].get("scheme") for builder in found["builders"]]
    assert [scheme for scheme in schemes if scheme] == ["grpc"]


def test_its_jobs_and_snapshots_lie_in_the_federation_s_folder_and_not_where_a_killed_one_left_its_own(tmp_path):
    template = json.dumps({"snapshots": "/tmp/nvflare/snapshot-storage", "jobs": "/tmp/nvflare/jobs-storage"})
    found = json.loads(nvflare.redirect_stores(template, tmp_path))
    assert found == {"snapshots": f"{tmp_path}/snapshot-storage", "jobs": f"{tmp_path}/jobs-storage"}
    with pytest.raises(ConfigError, match=r"resources\.json\.default: expected /tmp/nvflare/ for jobs and for snap"):
        nvflare.redirect_stores(template.replace("/tmp/nvflare/jobs", "/var/jobs"), tmp_path)


def test_its_processes_find_their_own_python_first_and_nothing_of_fedveil_s(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "fedveil's")
    monkeypatch.setenv("FLWR_HOME", "flower's")
    found = nvflare.variables_of(tmp_path / "bin" / "python3", tmp_path / "home", 3)
    assert found["PATH"].split(os.pathsep)[0] == str(tmp_path / "bin")
    assert (found["HOME"], found["OMP_NUM_THREADS"]) == (str(tmp_path / "home"), "3")
    assert not {"PYTHONPATH", "FLWR_HOME"} & set(found)


def test_how_a_job_ended_is_the_last_line():
    assert nvflare.parse_job_status("Connecting ...\nab-1 FINISHED:COMPLETED\n\n") == ("ab-1", "FINISHED:COMPLETED")
    for said in ("", "ab-1 RUNNING"):
        with pytest.raises(ConfigError, match=r"expected the job's id and how it finished, found"):
            nvflare.parse_job_status(said)


def test_the_server_s_notes_must_be_of_every_round_and_upload():
    assert nvflare.parse_notes(notes(3, 6), 3, 2) == ([1.5] * 3, ["A and B"] * 6)
    for rounds, uploads in ((2, 6), (3, 5)):
        with pytest.raises(
            ConfigError, match=rf"expected 3 rounds and 6 uploads, found {rounds} and {uploads}; a site"
        ):
            nvflare.parse_notes(notes(rounds, uploads), 3, 2)


def test_the_server_s_model_has_the_factors_under_their_names(tmp_path):
    spec = importlib.util.spec_from_file_location("factors", folders.find_folder(nvflare.JOB) / "factors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors = {f"base.h.{layer}.{name}": torch.randn(2, 3) for layer in (0, 1) for name in NAMES}
    save_file(tensors, tmp_path / "initial.safetensors")
    state = module.Factors(str(tmp_path / "initial.safetensors")).state_dict()
    assert set(state) == set(tensors)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


class Failing:
    """Processes of which none starts."""

    def __init__(self, logs):
        self.stopped = False

    def call(self, *args):
        raise ConfigError("nothing starts")

    def stop(self):
        self.stopped = True


def test_where_a_part_does_not_start_all_is_ended(tmp_path):
    launch = SimpleNamespace(ProcessGroup=Failing, count_cores=lambda: 2, free_ports=lambda n: [4000])
    federation = nvflare.NVFlareFederation(launch, tmp_path / "python3", 2, tmp_path / "new")
    with pytest.raises(ConfigError, match="nothing starts"), federation:
        pytest.fail("it has started")
    assert federation.processes.stopped
    assert federation.relay._listener.fileno() == -1


class Pretended:
    """A federation whose job leaves what it began with."""

    status = "FINISHED:COMPLETED"

    def __init__(self, launch, python, sites, folder):
        self.relay, self.processes = SimpleNamespace(up=0, down=0), SimpleNamespace(alive=lambda name: [])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def export(self, task, out, rounds):
        self.task = task
        (out / "server.json").write_text(notes(rounds, 2 * rounds))
        return out

    def admin(self, what, *more, timeout):
        if what == "run":
            self.relay.up, self.relay.down = 3_000_000, 4_000_000
            return f"ab-1 {self.status}\n"
        shutil.copy(self.task / "initial.safetensors", more[1] / "weights.safetensors")
        return ""

    def tails(self):
        return "the log ends"


@pytest.mark.long
def test_a_run_is_scored_by_what_its_job_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(nvflare, "NVFlareFederation", Pretended)
    config = SETTINGS["config"] | {"evaluate.eval-examples": 4}
    settings = SETTINGS | {"data": "e2e", "sites": 2, "config": config}
    task = shared.SharedInputs(settings, 0, BenchOptions(device="cpu"))
    found = nvflare.run_federation(task, settings, tmp_path, BenchOptions(device="cpu"), tmp_path)
    assert found.scores["loss"] == pytest.approx(task.initial_loss)
    assert (found.scores["MB up"], found.scores["MB down"], found.scores["s a round"]) == (3.0, 4.0, 1.5)
    assert found.seen == ["A and B"] * 6


def test_a_job_that_did_not_complete_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(nvflare, "NVFlareFederation", Pretended)
    monkeypatch.setattr(Pretended, "status", "FINISHED:EXECUTION_EXCEPTION")
    task = SimpleNamespace(write=lambda folder: folder.mkdir())
    with pytest.raises(
        ConfigError, match=r"expected a completed run, found: FINISHED:EXECUTION_EXCEPTION; the log ends"
    ):
        nvflare.run_federation(task, SETTINGS, tmp_path, BenchOptions(), tmp_path)


def test_the_table_has_the_row_its_costs_and_its_claims():
    runs = done(5)
    runs[nvflare.NVFLARE] = runs[e2e.FLOWER]
    found = e2e.build_outcome(runs, SETTINGS)
    assert [row["name"] for row in found.rows][-1] == nvflare.NVFLARE
    assert "equal (within 0.02): holds here." in said_of(found, "loss of FedVeil FedAvg less that of NVFlare FedAvg")
    assert said_of(found, "s a round: FedVeil FedAvg", nvflare.NVFLARE).endswith("FedVeil is ahead.")
    assert said_of(found, "s a round: FedVeil FedAvg", e2e.FLOWER).endswith("FedVeil is ahead.")


def test_without_the_environment_the_row_is_left_out_and_terminal_and_table_say_so(monkeypatch):
    monkeypatch.delenv(nvflare.VARIABLE, raising=False)
    figures = {"loss": 2.0, **dict.fromkeys(COSTS, 1.0)}
    for side in ("_ours", "_stock"):
        monkeypatch.setattr(e2e, side, lambda *args: PeerRun(figures, ["A and B"]))
    monkeypatch.setattr(shared.SharedInputs, "initial_loss", 3.0)
    said = []
    found = e2e.run_benchmark(SETTINGS | {"data": "e2e"}, BenchOptions(launch=object(), say=said.append))
    assert nvflare.NVFLARE not in [row["name"] for row in found.rows]
    assert said[0].startswith("NVFlare FedAvg is left out: ")
    assert [text for text in found.verdicts if nvflare.NVFLARE in text] == [f"{said[0]}."]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_smallest_form_runs_and_ends_where_flower_does():
    """Both peers have the same training, order of rows and weights of the mean."""
    environment = environments.find_environment(nvflare.PEER, os.environ)
    if environment.python is None:
        pytest.skip(environment.said)
    config = SETTINGS["config"] | {"run.rounds": 2, "train.max-steps": 2, "task.examples-per-site": 16}
    config |= {"evaluate.eval-examples": 4}
    settings = SETTINGS | {"data": "e2e", "config": config, "methods": {}, "claims": []}
    found = e2e.run_benchmark(settings, BenchOptions(launch=local_deployment, device="cpu"))
    rows = {row["name"]: row for row in found.rows}
    losses = {name: row["metrics"]["loss"]["mean"] for name, row in rows.items()}
    assert losses[nvflare.NVFLARE] == pytest.approx(losses[e2e.FLOWER], abs=1e-4)
    assert losses[nvflare.NVFLARE] < losses[e2e.BEFORE]
    assert rows[nvflare.NVFLARE]["server_sees"] == {"A and B": 4}
    assert all(rows[nvflare.NVFLARE]["metrics"][cost]["mean"] > 0 for cost in COSTS)


def test_the_preset_claims_nothing_of_a_peer_that_is_not_one():
    claims = presets.read_preset("peers/e2e", "full")["settings"]["claims"]
    known = {*SETTINGS["methods"], *e2e.PEERS, e2e.BEFORE}
    assert {name for claim in claims for name in (claim["row"], claim["than"])} == known
