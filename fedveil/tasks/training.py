"""Local training: AdamW over a site's rows, the same for every task that offers `Trainable`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from fedveil.config import RunConfig
from fedveil.errors import TaskError
from fedveil.method import Spec, Trained, Weights
from fedveil.rng import Stream
from fedveil.tasks.base import Step, Watch, unwatched

RECEIVED_ROWS = 64  # rows of the site behind "loss_received"


@dataclass(frozen=True)
class Row:
    """One encoded row: `ids` with the target from position `start` on."""

    ids: list[int]
    start: int


class Trainable(Protocol):
    """What a task offers to local training."""

    @property
    def config(self) -> RunConfig:
        """The train and run sections are read."""
        ...

    @property
    def spec(self) -> Spec:
        """What is trained."""
        ...

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """The parameters behind the spec; they hold whatever was put in last."""
        ...

    def put(self, weights: Weights) -> None:
        """Puts weights in. Raises TaskError where they are not the spec's."""
        ...

    def loss_sum(self, batch: Sequence[Row]) -> tuple[Tensor, int]:
        """Summed loss of a batch, and the number of terms in it."""
        ...

    def mean_loss(self, encoded: Sequence[Row]) -> float:
        """Mean loss of the rows with the weights put in last."""
        ...


@final
class LocalTraining:
    """One client's training: AdamW anew at each call, a constant learning rate, every row once an epoch."""

    def __init__(self, task: Trainable, rows: Sequence[Row], rng: Stream, watch: Watch = unwatched) -> None:
        if not rows:
            raise TaskError("task.data: expected at least one row to train on, found none; add rows")
        self._task = task
        self._rows = rows
        self._rng = rng
        self._watch = watch

    @property
    def num_examples(self) -> int:
        """Rows of this client."""
        return len(self._rows)

    @property
    def spec(self) -> Spec:
        """The task's spec."""
        return self._task.spec

    def train(self, weights: Weights) -> Trained:
        """Trains from `weights`, which stay as they are; without a step they come back bit for bit.

        The report has loss_received (of `weights`, on the site's first RECEIVED_ROWS rows), loss_trained (mean over the
        steps; without one, loss_received), steps, tokens (all that the steps read, padding apart) and train_seconds.

        Raises:
            TaskError: weights that are not the spec's, or a loss that is no longer finite.
        """
        started = time.perf_counter()
        task = self._task
        task.put(weights)
        with _threads(1 if task.config.run.deterministic else torch.get_num_threads()):
            received = task.mean_loss(self._rows[:RECEIVED_ROWS])
            losses, tokens = self._steps()
        if losses:
            after = {name: p.detach().to(weights[name].device, copy=True) for name, p in task.trained.items()}
        else:
            after = {name: weights[name].clone() for name in task.trained}
        report = {
            "loss_received": received,
            "loss_trained": sum(losses) / len(losses) if losses else received,
            "steps": float(len(losses)),
            "tokens": float(tokens),
            "train_seconds": time.perf_counter() - started,
        }
        return Trained(after, report)

    def _steps(self) -> tuple[list[float], int]:
        """The loss of each step, and the tokens that all of them read."""
        train, task = self._task.config.train, self._task
        parameters = list(task.trained.values())
        optimiser = torch.optim.AdamW(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)
        losses: list[float] = []
        tokens, planned, started = 0, self._planned, time.perf_counter()
        for batch in self._batches():
            loss_sum, count = task.loss_sum(batch)
            loss = loss_sum / count
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            optimiser.zero_grad()
            losses.append(float(loss.detach()))
            tokens += sum(len(row.ids) for row in batch)
            self._watch(Step(len(losses), planned, losses[-1], tokens, time.perf_counter() - started))
            if not math.isfinite(losses[-1]):
                raise TaskError(
                    f"train.learning-rate: expected a finite loss, found {losses[-1]} at step {len(losses)} with "
                    f"{train.learning_rate:g}; lower it"
                )
        return losses, tokens

    @property
    def _planned(self) -> int:
        """Steps of one participation."""
        train = self._task.config.train
        steps = train.epochs * math.ceil(len(self._rows) / train.batch_size)
        return min(steps, train.max_steps) if train.max_steps else steps

    def _batches(self) -> Iterator[Sequence[Row]]:
        """Batches of every epoch, each epoch in an order of its own; at most train.max-steps where that is set."""
        train = self._task.config.train
        generator = self._rng.torch_generator()
        n = len(self._rows)
        left = self._planned
        for _ in range(train.epochs):
            order = torch.randperm(n, generator=generator).tolist()
            for i in range(0, n, train.batch_size):
                if left == 0:
                    return
                left -= 1
                yield [self._rows[j] for j in order[i : i + train.batch_size]]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """`count` threads inside: how a sum is split over threads shows in its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
