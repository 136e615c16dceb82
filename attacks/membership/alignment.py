"""The adaptive attacker on partial uploads: does the sent factor's update point where this row would push it?

The server broadcast the start of each sent tensor, so it knows that start to the bit, and it sees where the site left
the tensor. A row that was trained on has moved the tensor along minus the row's own gradient. A factor that the site
kept is put at the last value that the server saw of it, as `factor_pairing` does. Where the method lets no site keep
anything (FedRand w/o past) its start is the broadcast one, known to the bit. Gradients of single rows as membership
signals: Nasr, Shokri, Houmansadr 2019, and Li, Rezaei, Liu 2023 (cosine attack).

    score(x) = mean over the last uploads of cos(-dL(x)/dS at the start, S_sent - S_broadcast),  S = the sent tensors
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from fedveil.attacks.base import Knowledge, Sighting, UploadAttack, View
from fedveil.attacks.reconstruction.gradients import observed
from fedveil.contract.method import Method
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows
from fedveil.strategies.fedrand import FedRand
from fedveil.wire.payloads import tensors_of


class Alignment(UploadAttack):
    """The score "alignment": the mean cosine over the site's last upload."""

    @override
    def scores(self, view: View, site: str, knowledge: Knowledge, rows: Rows) -> dict[str, NDArray[np.float64]]:
        return {"alignment": alignment_scores(view, site, knowledge, rows)}


def alignment_scores(view: View, site: str, knowledge: Knowledge, rows: Rows, uploads: int = 1) -> NDArray[np.float64]:
    """(rows,) mean cosine of each row over the site's last `uploads` uploads; 0 where nothing moved.

    The task must train by gradients of its own (`fedveil.training.computing.Trainable`).
    """
    total = np.zeros(len(rows))
    taken = deque(turns(view, site, knowledge.initial), maxlen=uploads)
    task: Any = knowledge.task
    for turn in taken:
        task.put(turn.start)
        total += [cosine(row_gradient(task, row), turn.moved) for row in rows]
    return total / max(1, len(taken))


@dataclass(frozen=True)
class Turn:
    """One participation of a site, as the server knows it.

    Attributes:
        round: in which it was.
        start: every tensor of the spec.
        moved: where the site left each tensor that it sent, less its start.
    """

    round: int
    start: Weights
    moved: Mapping[str, Tensor]


def turns(view: View, site: str, initial: Weights) -> Iterator[Turn]:
    """Each participation of a site, in their order."""
    seen: dict[str, Tensor] = {}
    for upload in view.uploads(site):
        answered = view.answered(upload)
        got = tensors_of(answered.payload) if answered else {}
        sent = {n: w.float() for n, w in _left(view, upload, got).items() if n in initial}
        kept = {**initial, **got, **seen}  # a tensor that is not sent: the site's own past, where it was ever seen
        start = {n: (got.get(n, kept[n]) if n in sent else kept[n]).float() for n in initial}
        yield Turn(upload.round, start, {n: w - start[n] for n, w in sent.items()})
        if _keeps_past(view.exchange.method):
            seen |= sent


def _left(view: View, upload: Sighting, got: Weights) -> Weights:
    """Where the site left each tensor that it sent; of a gradient: one step of rate 1 that moves no withheld entry."""
    exchange = view.exchange
    if exchange.method.sends != "gradients":
        return view.added(upload)
    shown = observed(exchange.method, upload.payload, exchange.spec)
    return {n: got[n].float() - torch.where(shown.seen[n], g.float(), 0.0) for n, g in shown.values.items() if n in got}


def _keeps_past(method: Method) -> bool:
    """Whether a site starts what it does not send from its own past: the adversary knows the method and its fields."""
    return method.past if isinstance(method, FedRand) else True


def row_gradient(task: Any, row: Any) -> dict[str, Tensor]:
    """The gradient of one row's loss at the weights put in last, on the CPU; without tensors that it does not reach."""
    for parameter in task.trained.values():
        parameter.grad = None
    task.loss_sum(task.collate([row]).to(task.device)).backward()
    found = {name: p.grad.detach().cpu() for name, p in task.trained.items() if p.grad is not None}
    for parameter in task.trained.values():
        parameter.grad = None
    return found


def cosine(gradient: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> float:
    """Of minus a row's gradient with a move, over the tensors that have both; 0 where one of them is 0."""
    length = sum(float(d.double().square().sum()) for d in moved.values()) ** 0.5
    dot = square = 0.0
    for name, g in gradient.items():
        if name in moved:
            dot -= float((g * moved[name]).double().sum())
            square += float(g.double().square().sum())
    return dot / (square**0.5 * length) if square and length else 0.0
