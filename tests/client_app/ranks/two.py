"""A site of two processes, and what its tests ask of it."""

from __future__ import annotations

import contextlib
import json
import time

import psutil
import torch

from fedveil import rng, strategies, tasks
from fedveil.client_app import client_session
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.ranks import rank_main as program
from fedveil.client_app.ranks.launcher import RankLauncher, at_first
from fedveil.config import parse
from fedveil.contract.method import RoundContext, hyperparameters_of
from fedveil.federation.exchange import MessageExchange
from fedveil.rng import RandomStream
from fedveil.wire.payloads import payload_tensors
from tests.conftest import ROOT

E2E = ROOT / "data" / "e2e"
KEY = bytes(range(32))
CLOSE = {"rtol": 2e-4, "atol": 2e-6}


def asked(state, method="fedrand", **keys) -> ClientAssignment:
    """An assignment of two processes; keys as train__max_steps, those of the node config as node__shard_base."""
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    node = {"site": "s", "state-dir": str(state), "device": "cpu", "data": str(E2E), "processes": 2}
    node |= {key.removeprefix("node."): value for key, value in given.items() if key.startswith("node.")}
    flat = {"method.name": method, "task.max-tokens": 32, "train.batch-size": 4, "train.max-steps": 3}
    flat |= {key: value for key, value in given.items() if not key.startswith("node.")}
    made = strategies.create_method(method, parse(flat).method.params)
    order = {"round": 0, "is-new": True, "site": "s", "run": "r", "method": method}
    return ClientAssignment.from_instruction(order | {"fields": json.dumps(hyperparameters_of(made))}, flat, node)


def task_of(assignment):
    method = strategies.create_from_json(assignment.order.method, assignment.order.fields)
    return tasks.load_task(assignment.config, method.adapter, at_first(assignment, method))


def ranks() -> list[psutil.Process]:
    """Those that this process has, however it came by them."""
    processes = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended
            processes += [child] if program.__name__ in child.cmdline() else []
    return processes


class Pair:
    """A task alone, and the same with a second rank."""

    def __init__(self, state, **keys) -> None:
        assignment = asked(state, **keys)
        self.alone, self.both = (task_of(a) for a in (asked(state, **{**keys, "node__shard_base": False}), assignment))
        self.rows = self.alone.prepare(E2E, "train").rows
        self.weights = self.alone.initial(RandomStream(KEY))
        self.launched = RankLauncher(self.both, assignment)

    def trainers(self, rows, **train):
        """Of both, with other keys of the train section, for rank 0 alone decides by them."""
        for task in (self.alone, self.both):
            if train:
                task.config = task.config.model_copy(update={"train": task.config.train.model_copy(update=train)})
            yield task.trainer(rows, RandomStream(KEY))


def assert_same(one, two, start=None):
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], **CLOSE)
    if start:
        assert any((one[name] - start[name]).abs().max() > 1e-4 for name in one)


def message_of(assignment):
    """What the server sends in round 0, the exchange, and the weights in it."""
    method = strategies.create_from_json(assignment.order.method, assignment.order.fields)
    config = assignment.config
    task = tasks.load_task(config, method.adapter, "cpu")
    exchange = MessageExchange(method, assignment.order.method, task.spec)
    initial = task.initial(rng.initial_stream(config.run.seed, "weights"))
    state = method.init(task.spec, initial, rng.initial_stream(0, "m"))
    ctx = RoundContext(0, "s", True, bytes(32), address=assignment.order.address)
    return exchange.broadcast(state, ctx), exchange, initial


def uploaded(assignment):
    """A whole turn; the uploaded tensors, and those that it went out from."""
    message, exchange, initial = message_of(assignment)
    with contextlib.closing(client_session.ClientSession()) as turns:
        taken = turns.run_round(lambda: message, assignment)
        assert len(ranks()) == assignment.site.processes - 1
    assert not ranks()
    got = exchange.receive(b"".join(taken.parts), 0, assignment.order.address)
    return payload_tensors(got.payload), initial


def until(condition, seconds=120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
