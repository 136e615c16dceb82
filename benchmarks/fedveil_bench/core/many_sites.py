"""Run no-op rounds with N sites in a separate process, and measure seconds and maximum memory.

    python -m fedveil_bench.core.many_sites in-process fedrand "" 1000 4 0
    python -m fedveil_bench.core.many_sites strategy fedrand "downlink = 'selected'" 1000 4 10

"in-process" is fedveil.federation.in_process with messages of a few KB, so that the cost per site dominates.
"strategy" is the ServerApp's strategy with a run folder. Its Grid creates each reply when it is pulled and stores none,
so that only the server's memory is measured; the time to create replies is excluded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract.layout import Payload
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import FederatedState, Method, RoundContext
from fedveil.contract.param_spec import ParamSpec, Spec, param_specs_of
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.testing.messages import STYPE, read_header, slice_key, slice_message
from fedveil.testing.server_loop import MethodStrategy, RoundRecord, RunFolder, RunSettings
from fedveil.wire.envelope import EnvelopeStamp, pack_message_parts, unpack_message
from fedveil_bench.common.untrained import NoOpTrainer
from fedveil_bench.process_monitor.usage import high_mb

_LAYERS = 4  # FedPer shares two of them
_SMALL = 64  # width of a layer in process


@dataclass(frozen=True)
class ManySitesCase:
    """A case to measure.

    Attributes:
        way: "in-process" or "strategy".
        method, fields: the values for the run config.
        sites: N.
        rounds: number of rounds; in the first round, every site is new.
        megabytes: size of one upload, for "strategy"; 0 means a few KB.
    """

    way: str
    method: str
    fields: str
    sites: int
    rounds: int
    megabytes: int


@dataclass(frozen=True)
class ManySitesResult:
    """The measurements of one case.

    Attributes:
        seconds, cpu_seconds: wall-clock and CPU time of each round; only the former includes waiting for the disk and
            other programs.
        sending_cpu_seconds: CPU time of each round until the last message has been passed on; [] for "in-process".
        grown_mb: growth of the maximum resident memory since before the first round.
        upload_bytes: upload bytes in the last round.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    sending_cpu_seconds: list[float]
    grown_mb: float
    upload_bytes: int


def measure_case(case: ManySitesCase) -> ManySitesResult:
    """Run the case in this process."""
    return _in_process(case) if case.way == "in-process" else _strategy(case)


def _spec(width: int) -> Spec:
    """Return LoRA factors for four layers, with A and B of the same size."""
    return {
        f"h.{layer}.lora_{side}": ParamSpec((width, 4) if side == "B" else (4, width))
        for layer in range(_LAYERS)
        for side in "AB"
    }


def _weights(spec: Spec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(t.shape, generator=generator) for name, t in spec.items()}


def _in_process(case: ManySitesCase) -> ManySitesResult:
    spec, names = _spec(_SMALL), [f"site-{i:05d}" for i in range(case.sites)]
    method = strategies.create_method(case.method, case.fields)
    exchange, trainer = MessageExchange(method, case.method, spec), NoOpTrainer(spec)
    state = method.init(spec, _weights(spec), rng.initial_stream(0, "method init"))
    memory, laps, before = _Memory(), list[_Times](), 0
    federation = InProcessFederation(exchange, parse({}), lambda site, ctx: trainer, names, state)
    for round_ in range(case.rounds):
        started, before = _Times.now(), federation.upload_bytes
        federation.round(round_)
        laps.append(_Times.now() - started)
    return ManySitesResult(*_columns(laps), [], memory.grown_mb(), federation.upload_bytes - before)


def _strategy(case: ManySitesCase) -> ManySitesResult:
    method = strategies.create_method(case.method, case.fields)
    upload_share = 1 if case.method == "fedavg" else 2  # other methods send one factor, or half of the layers
    width = case.megabytes * 1_000_000 // 4 * upload_share // (2 * 4 * _LAYERS)
    weights = _weights(_spec(width or _SMALL))
    grid = StreamedGrid(method, case.method, param_specs_of(weights), case.sites)
    config = parse({"method.name": case.method, "method.params": case.fields, "cohort.min-sites": case.sites})
    laps: list[_Times] = []
    sending: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "run")
        strategy = MethodStrategy(method, RunSettings.from_config(config, "run"), folder=folder)
        strategy.rounds.initialise(weights)
        memory, since = _Memory(), _Times.now()

        def done(server_round: int, record: RoundRecord | None) -> None:
            nonlocal since
            if record is not None:
                laps.append(_Times.now() - since - grid.spent)
                sending.append((grid.pushed_at - since).cpu)
            since, grid.spent = _Times.now(), _Times()

        strategy.run(grid, case.rounds, done=done)
        folder.close()
    accepted = [len(record.accepted) for record in strategy.history]
    if accepted != [case.sites] * case.rounds:
        raise RuntimeError(f"uploads: expected {case.sites} accepted in {case.rounds} rounds, found {accepted}")
    return ManySitesResult(*_columns(laps), sending, memory.grown_mb(), strategy.history[-1].upload_bytes)


