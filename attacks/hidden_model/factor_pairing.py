"""Rebuilding clients from what the server saw of them (FedRand, section 4.3; the pairing is ours where the paper is open).

| model | each tensor is | who would do so |
|---|---|---|
| `latest` | the site's last upload of it, whatever the round; never sent: the server's own | the paper's attacker |
| `merged` | from the site's last upload; else from the broadcast that this upload answered | an attacker who wants no stale factor |

By tensor names alone, so it is one attack on every method: under FedAvg both are the client itself; under FedPer the private
layers, under FedPara the private pair, stay the server's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedveil.algebra.factors import product
from fedveil.attacks.base import View
from fedveil.contract.spec import Weights
from fedveil.wire.payloads import tensors_of


@dataclass(frozen=True)
class Rebuilt:
    """A client as the server can put it together.

    Attributes:
        weights: every tensor of the spec, fp32.
        seen: the round in which the site sent each tensor; those that it never sent are left out.
        staleness: participations of the site between the oldest and the newest of them; 0 = all of one upload.
        coverage: part of the tensors that the site ever sent.
    """

    weights: Weights
    seen: Mapping[str, int]
    staleness: int
    coverage: float


@dataclass(frozen=True)
class Error:
    """How far a rebuilt client is from the true one: ||rebuilt - true|| / ||true||, Frobenius, 0 where both are zero.

    Attributes:
        products: over B A of every module that has such a pair. FedPara's private pair is not in it: see `tensors`.
        tensors: over the factors themselves.
    """

    products: float
    tensors: float


def latest(view: View, site: str, fallback: Weights) -> Rebuilt:
    """Each tensor as the site sent it last. `fallback` is the server's model and names every tensor."""
    found: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    turns: dict[str, int] = {}  # a repeated round has more than one upload of a site
    for turn, upload in enumerate(view.uploads(site)):
        for name, tensor in tensors_of(upload.payload).items():
            if name in fallback:
                found[name], seen[name], turns[name] = tensor.float(), upload.round, turn
    staleness = max(turns.values()) - min(turns.values()) if turns else 0
    weights = {name: found.get(name, server.float()) for name, server in fallback.items()}
    return Rebuilt(weights, seen, staleness, len(seen) / len(fallback))


def merged(view: View, site: str, fallback: Weights) -> Rebuilt:
    """The site's last upload, completed with the broadcast that it answered, then with `fallback`."""
    uploads = deque(view.uploads(site), maxlen=1)
    if not uploads:
        return Rebuilt({n: w.float() for n, w in fallback.items()}, {}, 0, 0.0)
    last = uploads[-1]
    answered = view.answered(last)
    got = tensors_of(answered.payload) if answered else {}
    sent = tensors_of(last.payload)
    weights = {n: sent.get(n, got.get(n, server)).float() for n, server in fallback.items()}
    seen = {n: last.round for n in sent if n in fallback}
    return Rebuilt(weights, seen, 0, len(seen) / len(fallback))


def reconstruction_error(rebuilt: Weights, true: Weights) -> Error:
    """Over the tensors of `true`, each of which was rebuilt; products over the modules that have a LoRA pair."""
    pairs = [n.removesuffix(".lora_A") for n in true if n.endswith(".lora_A")]
    products = [(product(rebuilt, m), product(true, m)) for m in pairs]
    return Error(_relative(products), _relative([(rebuilt[n], true[n].float()) for n in true]))


def _relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    gap = sum(float((mine - theirs).double().square().sum()) for mine, theirs in pairs)
    norm = sum(float(theirs.double().square().sum()) for _, theirs in pairs)
    if gap == 0:
        return 0.0
    return (gap / norm) ** 0.5 if norm else float("inf")
