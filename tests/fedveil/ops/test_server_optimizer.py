"""Server optimizers against a twin that computes entry by entry in plain Python floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedveil.config import ServerConfig, parse
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.ops.server_optimizer import ServerOptimizer
from fedveil.records.tensor_state import load_state, save_state
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.ffa_lora import FFALoRA
from fedveil.strategies.hetlora import HetLoRA

KINDS = ["fedavgm", "fedadam", "fedyogi", "fedadagrad"]
SPEC = {"w": ParamSpec((2, 3)), "v": ParamSpec((4,))}


def upload(site: str, count: int, tensors) -> AcceptedUpload:
    return AcceptedUpload(Payload(tensors), count, RoundContext(0, site, True, bytes(32)))


def twin(kind: str, eta: float, b1: float, b2: float, tau: float, x0: float, means: list[float]) -> list[float]:
    """One entry, from the formulas of the paper."""
    x, m, v, seen = x0, 0.0, tau**2, []
    for mean in means:
        d = mean - x
        m = b1 * m + (d if kind == "fedavgm" else (1 - b1) * d)
        if kind == "fedadagrad":
            v = v + d * d
        elif kind == "fedyogi":
            v = v - (1 - b2) * d * d * (1 if v > d * d else -1 if v < d * d else 0)
        elif kind == "fedadam":
            v = b2 * v + (1 - b2) * d * d
        x = x + eta * (m if kind == "fedavgm" else m / (math.sqrt(v) + tau))
        seen.append(x)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_six_rounds_equal_the_twin(kind):
    """The sites send their own weights each round, whatever they received: the means do not depend on x."""
    rng = np.random.default_rng(17)
    optimizer = ServerOptimizer(kind, 0.3, 0.8, 0.95, 0.02)
    exchange = MessageExchange(FedAvg(), "fedavg", SPEC, optimizer)
    start = {name: rng.normal(size=t.shape) for name, t in SPEC.items()}
    state = FederatedState({name: torch.tensor(w, dtype=torch.float32) for name, w in start.items()})
    means: dict[str, list[np.ndarray]] = {name: [] for name in SPEC}
    states = []
    for _ in range(6):
        sent = [{name: rng.normal(size=t.shape) for name, t in SPEC.items()} for _ in range(2)]
        for name in SPEC:
            means[name].append((3 * sent[0][name] + sent[1][name]) / 4)
        uploads = [
            upload(site, n, {k: torch.tensor(w, dtype=torch.float32) for k, w in one.items()})
            for site, n, one in (("a", 3, sent[0]), ("b", 1, sent[1]))
        ]
        state = exchange.aggregate(state, iter(uploads))
        states.append(state)
    for name, t in SPEC.items():
        for at in np.ndindex(t.shape):
            wanted = twin(kind, 0.3, 0.8, 0.95, 0.02, float(start[name][at]), [float(m[at]) for m in means[name]])
            found = [float(s.tensors[name][at]) for s in states]
            assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5)


def test_a_step_of_each_by_hand():
    """x = 1, mean 1.2, tau = 0.1, so v_{-1} = 0.01 and Delta^2 = 0.04."""
    after = {}
    for kind in KINDS:
        exchange = MessageExchange(
            FedAvg(), "fedavg", {"w": ParamSpec((1,))}, ServerOptimizer(kind, 0.5, 0.5, 0.5, 0.1)
        )
        state = exchange.aggregate(
            FederatedState({"w": torch.ones(1)}), iter([upload("a", 1, {"w": torch.tensor([1.2])})])
        )
        after[kind] = float(state.tensors["w"])
    assert after["fedavgm"] == pytest.approx(1 + 0.5 * 0.2)
    assert after["fedadagrad"] == pytest.approx(1 + 0.5 * 0.1 / (math.sqrt(0.05) + 0.1))
    assert after["fedyogi"] == pytest.approx(1 + 0.5 * 0.1 / (math.sqrt(0.01 + 0.5 * 0.04) + 0.1))
    assert after["fedadam"] == pytest.approx(1 + 0.5 * 0.1 / (math.sqrt(0.005 + 0.02) + 0.1))


def test_an_entry_that_no_site_sent_does_not_drift():
    """FFA-LoRA's A is never sent; HetLoRA's third rank is sent in the first round only."""
    spec = {"h.lora_A": ParamSpec((3, 2)), "h.lora_B": ParamSpec((2, 3))}
    tensors = {name: torch.ones(t.shape) for name, t in spec.items()}
    exchange = MessageExchange(FFALoRA(), "ffa_lora", spec, ServerOptimizer("fedadam", 0.1))
    state = exchange.aggregate(FederatedState(tensors), iter([upload("a", 1, {"h.lora_B": 2 * tensors["h.lora_B"]})]))
    assert torch.equal(state.tensors["h.lora_A"], tensors["h.lora_A"])
    assert not torch.equal(state.tensors["h.lora_B"], tensors["h.lora_B"])

    from fedveil.adapters.lora import LoraAdapter

    method = HetLoRA({"small": 2}, adapter=LoraAdapter(rank=3))
    exchange = MessageExchange(method, "hetlora", spec, ServerOptimizer("fedavgm", 1.0))
    first = exchange.aggregate(
        FederatedState(tensors), iter([upload("large", 1, {k: 2 * w for k, w in tensors.items()})])
    )
    small = {"h.lora_A": 3 * tensors["h.lora_A"][:2], "h.lora_B": 3 * tensors["h.lora_B"][:, :2]}
    second = exchange.aggregate(first, iter([upload("small", 1, small)]))
    assert torch.equal(second.tensors["h.lora_A"][2], first.tensors["h.lora_A"][2])
    assert torch.equal(second.moments["first.h.lora_B"][:, 2], first.moments["first.h.lora_B"][:, 2])
    assert not torch.equal(second.tensors["h.lora_A"][:2], first.tensors["h.lora_A"][:2])


def test_a_buffer_is_averaged():
    spec = {"w": ParamSpec((1,)), "running_var": ParamSpec((1,), fixed=True)}
    exchange = MessageExchange(FedAvg(), "fedavg", spec, ServerOptimizer("fedavgm", 2.0))
    before = FederatedState({name: torch.ones(1) for name in spec})
    after = exchange.aggregate(before, iter([upload("a", 1, {name: torch.tensor([0.25]) for name in spec})]))
    assert after.tensors["running_var"].tolist() == [0.25]
    assert after.tensors["w"].tolist() == [-0.5]


def test_moments_are_stored_apart_from_the_methods_tensors(tmp_path):
    state = FederatedState({"w": torch.ones(2)}, {"a": 1}, {"first.w": torch.zeros(2)})
    save_state(state, tmp_path / "state")
    again = load_state(tmp_path / "state")
    assert set(again.tensors) == {"w"}
    assert set(again.moments) == {"first.w"}
    assert again.scalars == {"a": 1}


def test_default_rates():
    assert ServerOptimizer.from_config(ServerConfig()) is None
    assert ServerOptimizer.from_config(ServerConfig(optimizer="fedavgm")).learning_rate == 1.0
    assert ServerOptimizer.from_config(ServerConfig(optimizer="fedadam")).learning_rate == 0.01
    chosen = ServerOptimizer.from_config(parse({"server.optimizer": "fedyogi", "server.learning-rate": 0.5}).server)
    assert chosen == ServerOptimizer("fedyogi", 0.5)


@pytest.mark.parametrize(
    "key,value", [("tau", 0.0), ("beta1", 1.0), ("beta2", -0.1), ("learning-rate", math.nan), ("optimizer", "adam")]
)
def test_values_out_of_range_are_refused(key, value):
    with pytest.raises(ConfigError, match=f"server.{key}"):
        parse({f"server.{key}": value})


@pytest.mark.parametrize(
    "given,key",
    [
        ({"learning_rate": 0.5}, "learning-rate"),
        ({"optimizer": "fedavgm", "beta2": 0.5}, "beta2"),
        ({"optimizer": "fedavgm", "tau": 1.0}, "tau"),
        ({"optimizer": "fedadagrad", "beta2": 0.5}, "beta2"),
    ],
)
def test_a_key_that_the_optimizer_does_not_use_is_refused(given, key):
    with pytest.raises(ConfigError, match=f"^server.{key}: .* does not use it"):
        ServerOptimizer.from_config(ServerConfig(**given))
