"""The worker as a real process: gRPC on its socket, and a toy task (tests/server_app/toy_task.py) in a copied app."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
import torch

from fedveil import rng
from fedveil.client_app import app as client
from fedveil.client_app.site.assignment import Assignment, Order
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.worker import cards, link
from fedveil.client_app.worker.cards import Folder
from fedveil.client_app.worker.owner import Owner
from fedveil.config import parse
from fedveil.contract.address import Address
from fedveil.contract.method import RoundContext
from fedveil.contract.spec import TensorSpec
from fedveil.contract.task import Step
from fedveil.errors import ConfigError, WorkerError
from fedveil.federation.exchange import Exchange
from fedveil.records import process
from fedveil.sealed import is_sealed, new_key
from fedveil.strategies.fedrand import FedRand
from fedveil.wire import header
from fedveil.wire.slices import sliced
from tests.conftest import ROOT
from tests.memory_group import memory_group

HERE = Owner.of(os.getpid())


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Path:
    """A copy of the app with the toy task in it: a task is found by its file name."""
    root = tmp_path_factory.mktemp("app")
    shutil.copy(ROOT / "pyproject.toml", root)  # by which fedveil/__init__.py knows a bundle
    for package in ("client_app", "fedveil", "strategies"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    shutil.copy(ROOT / "tests" / "server_app" / "toy_task.py", root / "fedveil" / "tasks" / "toy.py")
    return root


class Bench:
    """One site with its data and state folders. Every worker of it is dead after the test."""

    def __init__(self, tmp_path: Path, app: Path) -> None:
        self.app, self.data, self.state = app, tmp_path / "data", tmp_path / "state"
        self.data.mkdir()
        self.site = Site(site="north", data=str(self.data), state_dir=self.state, device="cpu")
        self.folder = Folder(self.state, "north")
        self.seconds = 600.0
        self.last: dict[str, str] = {}  # by run: the turn that the server's state has
        self.orders()

    def orders(self, **orders) -> None:
        (self.data / "orders.json").write_text(json.dumps(orders))

    def assignment(self, round_=0, run="first", **site) -> Assignment:
        method = json.dumps({"rho": 0.0})
        config = {"run.deterministic": True, "task.name": "toy", "task.model": "toy-base", "method.name": "fedrand"}
        config |= {"task.data": str(self.data)}
        order = Order(round_, round_ == 0, "north", run, "fedrand", method, last=self.last.get(run, ""))
        order = replace(order, seconds=self.seconds)
        return Assignment(order, parse(config), self.site.model_copy(update=site))

    def message(self, round_=0, run="first") -> bytes:
        entries = json.loads((self.data / "orders.json").read_text()).get("entries", 1000)
        spec = {"h.lora_A": TensorSpec((1, 5)), "h.lora_B": TensorSpec((entries, 1))}
        exchange = Exchange(FedRand(rho=0.0), "fedrand", spec)
        state = exchange.method.init(spec, {n: torch.ones(t.shape) for n, t in spec.items()}, rng.initial(0, "weights"))
        address = Address(run, 0, "north")
        return exchange.broadcast(state, RoundContext(round_, "north", round_ == 0, b"s" * 32, address=address))

    def turn(self, round_=0, run="first", owner=HERE, app=None, **site) -> bytes:
        """A whole turn through the worker."""
        slices = sliced([self.message(round_, run)])
        upload = b"".join(link.take_part(slices, self.assignment(round_, run, **site), owner, app or self.app))
        self.last[run] = header.of_slices([upload])["turn"]
        return upload

    def workers(self) -> list[cards.Card]:
        with self.folder.locked():
            return self.folder.living()

    def private(self, run="first") -> bytes | None:
        """The state of the last turn whose upload came."""
        return self.file(run).read_bytes() if run in self.last else None

    def file(self, run="first", state: Path | None = None) -> Path:
        return (state or self.state) / run / "north" / f"turn-{self.last[run]}.safetensors"

    def lines(self) -> list[dict]:
        """The whole turns."""
        return [line for line in self.ends() if "failed" not in line]

    def ends(self) -> list[dict]:
        return [json.loads(line) for line in self.folder.turns.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path, app):
    bench = Bench(tmp_path, app)
    yield bench
    kill(bench)


def kill(bench: Bench) -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if str(bench.folder.path) in child.cmdline():
                child.kill()
                child.wait()


def until(condition, seconds=30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def unbroken(tmp_path, app, rounds=1, **orders) -> Bench:
    """What the turns give where nothing goes wrong."""
    tmp_path.mkdir()
    other = Bench(tmp_path, app)
    other.orders(**orders)
    other.uploads = [other.turn(r) for r in range(rounds)]
    kill(other)
    return other


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


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
        "import sys; from pathlib import Path; from fedveil.client_app.site.assignment import Assignment;"
        "from client_app import app;"
        "texts = [Path(p).read_text() for p in sys.argv[2::2]];"
        "messages = [Path(p).read_bytes() for p in sys.argv[3::2]];"
        "[Path(sys.argv[1], str(i)).write_bytes(b''.join(app._in_this_process(iter([m]), Assignment.from_json(t))))"
        " for i, (t, m) in enumerate(zip(texts, messages))]"
    )
    (tmp_path / "out").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(bench.app)}
    subprocess.run([sys.executable, "-P", "-c", code, tmp_path / "out", *files], env=environment, check=True)
    assert warm == [(tmp_path / "out" / str(i)).read_bytes() for i in range(3)]
    assert bench.private() == bench.file(state=tmp_path / "cold").read_bytes()
    first, *later = bench.lines()
    assert first["load_seconds"] > 0.5
    assert all(line["load_seconds"] < 0.1 and line["pid"] == first["pid"] for line in later)


@pytest.mark.long
def test_rows_that_changed_on_disk_are_read_anew(bench):
    bench.turn(0)
    bench.orders(steps=7)
    upload = bench.turn(1)
    assert (
        Exchange(FedRand(rho=0.0), "fedrand", spec_of(1000))
        .receive(upload, 1, Address("first", 0, "north"))
        .report["steps"]
        == 7
    )
    assert len({line["pid"] for line in bench.lines()}) == 1


def spec_of(entries: int):
    return {"h.lora_A": TensorSpec((1, 5)), "h.lora_B": TensorSpec((entries, 1))}


@pytest.mark.long
def test_socket_and_files_are_the_site_s_own(bench):
    bench.turn()
    assert {p.stat().st_mode & 0o777 for p in bench.folder.path.iterdir()} == {0o600}
    assert bench.folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
def test_a_path_longer_than_a_socket_address_works(bench, tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 60)
    bench.folder = Folder(deep, "north")
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
    before = link.run_key(replace(assignment, config=config), bench.app)
    assert before == link.run_key(replace(assignment, config=config), bench.app)
    (base / "model.safetensors").write_bytes(b"22")
    assert before != link.run_key(replace(assignment, config=config), bench.app)
    assert before != link.run_key(replace(assignment, order=replace(assignment.order, run="other"), config=config))


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
    with link.channel(bench.folder, card) as channel:
        shown = json.loads(channel.unary_unary("/fedveil.Worker/Status")(b""))
    assert shown["state"] == "spare"
    assert "run" not in shown
    bench.turn(0, run="second")
    first, second = bench.lines()
    assert first["pid"] == second["pid"]
    assert second["load_seconds"] > 0.3
    assert [c.key != "" for c in bench.workers()] == [True]


def grouped_python(tmp_path: Path, group: Path) -> str:
    """A python in a memory cgroup."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def shell_python(tmp_path: Path, deaths: int) -> str:
    """A python that kills itself at its first starts."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nn=$(ls {tmp_path}/start-* 2>/dev/null | wc -l)\nif [ "$n" -lt {deaths} ]; then\n'
        f'  touch {tmp_path}/start-$n; kill -9 $$\nfi\nexec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.long
def test_killed_at_start_one_more_is_started(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shell_python(tmp_path, 1))
    assert bench.turn()


def test_killed_at_start_twice_is_an_error_that_names_the_log(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shell_python(tmp_path, 2))
    with pytest.raises(
        WorkerError, match="expected it to start, found that it ended with exit code -9; see .*worker.log"
    ):
        bench.turn()
    assert bench.workers() == []


def test_killed_for_memory_before_it_listens_the_server_is_told_too(bench, tmp_path, monkeypatch):
    with memory_group(10) as group:
        monkeypatch.setattr(sys, "executable", grouped_python(tmp_path, group))
        monkeypatch.setattr(process, "_group", lambda: group)  # that of this process, as in a container
        with pytest.raises(cards.DiedError, match="exit code -9, out of memory; give the site more memory") as error:
            bench.turn()
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: out of memory"


@pytest.mark.long
def test_killed_in_training_the_turn_is_repeated_once_and_ends_as_if_unbroken(bench, tmp_path):
    whole = unbroken(tmp_path / "whole", bench.app, rounds=2)
    uploads = [bench.turn(0)]
    bench.orders(deaths=1)
    uploads.append(bench.turn(1))
    assert (bench.data / "died-0").exists()
    assert uploads == whole.uploads
    assert bench.private() == whole.private()


@pytest.mark.long
def test_killed_in_training_twice_is_an_error_and_the_private_state_stays(bench):
    bench.turn(0)
    before = bench.private()
    bench.orders(deaths=2)
    gone = r"expected an upload, found it gone after .* \(UNAVAILABLE\): SIGKILL: killed, .* MB when it last wrote; its"
    with pytest.raises(cards.DiedError, match=gone) as error:
        bench.turn(1)
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: killed or crashed"
    assert [line["round"] for line in bench.ends() if re.search(gone, line.get("failed", ""))] == [1, 1]
    assert bench.private() == before
    assert bench.workers() == []
    bench.orders()
    assert bench.turn(1)


@pytest.mark.long
def test_killed_for_memory_by_the_kernel_the_site_is_told_what_to_lower_and_the_server_no_figure(
    bench, tmp_path, monkeypatch
):
    bench.orders(hold_mb=3000)
    with memory_group(800) as group:
        monkeypatch.setattr(sys, "executable", grouped_python(tmp_path, group))
        with pytest.raises(cards.DiedError) as error:
            bench.turn(0)
    said = (
        r"SIGKILL: killed by the kernel for want of memory: \d+ of (799|800) MB when it last wrote; .* train.batch-size"
    )
    assert re.search(said, str(error.value)), error.value
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: out of memory"
    assert [bool(re.search(said, line["failed"])) for line in bench.ends()] == [True, True]


@pytest.mark.long
def test_a_worker_that_nobody_here_started_is_judged_by_what_it_noted(bench, monkeypatch):
    """It was started by an earlier client process, so its exit signal is not for this one."""
    bench.turn(0)
    bench.orders(deaths=2)
    much = process.noted() | {"peak_mb": 980, "limit_mb": 1000}
    monkeypatch.setattr(Folder, "noted", lambda self, worker: much)
    monkeypatch.setattr(link, "_exit_code", lambda pid: None)
    with pytest.raises(cards.DiedError, match="killed, probably for want of memory: 980 of 1000 MB") as error:
        bench.turn(1)
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: probably out of memory"
    assert link._exit_code(os.getppid()) is None


@pytest.mark.long
def test_a_crash_is_not_taken_for_want_of_memory(bench, monkeypatch):
    bench.turn(0)
    bench.orders(deaths=2, die_by="SIGSEGV")
    monkeypatch.setattr(Folder, "noted", lambda self, worker: process.noted() | {"peak_mb": 980, "limit_mb": 1000})
    with pytest.raises(cards.DiedError, match="SIGSEGV: it was not killed for want of memory") as error:
        bench.turn(1)
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: killed or crashed"


@pytest.mark.long
def test_a_worker_s_memory_stands_beside_its_card_until_it_ends_or_is_asked_for(bench):
    bench.turn(0)
    (worker,) = bench.workers()
    file = bench.folder.path / f"{worker.id}.noted"
    assert file.stat().st_mode & 0o777 == 0o600
    assert 50 < json.loads(file.read_text())["peak_mb"] < 10_000
    os.kill(worker.pid, signal.SIGKILL)
    assert until(lambda: bench.workers() == [])  # `fedveil site status` looks too
    assert bench.folder.noted(worker.id)["pid"] == worker.pid
    assert bench.folder.noted(worker.id) == {}
    file.write_text("torn {")
    assert bench.folder.noted(worker.id) == {}
    file.write_text("{}")
    os.utime(file, (0, 0))
    assert bench.workers() == []
    assert not file.exists()


@pytest.mark.long
def test_killed_while_replying_the_turn_is_repeated_from_the_same_private_state(bench, tmp_path, monkeypatch):
    entries = 4_000_000  # 16 MB: more than the sockets on the way can hold
    whole = unbroken(tmp_path / "whole", bench.app, rounds=2, entries=entries)
    bench.orders(entries=entries)
    uploads = [bench.turn(0)]
    (worker,) = bench.workers()
    seen = []

    def killing(answers):
        for part in sliced(answers):
            seen.append(len(part))
            if len(seen) == 1:
                os.kill(worker.pid, signal.SIGKILL)
            yield part

    monkeypatch.setattr(link, "sliced", killing)
    uploads.append(bench.turn(1))
    assert len({line["pid"] for line in bench.lines()}) == 2
    assert [line["round"] for line in bench.lines()] == [0, 1, 1]
    assert uploads == whole.uploads
    assert bench.private() == whole.private()


@pytest.mark.long
def test_a_stale_socket_and_a_broken_card_are_removed(bench):
    bench.folder.path.mkdir(parents=True, mode=0o700)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(bench.folder.socket("deadbeef")))
    left.close()
    key = link.run_key(bench.assignment(), bench.app)
    bench.folder.write(cards.Card("deadbeef", 1, HERE, cards.app_digest(bench.app), key, 0.0))
    (bench.folder.path / "feedbeef.json").write_text("{")
    assert bench.turn()
    assert not bench.folder.socket("deadbeef").exists()
    assert len(list(bench.folder.path.glob("*.json"))) == 1


@pytest.mark.long
def test_a_full_disk_leaves_the_last_private_state_and_the_next_turn_goes_on(bench):
    bench.orders(entries=200_000)
    bench.turn(0)
    before, (worker,) = bench.private(), bench.workers()
    received = bench.state / "first" / "north" / "received.json"
    judged_by = received.read_bytes()
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    message = r"turn-[0-9a-f]{16}.safetensors: expected to write the private state, found .*; free space"
    with pytest.raises(link.TurnError, match=message) as error:
        bench.turn(1)
    assert error.value.kind == "StateError"
    assert bench.private() == before
    assert list((bench.state / "first" / "north").glob("*.safetensors")) == [bench.file()]
    assert received.read_bytes() == judged_by
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    bench.turn(1)
    assert bench.private() != before
    assert bench.workers() == [worker]


@pytest.mark.long
def test_a_turn_whose_upload_never_came_leaves_nothing_behind(bench, tmp_path):
    whole = unbroken(tmp_path / "whole", bench.app, rounds=2)
    uploads = [bench.turn(0)]
    before = dict(bench.last)
    bench.turn(1)
    bench.last = before  # the server died before it had a checkpoint with that upload
    uploads.append(bench.turn(1))
    assert uploads == whole.uploads
    assert bench.private() == whole.private()


@pytest.mark.long
def test_a_turn_whose_worker_is_stopped_ends_with_the_order_s_time_and_the_next_one_goes_on(bench, tmp_path):
    whole = unbroken(tmp_path / "whole", bench.app, rounds=2)
    uploads = [bench.turn(0)]
    (worker,) = bench.workers()
    os.kill(worker.pid, signal.SIGSTOP)
    bench.seconds = 1.0
    began = time.monotonic()
    with pytest.raises(link.TurnError, match="turn: expected an upload within 1 s, found none; the turn was ended"):
        bench.turn(1)
    assert time.monotonic() - began < 10
    assert until(lambda: gone(worker.pid))
    assert bench.workers() == []
    bench.seconds = 600.0
    uploads.append(bench.turn(1))
    assert uploads == whole.uploads


@pytest.mark.long
def test_a_turn_that_is_too_slow_ends_with_the_order_s_time(bench):
    bench.turn(0)
    bench.orders(steps=1000, pause=0.05)
    bench.seconds = 1.5
    with pytest.raises(link.TurnError, match="within 1.5 s"):
        bench.turn(1)
    assert bench.workers() == []


def test_a_turn_without_a_worker_ends_with_the_order_s_time_too():
    watch = client._until(0.2)
    watch(Step(1, 9, 0.0, 0, 0.0))
    time.sleep(0.3)
    with pytest.raises(WorkerError, match="within 0.2 s"):
        watch(Step(2, 9, 0.0, 0, 0.0))


def test_a_step_of_the_clock_does_not_part_a_worker_from_its_supernode(monkeypatch):
    """psutil reckons start times by the clock; here the clock is set on by an hour."""
    before = Owner.of(os.getpid())
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: real(process) + 3600)
    assert before.is_(Owner.of(os.getpid()))
    assert before.runs()
    assert not Owner(before.pid, before.created - 10).runs()


@pytest.fixture
def another():
    """Another SuperNode's process."""
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


