"""Measure how much of the server's model a proxy reveals (FedQSN, FedLPP, FedSP), and how much clients can recover.

The adversary is one client, or several colluding clients. It knows what the client side of the method knows:
its messages and the hyperparameters. If declared, it also knows the public base W_0 that the server
started from.

| attack | what it does |
|---|---|
| `average_proxies` | averages each entry over the proxies that show it (rounds or colluders), after undoing the scale |
| `fill_from_base` | fills the missing entries from the public base |
| `fine_tune_proxy` | trains the proxy on a client's own data |

The proxy is the model that `Method.client` passes to training. It lacks the parts that the client side
keeps out of training. So the attacks work however a method hides the model.

    cosine(x, y) = <x, y> / (|x| |y|), 0 if either is all zeros
    gap(metric) = metric of the best server model - metric of the best proxy, each chosen by its validation loss

| case | result |
|---|---|
| an entry that no proxy shows | 0 in `average_proxies`, True in `missing` |
| no proxies | ValueError |
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
    """A model that a client can rebuild.

    Attributes:
        weights: every tensor of the spec; missing entries are 0.
        missing: boolean masks, broadcastable to the tensors with missing entries; True where an entry is missing.
        scale: the factor by which the method multiplied the visible entries of these tensors.
    """

    weights: Weights
    missing: Weights
    scale: float = 1.0

    @property
    def undone(self) -> dict[str, Tensor]:
        """Return the weights with the method's scale factor divided out."""
        return {n: w / self.scale if n in self.missing else w for n, w in self.weights.items()}


@dataclass(frozen=True)
class ModelSimilarity:
    """Cosine similarity to the server's model, in three forms.

    Attributes:
        whole: over all tensors as received, as one vector.
        visible: over all visible entries without the scale, as one vector.
        mean: mean over tensors of each received tensor's similarity.
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
    """Raised to stop a client's step before training begins."""


@dataclass
class _Reader:
    """A trainer that records the weights it is asked to train, and does not train."""

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
    """Return the proxy in a broadcast.

    Args:
        scale: the method's scale; 1 for a method that does not scale.
        known: the site's weights before this broadcast, for a method that sends part of a proxy only once (fedsp).

    Raises:
        ValueError: the method's client step does not train.
    """
    reader = _Reader(spec)
    ctx = RoundContext(0, "adversary", True, bytes(32))
    try:
        private = None if known is None else FederatedState(dict(known))
        method.client(private, down, cast("Trainer", reader), ctx)  # it only calls the trainer
    except _Started:
        return ProxyModel(reader.weights, reader.frozen, scale)
    raise ValueError(
        f"method: the client of {type(method).__name__} did not train, but this attack needs a method that trains "
        "a proxy"
    )


def list_proxies(view: AdversaryView, sites: Sequence[str] | None = None, scale: float = 1.0) -> Iterator[ProxyModel]:
    """Yield every proxy in the view, in message order; with `sites`, only the proxies of these colluding sites.

    A part that a method sends only once stays as sent: the view does not show how training at a site changed it.
    """
    known: dict[str, Weights] = {}
    for sighting in view.broadcasts():
        if sites is None or sighting.site in sites:
            at = sighting.site
            proxy = read_proxy(view.exchange.method, view.exchange.spec, sighting.payload, scale, known.get(at))
            known[at] = proxy.weights
            yield proxy


def average_proxies(seen: Iterable[ProxyModel]) -> ProxyModel:
    """Return the mean of each entry over the proxies that show it. Raises ValueError if there are no proxies.

    Only one proxy is in memory at a time.
    """
    sums, hidden = RunningSums(), dict[str, Tensor]()
    for proxy in seen:
        for name, w in proxy.undone.items():
            missing = proxy.missing.get(name, torch.zeros((1,) * w.ndim, dtype=torch.bool))
            sums.fold(name, w, 1.0, (~missing).expand(w.shape))
            hidden[name] = hidden[name] & missing if name in hidden else missing
    if not hidden:
        raise ValueError("proxies: the view contains none")
    return ProxyModel({n: sums.mean(n) for n in hidden}, {n: m for n, m in hidden.items() if m.any()})


def fill_from_base(proxy: ProxyModel, base: Weights) -> ProxyModel:
    """Return the proxy without its scale, with missing entries filled from the public base."""
    known = proxy.undone
    return ProxyModel(
        {n: torch.where(proxy.missing[n], base[n], w) if n in proxy.missing else w for n, w in known.items()}, {}
    )


def fine_tune_proxy(proxy: ProxyModel, local: Trainer) -> ProxyModel:
    """Return the proxy after training all its entries on a client's own data, as a dishonest client may."""
    return ProxyModel(local.train(proxy.weights).weights, {})


def proxy_similarity(
    proxy: ProxyModel, server: Weights, names: Iterable[str], base: Weights | None = None
) -> ModelSimilarity:
    """Return the similarity of a proxy to the server's model, over the protected tensors `names`.

    With `base`, compare the differences from the base, W_t - W_0 and proxy - W_0. As received, a missing entry is
    0, so its difference from the base is -W_0.
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
    """Computes the cosine of two long vectors piece by piece."""

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
