"""A site whose worker is a real process: gRPC on its socket, and a toy task in a copy of the app."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from fedveil import rng
from fedveil.client_app.instruction import ClientAssignment, TrainInstruction
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.worker import worker_round
from fedveil.client_app.worker.connection import WorkerRecord
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.config import parse
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.fedrand import FedRand
from fedveil.wire import header
from fedveil.wire.chunking import slice_message

HERE = OwnerProcess.from_pid(os.getpid())


class Bench:
    """One site with its data and state folders. Every worker of it is dead after the test."""

    def __init__(self, tmp_path: Path, app: Path) -> None:
        self.app, self.data, self.state = app, tmp_path / "data", tmp_path / "state"
        self.data.mkdir()
        self.site = SiteConfig(site="north", data=str(self.data), state_dir=self.state, device="cpu")
        self.folder = WorkerRegistry(self.state, "north")
        self.seconds = 600.0
        self.last: dict[str, str] = {}  # by run: the turn that the server's state has
        self.orders()

    def orders(self, **orders) -> None:
        (self.data / "orders.json").write_text(json.dumps(orders))

    def assignment(self, round_=0, run="first", **site) -> ClientAssignment:
        method = json.dumps({"rho": 0.0})
        config = {"run.deterministic": True, "task.name": "toy", "task.model": "toy-base", "method.name": "fedrand"}
        config |= {"task.data": str(self.data)}
        order = TrainInstruction(round_, round_ == 0, "north", run, "fedrand", method, last=self.last.get(run, ""))
        order = replace(order, seconds=self.seconds)
        return ClientAssignment(order, parse(config), self.site.model_copy(update=site))

    def message(self, round_=0, run="first") -> bytes:
        entries = json.loads((self.data / "orders.json").read_text()).get("entries", 1000)
        spec = {"h.lora_A": ParamSpec((1, 5)), "h.lora_B": ParamSpec((entries, 1))}
        exchange = MessageExchange(FedRand(rho=0.0), "fedrand", spec)
        state = exchange.method.init(
            spec, {n: torch.ones(t.shape) for n, t in spec.items()}, rng.initial_stream(0, "weights")
        )
        address = MessageAddress(run, 0, "north")
        return exchange.broadcast(state, RoundContext(round_, "north", round_ == 0, b"s" * 32, address=address))

    def turn(self, round_=0, run="first", owner=HERE, app=None, **site) -> bytes:
        """A whole turn through the worker."""
        slices = slice_message([self.message(round_, run)])
        assignment = self.assignment(round_, run, **site)
        upload = b"".join(worker_round.run_round_in_worker(slices, assignment, owner, app or self.app))
        self.last[run] = header.header_of_slices([upload])["turn"]
        return upload

    def workers(self) -> list[WorkerRecord]:
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