@pytest.mark.long
def test_another_supernode_of_the_same_site_cannot_reach_the_worker(bench, another):
    bench.turn(0)
    (worker,) = bench.workers()
    with pytest.raises(
        ConfigError, match=f"expected one SuperNode for site north here, found process {os.getpid()} too"
    ):
        bench.turn(1, owner=Owner.of(another.pid))
    for metadata in ((("owner", str(Owner.of(another.pid))),), ()):
        with link.channel(bench.folder, worker) as channel:
            answers = channel.stream_stream("/fedveil.Worker/Take")(iter([b"{}"]), metadata=metadata)
            with pytest.raises(grpc.RpcError) as refused:
                next(answers)
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert bench.workers() == [worker]


@pytest.mark.long
def test_a_worker_ends_with_its_supernode_and_leaves_no_file(bench, another):
    bench.turn(0, owner=Owner.of(another.pid))
    (worker,) = bench.workers()
    another.kill()
    another.wait()
    assert until(lambda: gone(worker.pid), 3.0)
    assert sorted(p.name for p in bench.folder.path.iterdir()) == ["lock", "turns.jsonl", "worker.log"]
    assert bench.turn(1)  # of the SuperNode that came after


@pytest.mark.long
def test_an_idle_worker_ends(bench):
    bench.turn(0, worker_idle_seconds=0.5)
    (worker,) = bench.workers()
    assert until(lambda: gone(worker.pid), 5.0)
    assert bench.workers() == []
    assert "idle for 0.5 s" in bench.folder.log.read_text()


