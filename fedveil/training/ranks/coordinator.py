"""Rank 0 in multi-process training: all ranks compute gradients, each for its own part of every batch.

    g = sum_r g_r      g_r: the gradient of the losses of rank r's examples, divided by the terms of the whole step

Rank 0 handles everything else: the order of the examples, the method's penalty, clipping, optimizer states, noise, the
private state and the ledger. Each example belongs to one rank's part, so its gradient is computed once. Rank 0 clips
it and adds noise as if it had computed it itself. The other ranks receive examples as batches and weights as tensors,
and return gradients. They read no data files and store nothing.

| case | result |
|---|---|
| a batch has fewer examples than ranks | the idle ranks compute its first example without counting it, to stay in
  step |
| no rank's loss depends on a tensor | no gradient, as in one process |
| dropout | each rank draws from its own stream |
| a rank ends or fails | RankError with the reason, the next time rank 0 waits for it; this process ends its client
  round |
| train.gradient-accumulation-steps | every batch of a step is divided; gradients are summed once per step |
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

from fedveil.contract.param_spec import Weights, movable_names
from fedveil.contract.task import Rows
from fedveil.contract.trainer import PerExampleGradients
from fedveil.data.batches import ExampleBatch
from fedveil.errors import ConfigError, RankError
from fedveil.rng import RandomStream
from fedveil.training import per_example
from fedveil.training.gradient_backend import GradientBackend, TrainableTask, add_gradient
from fedveil.training.ranks.channel import RankChannel, RankMessage, batch_message
from fedveil.training.ranks.process_group import RankGroup


class DivisibleTask(TrainableTask, Protocol):
    """A task whose batches can be divided among ranks."""

    def collate(self, rows: Rows) -> ExampleBatch:
        """Return one batch for scoring, on the CPU."""
        ...


@dataclass(frozen=True)
class DividedBatch:
    """A batch divided into one part per rank; only the first `counted` parts count."""

    parts: tuple[ExampleBatch, ...]
    counted: int

    @property
    def terms(self) -> int:
        """Return the loss terms of the parts that count."""
        return sum(part.terms for part in self.parts[: self.counted])

    @property
    def tokens(self) -> int:
        """Return the tokens of the parts that count."""
        return sum(part.tokens for part in self.parts[: self.counted])

    def pinned(self) -> DividedBatch:
        """Return the batch with rank 0's part in page-locked memory."""
        return DividedBatch((self.parts[0].pinned(), *self.parts[1:]), self.counted)

    def to(self, device: torch.device) -> DividedBatch:
        """Return the batch with rank 0's part on `device`; the other parts stay where they are until they are sent."""
        return DividedBatch((self.parts[0].to(device), *self.parts[1:]), self.counted)


@dataclass(frozen=True)
class RankProcess:
    """Another rank, as seen by rank 0. Once its channel is closed, `ended` returns why it ended."""

    channel: RankChannel
    ended: Callable[[], str]