@dataclass(frozen=True)
class _Times:
    """Wall-clock time and this process's CPU time."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Self:
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: _Times) -> _Times:
        return _Times(self.wall - other.wall, self.cpu - other.cpu)

    def __add__(self, other: _Times) -> _Times:
        return _Times(self.wall + other.wall, self.cpu + other.cpu)


def _columns(laps: list[_Times]) -> tuple[list[float], list[float]]:
    return [lap.wall for lap in laps], [lap.cpu for lap in laps]


class _Memory:
    """The maximum resident memory since this object was created, as counted by Linux."""

    def __init__(self) -> None:
        self._before_mb = float(psutil.Process().memory_info().rss) / 1e6
        Path("/proc/self/clear_refs").write_text("5")

    def grown_mb(self) -> float:
        """Return the growth since the start, in 10^6 bytes."""
        return high_mb() - self._before_mb


class StreamedGrid(Grid):
    """A Grid with N nodes whose replies are created when they are pulled. It stores one message of each variant.

    Attributes:
        spent: time spent on simulating the sites.
        pushed_at: when messages were last pushed.
    """

    def __init__(self, method: Method, name: str, spec: Spec, sites: int) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self._method, self._name, self._spec = method, name, spec
        self._layout, self._trainer = method.layout(spec), NoOpTrainer(spec)
        self._private = FederatedState(_weights(spec), {"round": 1})
        self._nodes = [NodeInfo(node_id=1 + i, name=f"site-{i:05d}") for i in range(sites)]
        self._node_ids = {node.name: node.node_id for node in self._nodes}
        self._down: dict[str, Payload] = {}
        self._waiting: dict[str, tuple[RoundContext, str]] = {}
        self.spent = self.pushed_at = _Times()

    def set_run(self, run: Any) -> None:
        """Do nothing: there is no run to set."""

    @property
    def run(self) -> Any:
        """Raise NotImplementedError: there is no run."""
        raise NotImplementedError("no run here")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Raise NotImplementedError: Flower's older function for creating messages is not supported."""
        raise NotImplementedError("create messages with their class")

    def get_node_ids(self) -> list[int]:
        """Return all nodes."""
        return [node.node_id for node in self._nodes]

    def get_nodes(self) -> list[NodeInfo]:
        """Return all nodes with their names."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept the messages, storing only the facts that a reply needs."""
        self.pushed_at = started = _Times.now()
        self._down.clear()
        pushed = [self._pushed(message) for message in messages]
        self.spent += _Times.now() - started
        return pushed

    def _pushed(self, message: Message) -> str:
        order, record = message.content.config_records["order"], message.content.array_records["fedveil"]
        address = MessageAddress(str(order["run"]), int(str(order["attempt"])), str(order["site"]))
        round_ = int(str(order["round"]))
        variant = read_header(memoryview(record[slice_key(0)].data))[0]["variant"]
        if variant not in self._down:
            whole = b"".join(record[slice_key(i)].data for i in range(len(record)))
            stamp = EnvelopeStamp.from_exchange(self._method, self._name, round_, "down", address.of_broadcast)
            self._down[variant] = unpack_message(whole, self._layout, stamp).payload
        number = f"{round_} {address.site}"
        ctx = RoundContext(round_, address.site, bool(order["is-new"]), bytes(32), True, address)
        self._waiting[number] = ctx, variant
        return number

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Create and return the replies."""
        started = _Times.now()
        replies = [self._reply(*self._waiting.pop(number), number) for number in message_ids if number in self._waiting]
        self.spent += _Times.now() - started
        return replies

    def _reply(self, ctx: RoundContext, variant: str, number: str) -> Message:
        private = None if ctx.is_new else self._private
        _, payload = self._method.client(private, self._down[variant], self._trainer, ctx)
        stamp = EnvelopeStamp.from_exchange(self._method, self._name, ctx.round, "up", ctx.address)
        parts = pack_message_parts(self._layout, stamp, payload, self._trainer.num_examples).parts
        arrays = {
            slice_key(i): Array("uint8", (len(part),), STYPE, part) for i, part in enumerate(slice_message(parts))
        }
        about = Metadata(1, "", self._node_ids[ctx.client], 1, number, "", time.time(), 60.0, MessageType.TRAIN)
        return make_message(about, RecordDict({"fedveil": ArrayRecord(arrays)}))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Raise NotImplementedError: the benchmark measures replies that are pulled one at a time."""
        raise NotImplementedError("replies are pulled one at a time")


def main() -> None:
    """Run one case in this process; print its metrics as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["in-process", "strategy"])
    parser.add_argument("method")
    parser.add_argument("fields")
    for name in ("sites", "rounds", "megabytes"):
        parser.add_argument(name, type=int)
    torch.set_num_threads(1)
    found = measure_case(ManySitesCase(**vars(parser.parse_args())))
    sys.stdout.write(json.dumps(vars(found)) + "\n")


if __name__ == "__main__":
    main()
