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
from fedveil.client_app.site.assignment import Assignment, Order
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.worker import cards, link
from fedveil.client_app.worker.cards import Folder
from fedveil.client_app.worker.owner import Owner
from fedveil.config import parse
from fedveil.contract.address import Address
from fedveil.contract.method import RoundContext
from fedveil.contract.spec import TensorSpec
from fedveil.federation.exchange import Exchange
from fedveil.strategies.fedrand import FedRand
from fedveil.wire import header
from fedveil.wire.slices import sliced

HERE = Owner.of(os.getpid())


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