@final
class RankTeam(GradientBackend):
    """All ranks that train together.

    Args:
        task: rank 0's task.
        members: ranks 1 and up.
        join: forms the group once every rank is ready; its argument checks that all ranks are alive.
        sharded: whether the base is sharded, so that no rank can compute a loss without the others.
    """

    def __init__(
        self,
        task: DivisibleTask,
        members: Sequence[RankProcess],
        join: Callable[[Callable[[], None]], RankGroup],
        sharded: bool = False,
    ) -> None:
        self._task, self._members, self._sharded = task, members, sharded
        self._answering = False  # whether replies are expected; another rank may finish before rank 0 does
        self._early: dict[int, RankMessage] = {}
        self._all_heard()  # wait until they are ready
        self._group = join(self.check)

    @property
    def size(self) -> int:
        """Return the number of ranks, including this one."""
        return len(self._members) + 1

    def check(self) -> None:
        """Raise RankError if another rank has ended, failed, or sent an unsolicited message."""
        readable, _, _ = select.select([member.channel for member in self._members], [], [], 0)
        for rank, member in enumerate(self._members, 1):
            if member.channel in readable:
                message = self._hear(rank)
                if self._answering and rank not in self._early:
                    self._early[rank] = message
                    continue
                raise RankError(f"processes: rank {rank}, which should be waiting, sent {dict(message.head)}")

    def leave(self) -> None:
        """Leave the group, after the others' channels are closed."""
        self._group.close()

    @override
    @contextlib.contextmanager
    def training(self, dropout: RandomStream) -> Iterator[None]:
        for rank in range(1, self.size):
            self._say(rank, RankMessage({"do": "train", "dropout": dropout.split(f"rank {rank}").key.hex()}))
        try:
            with self._task.training(dropout):
                yield
        finally:
            for member in self._members:
                with contextlib.suppress(OSError):  # a missing rank has already been detected, or will be
                    member.channel.say(RankMessage({"do": "trained"}))

    @override
    def batch(self, rows: Rows) -> DividedBatch:
        return self._divided(rows, self._task.training_batch)

    @override
    def backward(self, step: Sequence[ExampleBatch]) -> Tensor:
        parameters = list(self._task.trained.values())
        terms = sum(batch.terms for batch in step)
        self._all(RankMessage({"do": "weights"}))
        self._group.broadcast([p.detach() for p in parameters])
        losses = []
        for batch in step:
            own = self._given_out(batch, "gradient", {"terms": terms})
            losses.append(add_gradient(self._task, own, terms))
        self._all(RankMessage({"do": "add"}))
        reached = [loss_reach(parameters), *(reply.head["reached"] for reply in self._all_heard())]
        loss = torch.stack(losses).sum()
        self._group.add([*rank_gradients(parameters), loss])
        for parameter, by in zip(parameters, zip(*reached, strict=True), strict=True):
            if not any(by):
                parameter.grad = None
        return loss

    @override
    @torch.no_grad()
    def mean_loss(self, rows: Rows) -> float:
        if not self._sharded:
            return self._task.mean_loss(rows)  # identical to a single process, to the last bit
        ordered = sorted(rows, key=lambda row: int(row.length))
        size = 2 * self._task.config.train.batch_size
        self._all(RankMessage({"do": "weights"}))
        self._group.broadcast([p.detach() for p in self._task.trained.values()])
        total = torch.zeros((), device=next(iter(self._task.trained.values())).device)
        terms = 0
        for start in range(0, len(ordered), size):
            batch = self._divided(ordered[start : start + size], self._task.collate)
            total += self._task.loss_sum(self._given_out(batch.to(total.device), "loss", {}))
            terms += batch.terms
        self._all(RankMessage({"do": "sum"}))
        self._group.add([total])
        return float(total) / terms

    @override
    def gradients(self, rows: Rows, weights: Weights) -> PerExampleGradients:
        if self._sharded:
            raise ConfigError(
                "shard-base: it does not support per-example gradients; set it to false in the node config, or "
                "choose a method that needs none, without [dp]"
            )
        spec = self._task.spec
        if not isinstance(self._task, per_example.PerExampleLoss):
            return per_example.per_example_gradients(self._task, spec, rows, weights)  # raises the error
        size = max(1, -(-len(rows) // self.size))
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        ordered = [weights[name].detach().to(self._device, torch.float32) for name in spec]
        for rank, part in enumerate(parts[1:], 1):
            samples = {str(i): sample for i, sample in enumerate(self._task.samples(part))}
            self._say(rank, RankMessage({"do": "samples"}, samples))
        for rank in range(len(parts[1:]) + 1, self.size):
            self._say(rank, RankMessage({"do": "nothing"}))
        self._answering = True
        self._group.broadcast(ordered)
        results = [per_example.per_example_gradients(self._task, spec, parts[0] if parts else [], weights)]
        heard, moved = self._all_heard(), movable_names(spec)
        home = results[0].losses.device
        for rank, reply in enumerate(heard[: len(parts[1:])], 1):
            count = reply.head["rows"]
            tensors = [torch.empty((count, *spec[name].shape), device=self._device) for name in moved]
            losses = torch.empty(count, device=self._device)
            self._group.receive([*tensors, losses], rank)
            results.append(
                PerExampleGradients(dict(zip(moved, (t.to(home) for t in tensors), strict=True)), losses.to(home))
            )
        together = {name: torch.cat([part.gradients[name] for part in results]) for name in moved}
        return PerExampleGradients(together, torch.cat([part.losses for part in results]))

    @property
    def _device(self) -> torch.device:
        return next(iter(self._task.trained.values())).device

    def _divided(self, rows: Rows, collated: Callable[[Rows], ExampleBatch]) -> DividedBatch:
        size = -(-len(rows) // self.size)
        parts = [collated(rows[i : i + size]) for i in range(0, len(rows), size)]
        idle = self.size - len(parts)
        return DividedBatch((*parts, *([collated(rows[:1])] * idle)), len(parts))

    def _given_out(self, batch: ExampleBatch, do: str, head: Mapping[str, Any]) -> ExampleBatch:
        """Send the other ranks their parts of a batch of this team; return rank 0's part."""
        if not isinstance(batch, DividedBatch):
            raise TypeError(f"batch: a {type(batch).__name__} is not a batch that this team has divided")
        for rank, part in enumerate(batch.parts[1:], 1):
            self._say(rank, batch_message(part, {"do": do, "counts": rank < batch.counted, **head}))
        return batch.parts[0]

    def _all(self, said: RankMessage) -> None:
        for rank in range(1, self.size):
            self._say(rank, said)

    def _say(self, rank: int, said: RankMessage) -> None:
        try:
            self._members[rank - 1].channel.say(said)
        except OSError:
            self._hear(rank)  # its last message, if any
            raise self._gone(rank) from None

    def _all_heard(self) -> list[RankMessage]:
        """Return the next message of each other rank, in order. Raises RankError if one ends or fails meanwhile."""
        messages, self._early, self._answering = self._early, {}, False
        while left := [rank for rank in range(1, self.size) if rank not in messages]:
            readable, _, _ = select.select([self._members[rank - 1].channel for rank in left], [], [])
            for rank in left:
                if self._members[rank - 1].channel in readable:
                    messages[rank] = self._hear(rank)
        return [messages[rank] for rank in sorted(messages)]

    def _hear(self, rank: int) -> RankMessage:
        message = self._members[rank - 1].channel.hear()
        if message is None:
            raise self._gone(rank)
        if "failed" in message.head:
            raise RankError(f"processes: rank {rank} of {self.size} failed: {message.head['failed']}")
        return message

    def _gone(self, rank: int) -> RankError:
        ended = self._members[rank - 1].ended()
        return RankError(f"processes: rank {rank} of {self.size} {ended} before it had computed its part")


def loss_reach(parameters: Sequence[Tensor]) -> list[bool]:
    """Return, for each parameter, whether it has received a gradient from the loss."""
    return [parameter.grad is not None for parameter in parameters]


def rank_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return all gradients; a parameter without a gradient gets a zero gradient."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
