"""A rank from 1 on: it computes what rank 0 asks for, until rank 0 is gone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedveil.contract.spec import Spec, movable
from fedveil.rng import Stream
from fedveil.training import per_sample
from fedveil.training.computing import add_gradient
from fedveil.training.ranks.channel import Channel, Said, batch_of
from fedveil.training.ranks.group import Group
from fedveil.training.ranks.team import Divisible, gradients_of, reach


def serve(task: Divisible, channel: Channel, group: Group) -> None:
    """Returns once rank 0 is gone.

    Raises:
        Exception: whatever a computation raises; what the device then holds is unknown, so the process must end.
    """
    rank = _Rank(task, channel, group)
    with contextlib.ExitStack() as around:
        while (said := channel.hear()) is not None:
            match said.head["do"]:
                case "train":
                    around.enter_context(task.training(Stream(bytes.fromhex(said.head["dropout"]))))
                case "trained":
                    around.close()
                case asked:
                    getattr(rank, str(asked))(said)


class _Rank:
    """What is asked, by its name."""

    def __init__(self, task: Divisible, channel: Channel, group: Group) -> None:
        self._task, self._channel, self._group = task, channel, group
        self._losses: list[Tensor] = []

    @property
    def _parameters(self) -> Sequence[Tensor]:
        return list(self._task.trained.values())

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def weights(self, said: Said) -> None:
        """A step begins, at the weights that rank 0 has."""
        self._losses = []
        for parameter in self._parameters:
            parameter.grad = None
        self._group.broadcast([p.detach() for p in self._parameters])

    def gradient(self, said: Said) -> None:
        """Of a batch's loss over the step's terms, if it counts."""
        terms = said.head["terms"] if said.head["counts"] else math.inf
        self._losses.append(add_gradient(self._task, batch_of(said).to(self._device), terms))

    def add(self, said: Said) -> None:
        """The step ends."""
        self._channel.say(Said({"reached": reach(self._parameters)}))
        self._group.add([*gradients_of(self._parameters), torch.stack(self._losses).sum()])

    @torch.no_grad()
    def loss(self, said: Said) -> None:
        """Of a batch, if it counts."""
        found = self._task.loss_sum(batch_of(said).to(self._device))
        self._losses.append(found if said.head["counts"] else torch.zeros_like(found))

    def sum(self, said: Said) -> None:
        """Of the losses so far."""
        self._group.add([torch.stack(self._losses).sum()])

    def samples(self, said: Said) -> None:
        """The gradient of each row's own loss."""
        inputs = [said.tensors[str(i)].to(self._device) for i in range(len(said.tensors))]
        spec = self._task.spec
        weights = self._heard(spec)
        task: Any = self._task
        found = per_sample.of_samples(task, inputs, spec, weights)
        self._channel.say(Said({"rows": len(found.losses)}))
        self._group.send([*(found.gradients[name] for name in movable(spec)), found.losses])

    def nothing(self, said: Said) -> None:
        """No row of a step is this rank's."""
        self._heard(self._task.spec)
        self._channel.say(Said({"rows": 0}))

    def _heard(self, spec: Spec) -> dict[str, Tensor]:
        weights = {name: torch.empty(t.shape, device=self._device) for name, t in spec.items()}
        self._group.broadcast(list(weights.values()))
        return weights
