"""Rank 0: a training whose gradients all ranks compute, each of its part of every batch.

    g = sum_r g_r      g_r: the gradient of the losses of rank r's rows, over the terms of the whole step

Rank 0 holds what a training has beside its gradients: the order of the rows, the method's penalty, clipping, the
optimiser's states, noise, the private state, and the ledger. A row is in one rank's part, so its own gradient is made
once; rank 0 clips it and adds noise as if it had made it. The others get rows as batches, weights as tensors, and
give gradients; they read no file of rows and keep nothing.

| case | result |
|---|---|
| fewer rows than ranks in a batch | the rest compute its first row, which counts for nothing: all stay in step |
| a tensor that no rank's loss reaches | no gradient, as in one process |
| dropout | each rank draws from a stream of its own |
| a rank ends, or fails | RankError with the reason, at the next wait for it; this process ends its turn |
| train.accumulate | every batch of a step is divided; gradients are added up once a step |
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

from fedveil.contract.spec import Weights, movable
from fedveil.contract.task import Rows
from fedveil.contract.trainer import PerSample
from fedveil.errors import ConfigError, RankError
from fedveil.rng import Stream
from fedveil.rows.batches import AnyBatch
from fedveil.training import per_sample
from fedveil.training.computing import Computing, Trainable, add_gradient
from fedveil.training.ranks.channel import Channel, Said, of_batch
from fedveil.training.ranks.group import Group


class Divisible(Trainable, Protocol):
    """A task whose batches can be divided."""

    def collate(self, rows: Rows) -> AnyBatch:
        """One batch for scoring, on the CPU."""
        ...


@dataclass(frozen=True)
class Divided:
    """A batch in as many parts as there are ranks, of which the first `counted` count."""

    parts: tuple[AnyBatch, ...]
    counted: int

    @property
    def terms(self) -> int:
        """Of the parts that count."""
        return sum(part.terms for part in self.parts[: self.counted])

    @property
    def tokens(self) -> int:
        """Of the parts that count."""
        return sum(part.tokens for part in self.parts[: self.counted])

    def pinned(self) -> Divided:
        """Rank 0's part in page-locked memory."""
        return Divided((self.parts[0].pinned(), *self.parts[1:]), self.counted)

    def to(self, device: torch.device) -> Divided:
        """Rank 0's part on `device`; the others' stay where they are, to be sent."""
        return Divided((self.parts[0].to(device), *self.parts[1:]), self.counted)


@dataclass(frozen=True)
class Member:
    """Another rank, as rank 0 sees it. `ended` says why it ended, once its channel is closed."""

    channel: Channel
    ended: Callable[[], str]


