"""Measure how much of the server's model a proxy reveals (FedQSN, FedLPP, FedSP) and clients can recover.

The adversary is one client, or several colluding ones. It knows what the client side of the method knows:
its messages and the hyperparameters. If so declared, it also knows the public base W_0 that the server
started from.

| attack | what it does |
|---|---|
| `average_proxies` | the mean of every entry over the proxies that showed it, of rounds or of colluders; their scale
  undone |
| `fill_from_base` | what no proxy showed is taken from the public base |
| `fine_tune_proxy` | a client trains what it has on its own data |

A proxy is read from the client side of the method: it is the model that `Method.client` passes to training.
The parts that the client side keeps at that point are missing from the proxy. So the attacks need not know
how a method hides the model.

    cosine(x, y) = <x, y> / (|x| |y|), 0 where one of them is all zero
    gap(metric) = the metric of the best server model - that of the best proxy, each chosen by its validation loss

| case | result |
|---|---|
| an entry that no proxy showed | 0 in `average_proxies`, True in `missing` |
| no proxy at all | ValueError |
| proxy = server = public base | similarity of the differences: 0 |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from fedveil.attacks.base import AdversaryView
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, Method, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Frozen, Penalty, Trainer, TrainingResult, alternating_sets
from fedveil.ops.running_sums import RunningSums

__all__ = [
    "ModelSimilarity",
    "ProxyModel",
    "ProxyScores",
    "average_proxies",
    "fill_from_base",
    "fine_tune_proxy",
    "list_proxies",
    "proxy_similarity",
    "read_proxy",
]


@dataclass(frozen=True)
class ProxyModel:
    """A model that a client can put together.

    Attributes:
        weights: every tensor of the spec; missing entries are 0.
        missing: booleans that broadcast over the tensors with missing entries, True where an entry is missing.
        scale: the factor by which the method multiplied the visible entries of these tensors.
    """

    weights: Weights
    missing: Weights
    scale: float = 1.0

    @property
    def undone(self) -> dict[str, Tensor]:
        """The weights, divided by the scale where the method multiplied them."""
        return {n: w / self.scale if n in self.missing else w for n, w in self.weights.items()}


@dataclass(frozen=True)
class ModelSimilarity:
    """Cosine similarity to the server's model, in three forms.

    Attributes:
        whole: of all tensors as received, as one vector.
        visible: of all visible entries, as one vector, the scale undone.
        mean: of each tensor as received, the mean over tensors.
    """

    whole: float
    visible: float
    mean: float


@dataclass(frozen=True)
class ProxyScores:
    """A model's validation loss, and its metrics on test data."""

    validation_loss: float
    metrics: Mapping[str, float]


class _Started(Exception):
    """Ends a client half where training would begin."""


@dataclass
class _Reader:
    """A trainer that remembers what it is asked to train, and trains nothing."""

    spec: Spec
    num_examples: int = 1
    weights: Weights = field(default_factory=dict)
    frozen: Weights = field(default_factory=dict)

    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        self.weights, self.frozen = weights, alternating_sets(frozen)[0]
        raise _Started

    def gradient(self, weights: Weights) -> TrainingResult:
        return self.train(weights)


def read_proxy(
    method: Method, spec: Spec, down: Payload, scale: float = 1.0, known: Weights | None = None
) -> ProxyModel:
    """The proxy in a broadcast.

    Args:
        scale: the method's; 1 for a method that does not scale.
        known: the site's weights before this broadcast, for a method that sends a part of its proxy once (fedsp).

    Raises:
        ValueError: a method whose client half asks for no training.
    """
    reader = _Reader(spec)
    ctx = RoundContext(0, "adversary", True, bytes(32))
    try:
        private = None if known is None else FederatedState(dict(known))
        method.client(private, down, cast("Trainer", reader), ctx)  # it asks for nothing but training
    except _Started:
        return ProxyModel(reader.weights, reader.frozen, scale)
    raise ValueError(
        f"method: expected a client half that trains, found {type(method).__name__}, which did not train; this "
        "attack is for methods with a proxy"
    )


def list_proxies(view: AdversaryView, sites: Sequence[str] | None = None, scale: float = 1.0) -> Iterator[ProxyModel]:
    """Every proxy in the view, in the order of its messages. With `sites` only those of these sites, which collude.

    What a method sends once stays as it was sent: the view does not show how a site's training changed it.
    """
    known: dict[str, Weights] = {}
    for sighting in view.broadcasts():
        if sites is None or sighting.site in sites:
            at = sighting.site
            proxy = read_proxy(view.exchange.method, view.exchange.spec, sighting.payload, scale, known.get(at))
            known[at] = proxy.weights
            yield proxy


def average_proxies(seen: Iterable[ProxyModel]) -> ProxyModel:
    """The mean of every entry over the proxies that showed it. Raises ValueError where there is no proxy.

    One proxy is in memory at a time.
    """
    sums, hidden = RunningSums(), dict[str, Tensor]()
    for proxy in seen:
        for name, w in proxy.undone.items():
            missing = proxy.missing.get(name, torch.zeros((1,) * w.ndim, dtype=torch.bool))
            sums.fold(name, w, 1.0, (~missing).expand(w.shape))
            hidden[name] = hidden[name] & missing if name in hidden else missing
    if not hidden:
        raise ValueError("proxies: expected at least one, found none in the view")
    return ProxyModel({n: sums.mean(n) for n in hidden}, {n: m for n, m in hidden.items() if m.any()})


def fill_from_base(proxy: ProxyModel, base: Weights) -> ProxyModel:
    """The proxy with its scale undone, and its missing entries taken from the public base."""
    known = proxy.undone
    return ProxyModel(
        {n: torch.where(proxy.missing[n], base[n], w) if n in proxy.missing else w for n, w in known.items()}, {}
    )


def fine_tune_proxy(proxy: ProxyModel, local: Trainer) -> ProxyModel:
    """The proxy after training on a client's own data. No entry is held still: a dishonest client may train all."""
    return ProxyModel(local.train(proxy.weights).weights, {})


def proxy_similarity(
    proxy: ProxyModel, server: Weights, names: Iterable[str], base: Weights | None = None
) -> ModelSimilarity:
    """The similarity of a proxy to the server's model, over the protected tensors `names`.

    With `base` it is that of the differences to the base, W_t - W_0 and proxy - W_0. As received, a missing entry is
    0, and its difference to the base is -W_0.
    """
    as_received, visible, each = _Cosine(), _Cosine(), []
    undone = proxy.undone
    for name in names:
        origin = base[name].double() if base is not None else torch.zeros(())
        true, estimate = server[name].double() - origin, proxy.weights[name].double() - origin
        as_received.add(estimate, true)
        own = _Cosine()
        own.add(estimate, true)
        each.append(own.value)
        there = ~proxy.missing[name] if name in proxy.missing else torch.ones((), dtype=torch.bool)
        visible.add((undone[name].double() - origin) * there, true * there)
    return ModelSimilarity(as_received.value, visible.value, sum(each) / len(each) if each else 0.0)


class _Cosine:
    """The cosine of two long vectors, given piece by piece."""

    def __init__(self) -> None:
        self._dot = self._x = self._y = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        self._dot += float((x * y).sum())
        self._x += float(x.square().sum())
        self._y += float(y.square().sum())

    @property
    def value(self) -> float:
        norms = (self._x * self._y) ** 0.5
        return self._dot / norms if norms else 0.0
