"""Rebuild clients from the messages that the server saw (FedRand, section 4.3; our pairing where the paper has none).

| model | each tensor is | attacker |
|---|---|---|
| `latest_factors` | the site's last upload of it in any round; the server's own if it was never sent | the paper's |
| `merge_with_broadcast` | from the site's last upload, or else the broadcast it answered | avoids stale factors |

Tensors are paired by name alone, so one attack covers every method. Under FedAvg both models equal the
client. Under FedPer the private layers remain the server's, as does the private pair under FedPara.
With a residual (FedEx-LoRA, FLoRA) both models also equal the client: the site's pairs plus the residual
that the server sent (`residual_replay`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedveil.attacks.base import AdversaryView
from fedveil.attacks.model_extraction import residual_replay
from fedveil.contract.param_spec import Weights
from fedveil.ops.lora_algebra import factor_product
from fedveil.wire.payloads import payload_tensors

__all__ = ["RebuiltClient", "ReconstructionError", "latest_factors", "merge_with_broadcast", "reconstruction_error"]


@dataclass(frozen=True)
class RebuiltClient:
    """A client's model, rebuilt by the server.

    Attributes:
        weights: every tensor of the spec, fp32.
        seen: the round in which the site last sent each tensor, without tensors that it never sent.
        staleness: participations between the oldest and newest of these tensors; 0 if one upload has them all.
        coverage: fraction of the tensors that the site has ever sent, from 0 to 1.
    """

    weights: Weights
    seen: Mapping[str, int]
    staleness: int
    coverage: float


@dataclass(frozen=True)
class ReconstructionError:
    """Distance of a rebuilt client from the true client: ||rebuilt - true|| / ||true||, Frobenius; 0 if both are zero.

    Attributes:
        products: over B A of every module with a LoRA pair. FedPara's private pair counts only in
            `tensors`.
        tensors: over the factors themselves.
    """

    products: float
    tensors: float


def latest_factors(view: AdversaryView, site: str, fallback: Weights) -> RebuiltClient:
    """Return each tensor as the site last sent it. `fallback` is the server's model with every tensor of the spec."""
    if (whole := _beside_residual(view, site)) is not None:
        return whole
    tensors: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    turns: dict[str, int] = {}  # a repeated round has more than one upload from a site
    for turn, upload in enumerate(view.uploads(site)):
        for name, tensor in view.added(upload).items():
            if name in fallback:
                tensors[name], seen[name], turns[name] = tensor.float(), upload.round, turn
    staleness = max(turns.values()) - min(turns.values()) if turns else 0
    weights = {name: tensors.get(name, server.float()) for name, server in fallback.items()}
    return RebuiltClient(weights, seen, staleness, len(seen) / len(fallback))


def merge_with_broadcast(view: AdversaryView, site: str, fallback: Weights) -> RebuiltClient:
    """Return the site's last upload, completed first from the broadcast it answered and then from `fallback`."""
    if (whole := _beside_residual(view, site)) is not None:
        return whole
    uploads = deque(view.uploads(site), maxlen=1)
    if not uploads:
        return RebuiltClient({n: w.float() for n, w in fallback.items()}, {}, 0, 0.0)
    last = uploads[-1]
    answered = view.answered(last)
    got = payload_tensors(answered.payload) if answered else {}
    sent = view.added(last)
    weights = {n: sent.get(n, got.get(n, server)).float() for n, server in fallback.items()}
    seen = {n: last.round for n in sent if n in fallback}
    return RebuiltClient(weights, seen, 0, len(seen) / len(fallback))


def _beside_residual(view: AdversaryView, site: str) -> RebuiltClient | None:
    """Return the site's last pairs on top of the residual that it trained with.

    Returns None for other runs and under secure aggregation.
    """
    parts = view.participations().get(site)
    if (
        not parts
        or view.is_unseen
        or not residual_replay.has_residual(view.exchange.spec)
        or residual_replay.explain_misfit(view)
    ):
        return None
    weights = {
        **residual_replay.starting_weights(view, parts, len(parts) - 1),
        **residual_replay.final_factors(view, view.read(parts[-1].up)),
    }
    return RebuiltClient(weights, dict.fromkeys(weights, parts[-1].up.round), 0, 1.0)


def reconstruction_error(rebuilt: Weights, true: Weights) -> ReconstructionError:
    """Return the error over the tensors of `true`. Raises KeyError if any tensor was not rebuilt."""
    pairs = [n.removesuffix(".lora_A") for n in true if n.endswith(".lora_A")]
    products = [(factor_product(rebuilt, m), factor_product(true, m)) for m in pairs]
    return ReconstructionError(_relative(products), _relative([(rebuilt[n], true[n].float()) for n in true]))


def _relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    gap = sum(float((mine - theirs).double().square().sum()) for mine, theirs in pairs)
    norm = sum(float(theirs.double().square().sum()) for _, theirs in pairs)
    if gap == 0:
        return 0.0
    return (gap / norm) ** 0.5 if norm else float("inf")