@final
class Team(Computing):
    """All ranks of one training.

    Args:
        task: rank 0's own.
        members: the ranks from 1 on.
        join: gives the group, once every rank is ready; it gets what looks whether all are there.
        sharded: the base is divided among the ranks, so that none computes a loss without the others.
    """

    def __init__(
        self,
        task: Divisible,
        members: Sequence[Member],
        join: Callable[[Callable[[], None]], Group],
        sharded: bool = False,
    ) -> None:
        self._task, self._members, self._sharded = task, members, sharded
        self._answering = False  # the others were asked what they answer: one may be done before rank 0 is
        self._early: dict[int, Said] = {}
        self._all_heard()  # that they are ready
        self._group = join(self.check)

    @property
    def size(self) -> int:
        """Ranks, this one among them."""
        return len(self._members) + 1

    def check(self) -> None:
        """Raises RankError where another rank has ended or failed, or says what nobody has asked it."""
        readable, _, _ = select.select([member.channel for member in self._members], [], [], 0)
        for rank, member in enumerate(self._members, 1):
            if member.channel in readable:
                said = self._hear(rank)
                if self._answering and rank not in self._early:
                    self._early[rank] = said
                    continue
                raise RankError(f"processes: expected rank {rank} to wait, found that it said {dict(said.head)}")

    def leave(self) -> None:
        """Leaves the group, once the others' channels are closed."""
        self._group.close()

    @override
    @contextlib.contextmanager
    def training(self, dropout: Stream) -> Iterator[None]:
        for rank in range(1, self.size):
            self._say(rank, Said({"do": "train", "dropout": dropout.split(f"rank {rank}").key.hex()}))
        try:
            with self._task.training(dropout):
                yield
        finally:
            for member in self._members:
                with contextlib.suppress(OSError):  # one that is gone was noticed before, or will be
                    member.channel.say(Said({"do": "trained"}))

    @override
    def batch(self, rows: Rows) -> Divided:
        return self._divided(rows, self._task.training_batch)

    @override
    def backward(self, step: Sequence[AnyBatch]) -> Tensor:
        parameters = list(self._task.trained.values())
        terms = sum(batch.terms for batch in step)
        self._all(Said({"do": "weights"}))
        self._group.broadcast([p.detach() for p in parameters])
        losses = []
        for batch in step:
            own = self._given_out(batch, "gradient", {"terms": terms})
            losses.append(add_gradient(self._task, own, terms))
        self._all(Said({"do": "add"}))
        reached = [reach(parameters), *(said.head["reached"] for said in self._all_heard())]
        loss = torch.stack(losses).sum()
        self._group.add([*gradients_of(parameters), loss])
        for parameter, by in zip(parameters, zip(*reached, strict=True), strict=True):
            if not any(by):
                parameter.grad = None
        return loss

    @override
    @torch.no_grad()
    def mean_loss(self, rows: Rows) -> float:
        if not self._sharded:
            return self._task.mean_loss(rows)  # as it is alone, to the last bit
        ordered = sorted(rows, key=lambda row: int(row.length))
        size = 2 * self._task.config.train.batch_size
        self._all(Said({"do": "weights"}))
        self._group.broadcast([p.detach() for p in self._task.trained.values()])
        total = torch.zeros((), device=next(iter(self._task.trained.values())).device)
        terms = 0
        for start in range(0, len(ordered), size):
            batch = self._divided(ordered[start : start + size], self._task.collate)
            total += self._task.loss_sum(self._given_out(batch.to(total.device), "loss", {}))
            terms += batch.terms
        self._all(Said({"do": "sum"}))
        self._group.add([total])
        return float(total) / terms

    @override
    def gradients(self, rows: Rows, weights: Weights) -> PerSample:
        if self._sharded:
            raise ConfigError(
                "shard-base: expected false for gradients of single rows, found true; set it to false in the node "
                "config, or choose a method without them, and no [dp]"
            )
        spec = self._task.spec
        if not isinstance(self._task, per_sample.SampleLoss):
            return per_sample.gradients(self._task, spec, rows, weights)  # it says what is missing
        size = max(1, -(-len(rows) // self.size))
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        ordered = [weights[name].detach().to(self._device, torch.float32) for name in spec]
        for rank, part in enumerate(parts[1:], 1):
            samples = {str(i): sample for i, sample in enumerate(self._task.samples(part))}
            self._say(rank, Said({"do": "samples"}, samples))
        for rank in range(len(parts[1:]) + 1, self.size):
            self._say(rank, Said({"do": "nothing"}))
        self._answering = True
        self._group.broadcast(ordered)
        found = [per_sample.gradients(self._task, spec, parts[0] if parts else [], weights)]
        heard, moved = self._all_heard(), movable(spec)
        home = found[0].losses.device
        for rank, said in enumerate(heard[: len(parts[1:])], 1):
            count = said.head["rows"]
            tensors = [torch.empty((count, *spec[name].shape), device=self._device) for name in moved]
            losses = torch.empty(count, device=self._device)
            self._group.receive([*tensors, losses], rank)
            found.append(PerSample(dict(zip(moved, (t.to(home) for t in tensors), strict=True)), losses.to(home)))
        together = {name: torch.cat([part.gradients[name] for part in found]) for name in moved}
        return PerSample(together, torch.cat([part.losses for part in found]))

    @property
    def _device(self) -> torch.device:
        return next(iter(self._task.trained.values())).device

    def _divided(self, rows: Rows, collated: Callable[[Rows], AnyBatch]) -> Divided:
        size = -(-len(rows) // self.size)
        parts = [collated(rows[i : i + size]) for i in range(0, len(rows), size)]
        idle = self.size - len(parts)
        return Divided((*parts, *([collated(rows[:1])] * idle)), len(parts))

    def _given_out(self, batch: AnyBatch, do: str, head: Mapping[str, Any]) -> AnyBatch:
        """Sends the others their parts of a batch of this team; rank 0's own."""
        if not isinstance(batch, Divided):
            raise TypeError(f"batch: expected one that this team has divided, found {type(batch).__name__}")
        for rank, part in enumerate(batch.parts[1:], 1):
            self._say(rank, of_batch(part, {"do": do, "counts": rank < batch.counted, **head}))
        return batch.parts[0]

    def _all(self, said: Said) -> None:
        for rank in range(1, self.size):
            self._say(rank, said)

    def _say(self, rank: int, said: Said) -> None:
        try:
            self._members[rank - 1].channel.say(said)
        except OSError:
            self._hear(rank)  # what it said last, if it did
            raise self._gone(rank) from None

    def _all_heard(self) -> list[Said]:
        """What each of the others says next, in their order. Raises RankError for one that ends or fails meanwhile."""
        found, self._early, self._answering = self._early, {}, False
        while left := [rank for rank in range(1, self.size) if rank not in found]:
            readable, _, _ = select.select([self._members[rank - 1].channel for rank in left], [], [])
            for rank in left:
                if self._members[rank - 1].channel in readable:
                    found[rank] = self._hear(rank)
        return [found[rank] for rank in sorted(found)]

    def _hear(self, rank: int) -> Said:
        said = self._members[rank - 1].channel.hear()
        if said is None:
            raise self._gone(rank)
        if "failed" in said.head:
            raise RankError(f"processes: expected rank {rank} of {self.size} to compute, found {said.head['failed']}")
        return said

    def _gone(self, rank: int) -> RankError:
        ended = self._members[rank - 1].ended()
        return RankError(f"processes: expected rank {rank} of {self.size} to compute, found that it {ended}")


def reach(parameters: Sequence[Tensor]) -> list[bool]:
    """Which of them the loss has reached."""
    return [parameter.grad is not None for parameter in parameters]


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Of all; zeros, which are theirs from now on, where the loss has not reached one."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
