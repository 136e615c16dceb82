"""Rebuilds clients from what the server saw of them (FedRand, section 4.3; where the paper is open, as we pair).

| model | each tensor is | who would do so |
|---|---|---|
| `latest` | the site's last upload of it, whatever the round; never sent: the server's own | the paper's attacker |
| `merged` | from the site's last upload, else from the broadcast it answered | an attacker who wants no stale factor |

Tensors are paired by their names alone, so this is one attack on every method. Under FedAvg both models are the client
itself. Under FedPer the private layers stay the server's, and under FedPara the private pair. Beside a residual
(FedEx-LoRA, FLoRA) both are the client itself too: the site's pairs, over the residual that the server sent (`replay`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedveil.algebra.factors import product
from fedveil.attacks.base import View
from fedveil.attacks.hidden_model import replay
from fedveil.contract.spec import Weights
from fedveil.wire.payloads import tensors_of


@dataclass(frozen=True)
class RebuiltClient:
    """A client's model as the server can put it together.

    Attributes:
        weights: every tensor of the spec, fp32.
        seen: the round in which the site last sent each tensor. A tensor that it never sent is left out.
        staleness: participations of the site between the oldest and the newest of these; 0 if all are of one upload.
        coverage: the part of the tensors that the site ever sent, 0 to 1.
    """

    weights: Weights
    seen: Mapping[str, int]
    staleness: int
    coverage: float


@dataclass(frozen=True)
class Error:
    """How far a rebuilt client is from the true one: ||rebuilt - true|| / ||true||, Frobenius, 0 where both are zero.

    Attributes:
        products: over B A of every module that has a LoRA pair. FedPara's private pair counts in `tensors` alone.
        tensors: over the factors themselves.
    """

    products: float
    tensors: float


def latest(view: View, site: str, fallback: Weights) -> RebuiltClient:
    """Each tensor as the site sent it last. `fallback` is the server's model, and has every tensor of the spec."""
    if (whole := _beside_residual(view, site)) is not None:
        return whole
    found: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    turns: dict[str, int] = {}  # a repeated round has more than one upload of a site
    for turn, upload in enumerate(view.uploads(site)):
        for name, tensor in view.added(upload).items():
            if name in fallback:
                found[name], seen[name], turns[name] = tensor.float(), upload.round, turn
    staleness = max(turns.values()) - min(turns.values()) if turns else 0
    weights = {name: found.get(name, server.float()) for name, server in fallback.items()}
    return RebuiltClient(weights, seen, staleness, len(seen) / len(fallback))


def merged(view: View, site: str, fallback: Weights) -> RebuiltClient:
    """The site's last upload, completed with the broadcast that it answered, then with `fallback`."""
    if (whole := _beside_residual(view, site)) is not None:
        return whole
    uploads = deque(view.uploads(site), maxlen=1)
    if not uploads:
        return RebuiltClient({n: w.float() for n, w in fallback.items()}, {}, 0, 0.0)
    last = uploads[-1]
    answered = view.answered(last)
    got = tensors_of(answered.payload) if answered else {}
    sent = view.added(last)
    weights = {n: sent.get(n, got.get(n, server)).float() for n, server in fallback.items()}
    seen = {n: last.round for n in sent if n in fallback}
    return RebuiltClient(weights, seen, 0, len(seen) / len(fallback))


def _beside_residual(view: View, site: str) -> RebuiltClient | None:
    """The site's last pairs over the residual that it trained beside; None for other runs, and for uploads unseen."""
    parts = view.participations().get(site)
    if not parts or view.is_unseen or not replay.is_beside(view.exchange.spec) or replay.misfit(view):
        return None
    weights = {**replay.begun(view, parts, len(parts) - 1), **replay.left(view, view.read(parts[-1].up))}
    return RebuiltClient(weights, dict.fromkeys(weights, parts[-1].up.round), 0, 1.0)


def reconstruction_error(rebuilt: Weights, true: Weights) -> Error:
    """The error over the tensors of `true`. Raises KeyError for one that was not rebuilt."""
    pairs = [n.removesuffix(".lora_A") for n in true if n.endswith(".lora_A")]
    products = [(product(rebuilt, m), product(true, m)) for m in pairs]
    return Error(_relative(products), _relative([(rebuilt[n], true[n].float()) for n in true]))


def _relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    gap = sum(float((mine - theirs).double().square().sum()) for mine, theirs in pairs)
    norm = sum(float(theirs.double().square().sum()) for _, theirs in pairs)
    if gap == 0:
        return 0.0
    return (gap / norm) ** 0.5 if norm else float("inf")
