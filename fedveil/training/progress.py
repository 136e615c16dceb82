"""The losses of training as it goes."""

from __future__ import annotations

import math
import time
from typing import final

import torch
from torch import Tensor

from fedveil.contract.task import Step, Watch
from fedveil.errors import TaskError

_READ_SECONDS = 0.5  # between two looks at the losses: each one waits for the GPU


@final
class Progress:
    """The steps' losses. They stay on the device until they are read, some at a time: reading waits for the device."""

    def __init__(self, planned: int, learning_rate: float, watch: Watch) -> None:
        self.losses: list[float] = []
        self.tokens = 0
        self._planned = planned
        self._learning_rate = learning_rate
        self._watch = watch
        self._unread: list[Tensor] = []
        self._started = self._last_read = time.perf_counter()

    def add(self, loss: Tensor, tokens: int) -> None:
        """One more step; now and then all that are not read yet are read."""
        self._unread.append(loss)
        self.tokens += tokens
        if time.perf_counter() - self._last_read >= _READ_SECONDS:
            self.read()

    def read(self) -> None:
        """Reads the losses that are not read yet, if there are any, and tells the watch of the last one.

        Raises:
            TaskError: one of them is not finite; the first such step is named.
        """
        if not self._unread:
            return
        for loss in torch.stack(self._unread).tolist():
            self.losses.append(loss)
            if not math.isfinite(loss):
                raise TaskError(
                    f"train.learning-rate: expected a finite loss, found {loss} at step {len(self.losses)} with "
                    f"{self._learning_rate:g}; lower it"
                )
        self._unread.clear()
        self._last_read = time.perf_counter()
        seconds = self._last_read - self._started
        self._watch(Step(len(self.losses), self._planned, self.losses[-1], self.tokens, seconds))
