"""A log of the losses during training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from fedveil.contract.task import TrainingProgress, Watch
from fedveil.errors import TaskError

_READ_SECONDS = 0.5  # minimum seconds between two reads of the losses: each read waits for the GPU
_NAMED = 32  # maximum number of examples in a message


@final
class LossLog:
    """The loss of each step. Losses stay on the device and are read several at a time, as each read waits for the GPU.

    Args:
        planned: the planned number of training steps.
        learning_rate: the value of train.learning-rate, for messages.
        watch: receives the last loss at each read.
        rows_of: takes the number of a step that has begun, and returns the indices of its examples; both count from 0.
    """

    def __init__(
        self, planned: int, learning_rate: float, watch: Watch, rows_of: Callable[[int], Sequence[int]]
    ) -> None:
        self.losses: list[float] = []
        self.tokens = 0
        self._planned = planned
        self._learning_rate = learning_rate
        self._watch = watch
        self._rows_of = rows_of
        self._unread: list[Tensor] = []
        self._started = self._last_read = time.perf_counter()

    def add(self, loss: Tensor, tokens: int) -> None:
        """Add a step; from time to time, read all unread losses."""
        self._unread.append(loss)
        self.tokens += tokens
        if time.perf_counter() - self._last_read >= _READ_SECONDS:
            self.read()

    def read(self) -> None:
        """Read the unread losses, if any, and pass the last one to the watch.

        Raises:
            TaskError: one of them is not finite; the error identifies the first such step and its examples only by
                number.
        """
        if not self._unread:
            return
        for loss in torch.stack(self._unread).tolist():
            self.losses.append(loss)
            if not math.isfinite(loss):
                raise self.diverged(f"loss, but {loss}")
        self._unread.clear()
        self._last_read = time.perf_counter()
        seconds = self._last_read - self._started
        self._watch(TrainingProgress(len(self.losses), self._planned, self.losses[-1], self.tokens, seconds))

    def diverged(self, what: str) -> TaskError:
        """Return the error for the last step read. It numbers examples from 1, as in a file with all of them."""
        step = len(self.losses)
        rows = sorted(row + 1 for row in self._rows_of(step - 1))
        more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
        return TaskError(
            f"train.learning-rate: step {step} with {self._learning_rate:g} did not give a finite {what}; it used "
            f"this site's examples {', '.join(map(str, rows[:_NAMED]))}{more}; lower it, set train.max-grad-norm, "
            "or correct an example that differs from the others"
        )
