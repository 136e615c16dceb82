"""Turns through the worker: who gets which one, and that a warm turn is that of a fresh process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fedveil.client_app.worker import connection, registry
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.config import parse
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.param_spec import ParamSpec
from fedveil.encrypted_files import is_sealed, make_key
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.fedrand import FedRand
from tests.client_app.worker.bench import HERE, gone, until
from tests.conftest import ROOT


@pytest.mark.long
def test_a_warm_turn_is_the_turn_of_a_fresh_process_bit_for_bit_and_loads_nothing(bench, tmp_path):
    bench.orders(load=0.5)
    warm, files = [], []
    for round_ in range(3):
        cold = bench.assignment(round_)
        cold = replace(cold, site=cold.site.model_copy(update={"state_dir": tmp_path / "cold"}))
        for content in (cold.to_json().encode(), bench.message(round_)):
            files.append(tmp_path / f"file{len(files)}")
            files[-1].write_bytes(content)
        warm.append(bench.turn(round_))
    code = (
        "import sys; from pathlib import Path; from fedveil.client_app.instruction import ClientAssignment;"
        "from client_app import app;"
        "texts = [Path(p).read_text() for p in sys.argv[2::2]];"
        "messages = [Path(p).read_bytes() for p in sys.argv[3::2]];"
        "[Path(sys.argv[1], str(i)).write_bytes(b''.join(app._in_this_process(iter([m]), "
        "ClientAssignment.from_json(t))))"
        " for i, (t, m) in enumerate(zip(texts, messages))]"
    )
    (tmp_path / "out").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(bench.app)}
    subprocess.run([sys.executable, "-P", "-c", code, tmp_path / "out", *files], env=environment, check=True)
    assert warm == [(tmp_path / "out" / str(i)).read_bytes() for i in range(3)]
    assert bench.private() == bench.file(state=tmp_path / "cold").read_bytes()
    first, *later = bench.lines()
    assert first["load_seconds"] > 0.5
    assert first["device"] == "cpu"
    assert all(line["load_seconds"] < 0.1 and line["pid"] == first["pid"] for line in later)


@pytest.mark.long
def test_rows_that_changed_on_disk_are_read_anew(bench):
    bench.turn(0)
    bench.orders(steps=7)
    upload = bench.turn(1)
    assert (
        MessageExchange(FedRand(rho=0.0), "fedrand", spec_of(1000))
        .receive(upload, 1, MessageAddress("first", 0, "north"))
        .report["steps"]
        == 7
    )
    assert len({line["pid"] for line in bench.lines()}) == 1


def spec_of(entries: int):
    return {"h.lora_A": ParamSpec((1, 5)), "h.lora_B": ParamSpec((entries, 1))}


@pytest.mark.long
def test_socket_and_files_are_the_site_s_own(bench):
    bench.turn()
    assert {p.stat().st_mode & 0o777 for p in bench.folder.path.iterdir()} == {0o600}
    assert bench.folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
def test_a_path_longer_than_a_socket_address_works(bench, tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 60)
    bench.folder = WorkerRegistry(deep, "north")
    assert bench.turn(state_dir=deep)
    assert len(str(bench.folder.socket("0" * 8))) > 108


@pytest.mark.long
def test_two_runs_at_once_get_a_worker_each_and_do_not_meet(bench):
    ends = {}
    threads = [threading.Thread(target=lambda r=r: ends.update({r: bench.turn(run=r)})) for r in ("first", "second")]
    bench.orders(pause=0.2)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends["first"]) == len(ends["second"])
    assert len({card.key for card in bench.workers()}) == len({card.pid for card in bench.workers()}) == 2
    assert bench.private("first") == bench.private("second")  # the same draws, each in its own place


@pytest.mark.long
def test_under_a_memory_bound_an_idle_worker_of_another_run_ends_first(bench):
    bench.turn(run="first", worker_memory_mb=4000)
    (first,) = bench.workers()
    bench.turn(run="second", worker_memory_mb=4000)
    (second,) = bench.workers()
    assert first.key != second.key
    assert until(lambda: gone(first.pid))


@pytest.mark.long
def test_another_app_version_gets_another_worker(bench, tmp_path):
    bench.turn(0)
    newer = tmp_path / "newer"
    shutil.copytree(bench.app, newer)
    (newer / "fedveil" / "later.py").write_text("# a later version\n")
    bench.turn(1, app=newer)
    assert len({card.app for card in bench.workers()}) == 2


def test_a_changed_base_gets_another_worker(bench, tmp_path):
    assignment = bench.assignment()
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"1")
    config = parse(assignment.config.flat() | {"task.model": str(base)})
    before = registry.run_key(replace(assignment, config=config), bench.app)
    assert before == registry.run_key(replace(assignment, config=config), bench.app)
    (base / "model.safetensors").write_bytes(b"22")
    assert before != registry.run_key(replace(assignment, config=config), bench.app)
    assert before != registry.run_key(replace(assignment, order=replace(assignment.order, run="other"), config=config))


@pytest.mark.long
def test_a_spare_of_the_same_app_is_taken_by_the_first_run(bench):
    with bench.folder.locked():
        spare = bench.folder.start(bench.site, HERE, "", bench.app)
        other = bench.folder.start(bench.site, HERE, "", ROOT)  # of another version
    bench.turn(0)
    bench.turn(0, run="second")
    pids = [line["pid"] for line in bench.lines()]
    assert pids[0] == spare.pid
    assert pids[1] not in (spare.pid, other.pid)


@pytest.mark.long
def test_after_its_run_s_last_round_a_worker_holds_nothing_of_it_and_the_next_run_takes_it(bench):
    bench.orders(load=0.3)
    bench.turn(4)  # the last of 5
    (card,) = bench.workers()
    assert card.key == ""
    with bench.folder.connect(card).open_channel() as channel:
        worker_status = json.loads(channel.unary_unary("/fedveil.Worker/Status")(b""))
    assert worker_status["state"] == "spare"
    assert "run" not in worker_status
    bench.turn(0, run="second")
    first, second = bench.lines()
    assert first["pid"] == second["pid"]
    assert second["load_seconds"] > 0.3
    assert [c.key != "" for c in bench.workers()] == [True]


@pytest.mark.long
def test_a_worker_seals_under_the_sites_key_which_no_argument_or_environment_has(bench, tmp_path):
    seal = make_key(tmp_path / "state.key")
    for round_ in range(2):
        bench.turn(round_, key_file=str(tmp_path / "state.key"))
    assert is_sealed(bench.file())
    processes = [psutil.Process(card.pid) for card in bench.workers()]
    assert processes
    for one in processes:
        process_strings = [*one.cmdline(), *one.environ().values()]
        assert not [text for text in process_strings if "state.key" in text or seal.key.hex() in text]
        assert seal.key not in Path(f"/proc/{one.pid}/environ").read_bytes()
    with pytest.raises(connection.ClientRoundError, match="encrypted, but no key file is set"):
        bench.turn(2)