@pytest.mark.long
def test_beyond_its_memory_the_turn_fails_and_the_worker_ends(bench):
    bench.orders(hold_mb=600)
    with pytest.raises(link.TurnError, match="worker-memory-mb: expected at most 500 MB, found") as error:
        bench.turn(0, worker_memory_mb=500)
    assert error.value.kind == "OutOfMemoryError"
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: out of memory"
    (end,) = bench.ends()
    assert end["round"] == 0
    assert "raise it in the node config; give the site more memory, or lower train.batch-size" in end["failed"]
    assert until(lambda: bench.workers() == [])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["MemoryError", "RuntimeError"])
def test_an_allocation_that_fails_is_called_want_of_memory(kind, bench):
    bench.orders(raises=kind, words="DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(link.TurnError, match="can't allocate memory; give the site more memory") as error:
        bench.turn(0)
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: out of memory"


@pytest.mark.long
@pytest.mark.parametrize("kind,stays", [("TaskError", True), ("ValueError", False)])
def test_after_an_error_that_nobody_foresaw_the_worker_ends(kind, stays, bench):
    bench.orders(raises=kind)
    with pytest.raises(link.TurnError, match="row 4711") as error:
        bench.turn(0)
    assert error.value.kind == kind
    assert "row 4711" in bench.folder.log.read_text()
    told, text = client.private_reason(error.value)
    assert (told, text.startswith("row 4711")) == (kind, True)
    assert (f"its traceback is in {bench.folder.log}" in text) == (not stays)
    assert str(bench.folder.path) not in client.public_reason(error.value)
    if stays:
        assert len(bench.workers()) == 1
    else:
        assert until(lambda: bench.workers() == [])


@pytest.mark.long
def test_a_turn_whose_caller_has_gone_is_given_up(bench):
    bench.orders(pause=0.1, steps=1000)
    assignment = bench.assignment()
    key = link.run_key(assignment, bench.app)
    card = link.find(bench.folder, assignment, key, HERE, bench.app)
    with link.channel(bench.folder, card) as channel:
        head = {"assignment": assignment.to_json(), "key": key, "bytes": len(bench.message())}
        requests = iter([json.dumps(head).encode(), bench.message()])
        call = channel.stream_stream("/fedveil.Worker/Take")(requests, metadata=(("owner", str(HERE)),))
        status = channel.unary_unary("/fedveil.Worker/Status")
        assert until(lambda: json.loads(status(b""))["state"] == "training", 120.0)
        shown = json.loads(status(b""))
        expected = {"run": "first", "round": 0, "steps": 1000, "model": "toy-base"}
        assert {k: shown[k] for k in expected} == expected
        assert shown["step"] >= 1
        assert shown["tokens_per_second"] == 200
        assert shown["seconds_left"] == 0.5 * (1000 - shown["step"])  # half a second a step, so far
        assert shown["memory_mb"] > 50
        call.cancel()
        assert until(lambda: json.loads(status(b""))["state"] == "idle")
    assert bench.private() is None
    bench.orders()
    assert bench.turn(0)


@pytest.mark.long
def test_a_worker_seals_under_the_sites_key_which_no_argument_or_environment_has(bench, tmp_path):
    seal = new_key(tmp_path / "state.key")
    for round_ in range(2):
        bench.turn(round_, key_file=str(tmp_path / "state.key"))
    assert is_sealed(bench.file())
    processes = [psutil.Process(card.pid) for card in bench.workers()]
    assert processes
    for one in processes:
        said = [*one.cmdline(), *one.environ().values()]
        assert not [text for text in said if "state.key" in text or seal.key.hex() in text]
        assert seal.key not in Path(f"/proc/{one.pid}/environ").read_bytes()
    with pytest.raises(link.TurnError, match="found a sealed one; name its key"):
        bench.turn(2)
