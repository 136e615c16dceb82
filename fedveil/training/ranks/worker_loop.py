"""The loop of ranks 1 and up: serve rank 0's requests until rank 0 is gone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedveil.contract.param_spec import Spec, movable_names
from fedveil.rng import RandomStream
from fedveil.training import per_example
from fedveil.training.gradient_backend import add_gradient
from fedveil.training.ranks.channel import RankChannel, RankMessage, message_batch
from fedveil.training.ranks.coordinator import DivisibleTask, loss_reach, rank_gradients
from fedveil.training.ranks.process_group import RankGroup


def serve_rank(task: DivisibleTask, channel: RankChannel, group: RankGroup) -> None:
    """Serve rank 0's requests, and return once rank 0 is gone.

    Raises:
        Exception: any error in a computation; the device's state is then unknown, so the process must end.
    """
    rank = _Rank(task, channel, group)
    with contextlib.ExitStack() as around:
        while (message := channel.hear()) is not None:
            match message.head["do"]:
                case "train":
                    around.enter_context(task.training(RandomStream(bytes.fromhex(message.head["dropout"]))))
                case "trained":
                    around.close()
                case asked:
                    getattr(rank, str(asked))(message)


class _Rank:
    """Handlers of rank 0's requests, by request name."""

    def __init__(self, task: DivisibleTask, channel: RankChannel, group: RankGroup) -> None:
        self._task, self._channel, self._group = task, channel, group
        self._losses: list[Tensor] = []

    @property
    def _parameters(self) -> Sequence[Tensor]:
        return list(self._task.trained.values())

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def weights(self, said: RankMessage) -> None:
        """Receive rank 0's weights and begin a step."""
        self._losses = []
        for parameter in self._parameters:
            parameter.grad = None
        self._group.broadcast([p.detach() for p in self._parameters])

    def gradient(self, said: RankMessage) -> None:
        """Add the gradient of a batch's loss over the step's terms, if the batch counts."""
        terms = said.head["terms"] if said.head["counts"] else math.inf
        self._losses.append(add_gradient(self._task, message_batch(said).to(self._device), terms))

    def add(self, said: RankMessage) -> None:
        """End the step."""
        self._channel.say(RankMessage({"reached": loss_reach(self._parameters)}))
        self._group.add([*rank_gradients(self._parameters), torch.stack(self._losses).sum()])

    @torch.no_grad()
    def loss(self, said: RankMessage) -> None:
        """Add the loss of a batch, if it counts."""
        batch_loss = self._task.loss_sum(message_batch(said).to(self._device))
        self._losses.append(batch_loss if said.head["counts"] else torch.zeros_like(batch_loss))

    def sum(self, said: RankMessage) -> None:
        """Reduce the sum of the losses so far to rank 0."""
        self._group.add([torch.stack(self._losses).sum()])

    def samples(self, said: RankMessage) -> None:
        """Return the gradient of each example's own loss."""
        inputs = [said.tensors[str(i)].to(self._device) for i in range(len(said.tensors))]
        spec = self._task.spec
        weights = self._heard(spec)
        task: Any = self._task
        result = per_example.gradients_of_examples(task, inputs, spec, weights)
        self._channel.say(RankMessage({"rows": len(result.losses)}))
        self._group.send([*(result.gradients[name] for name in movable_names(spec)), result.losses])

    def nothing(self, said: RankMessage) -> None:
        """Take part in a step without any examples."""
        self._heard(self._task.spec)
        self._channel.say(RankMessage({"rows": 0}))

    def _heard(self, spec: Spec) -> dict[str, Tensor]:
        weights = {name: torch.empty(t.shape, device=self._device) for name, t in spec.items()}
        self._group.broadcast(list(weights.values()))
        return weights
