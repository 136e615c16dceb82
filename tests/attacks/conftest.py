"""A federation in one process whose messages are captured, shared by all attacks that read messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import pytest
import torch

from fedveil import rng
from fedveil.attacks.base import AdversaryView
from fedveil.config import parse
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.strategies import create_method
from fedveil.wire.capture import MessageCapture

Federate = Callable[..., tuple[InProcessFederation, AdversaryView]]


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads that wait for each other over a 4 x 24 matrix cost ten times what they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def federate(tmp_path) -> Federate:
    """Makes a federation of `name` that writes to a tap, and what its server can see; the test runs it."""

    def make(
        name: str, spec, weights, trainer_for, fields: str = "", sites: Sequence[str] = "abcd", rounds: int = 6,
        fraction: float = 1.0, seed: int = 3, config: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[InProcessFederation, AdversaryView]:  # fmt: skip
        flat = {"run.deterministic": True, "run.seed": seed, "run.rounds": rounds, "cohort.fraction": fraction}
        flat |= config
        exchange = MessageExchange(create_method(name, fields), name, spec)
        state = exchange.method.init(spec, weights, rng.initial_stream(seed, "method init"))
        tap = MessageCapture(tmp_path / f"{name}{fields}{seed}{len(config)}".replace(" ", "").replace("=", "-"))
        federation = InProcessFederation(exchange, parse(flat), trainer_for, list(sites), state, tap=tap)
        return federation, AdversaryView.server(tap, exchange)

    return make
