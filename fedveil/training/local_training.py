"""Local training: AdamW over a site's examples, the same for every `TrainableTask`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.task import Rows, Watch, ignore_progress
from fedveil.contract.trainer import ExamplesUsed, Frozen, Penalty, TrainingResult, alternating_sets
from fedveil.data import batches
from fedveil.data.batches import ExampleBatch
from fedveil.errors import TaskError
from fedveil.rng import RandomStream
from fedveil.training import optimizers
from fedveil.training.gradient_backend import GradientBackend, LocalBackend, TrainableTask
from fedveil.training.loss_log import LossLog
from fedveil.training.lr_schedule import LearningRateSchedule
from fedveil.training.per_example import LocalGradientSource
from fedveil.training.threads import limit_threads


@final
class LocalTraining:
    """One client's training.

    Each call has a new AdamW, each example once per epoch, and the learning rates of `round_`.

    A step takes train.gradient-accumulation-steps batches of train.batch-size examples. Its loss is the mean over the
    target tokens of all its batches, so the gradient is the same as for a single batch with all of these examples.
    train.max-grad-norm bounds this gradient, including the method's penalty. `watch` is called about twice a second,
    and once after the last step. `by` computes the gradients; if None, this process does so alone.
    """

    def __init__(
        self,
        task: TrainableTask,
        rows: Rows,
        rng: RandomStream,
        watch: Watch = ignore_progress,
        round_: int = 0,
        by: GradientBackend | None = None,
    ) -> None:
        if not rows:
            raise TaskError("task.data: there are no examples to train on; add some")
        self._task = task
        self._by = by or LocalBackend(task)
        self._rows = rows
        self._rng = rng
        self._dropout = rng.split("dropout")
        self._watch = watch
        self._round = round_
        self._taken: list[Sequence[int]] = []  # the examples of each step of the last training

    @property
    def num_examples(self) -> int:
        """Return the number of this client's examples."""
        return len(self._rows)

    @property
    def spec(self) -> Spec:
        """Return the task's parameter spec."""
        return self._task.spec

    @property
    def rows(self) -> LocalGradientSource:
        """Return the per-example gradients of this client's examples."""
        return LocalGradientSource(self._task, self._rows, self._by.gradients)

    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        """Train from `weights`, which do not change.

        Entries that no step moves, or that are `frozen`, stay bit-identical.

        The report has loss_received (of `weights`, on the site's first train.received-loss-examples examples; omitted
        if that is 0), loss_trained (the mean over the steps; without steps, loss_received or omitted), steps, tokens
        (read by all steps, without padding) and train_seconds.

        Raises:
            TaskError: weights that do not match the spec, a loss that is no longer finite, or non-finite weights in the
                result; the error identifies the step and its examples only by number.
            ConfigError: train.gradient-checkpointing or train.compile is unsupported, or the schedule has ended.
        """
        started = time.perf_counter()
        task = self._task
        task.put(weights)
        with limit_threads(task.config):
            scored = self._rows[: task.config.train.received_loss_examples]
            received = [self._by.mean_loss(scored)] if scored else []
            with self._by.training(self._dropout):
                losses, tokens = self._steps(alternating_sets(frozen), penalty)
        if losses:
            after = task.taken(weights)
        else:
            after = {name: weights[name].clone() for name in task.trained}
        report = {"steps": float(len(losses)), "tokens": float(tokens)}
        report |= {"loss_received": received[0]} if received else {}
        report |= {"loss_trained": sum(of) / len(of)} if (of := losses or received) else {}
        report["train_seconds"] = time.perf_counter() - started
        return TrainingResult(after, report, ExamplesUsed.from_steps(self._taken))

    def mean_loss(self, weights: Weights, rows: Rows) -> float:
        """Return the mean loss at `weights`, which do not change, on examples that need not be this client's own.

        Raises:
            TaskError: weights that do not match the spec.
        """
        self._task.put(weights)
        with limit_threads(self._task.config):
            return self._by.mean_loss(rows)

    def gradient(self, weights: Weights) -> TrainingResult:
        """Return the gradient of one batch's mean loss at `weights`, which do not change. No optimizer is involved.

        The batch is the first one in the epoch that `train` would run now. It has train.batch-size examples;
        train.gradient-accumulation-steps, train.epochs and train.max-steps have no effect. A tensor that the loss does
        not depend on gets a zero gradient. All gradients are on the parameters' device.
        The report has loss_received (of this batch), steps (1), tokens and train_seconds.

        Raises:
            TaskError: weights that do not match the spec, or a loss that is not finite.
            ConfigError: train.gradient-checkpointing or train.compile is unsupported.
        """
        started = time.perf_counter()
        task, train = self._task, self._task.config.train
        task.put(weights)
        parameters = list(task.trained.values())
        order = batches.epoch_order(self._rows, train.batch_size, self._rng.torch_generator(), train.bucketing)
        rows = [self._rows[i] for i in order[: train.batch_size]]
        progress = LossLog(1, train.learning_rate, self._watch, lambda step: order[: train.batch_size])
        with limit_threads(task.config), self._by.training(self._dropout):
            _forget(parameters)  # a failed training run may have left part of a step's gradient
            ((batch,),) = batches.load_batches([rows], self._collated, parameters[0].device)
            progress.add(self._by.backward([batch]), batch.tokens)
            progress.read()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in task.trained.items()}
        _forget(parameters)
        report = {"loss_received": progress.losses[0], "steps": 1.0, "tokens": float(batch.tokens)}
        report["train_seconds"] = time.perf_counter() - started
        return TrainingResult(gradients, report, ExamplesUsed.from_steps([order[: train.batch_size]]))

    def _steps(self, frozen: Sequence[Weights], penalty: Penalty | None) -> tuple[list[float], int]:
        """Take the steps; return each step's loss, and the number of tokens read."""
        train, task = self._task.config.train, self._task
        sets = [_Held(task.trained, each) for each in frozen]
        parameters = list(task.trained.values())
        optimiser = optimizers.create(parameters, train)
        optimiser.zero_grad()  # a failed training run may have left part of a step's gradient
        schedule, planned = LearningRateSchedule.from_config(task.config), self._planned
        progress = LossLog(planned, train.learning_rate, self._watch, lambda step: self._taken[step])
        with contextlib.closing(batches.load_batches(self._batches(), self._collated, parameters[0].device)) as steps:
            for number, step in enumerate(steps):
                if schedule:
                    optimizers.set_rate(optimiser, schedule.rate(self._round, number, planned))
                loss = self._by.backward(step)
                if penalty:
                    penalty(self._task.trained).backward()  # type: ignore[no-untyped-call]
                frozen_mask = sets[number % len(sets)]
                frozen_mask.begin(moved=len(sets) > 1)
                if train.max_grad_norm:
                    frozen_mask.quieten()
                    torch.nn.utils.clip_grad_norm_(parameters, train.max_grad_norm)
                optimiser.step()
                frozen_mask.restore()
                optimiser.zero_grad()
                progress.add(loss, sum(batch.tokens for batch in step))
        progress.read()
        if progress.losses and not _are_finite(parameters):
            raise progress.diverged("weight, but NaN or infinity")
        return progress.losses, progress.tokens

    def _collated(self, rows: Rows) -> list[ExampleBatch]:
        """Return the batches of one step."""
        size = self._task.config.train.batch_size
        return [self._by.batch(rows[i : i + size]) for i in range(0, len(rows), size)]

    @property
    def _planned(self) -> int:
        """Return the number of steps of one participation."""
        train = self._task.config.train
        steps = train.epochs * math.ceil(len(self._rows) / (train.batch_size * train.gradient_accumulation_steps))
        return min(steps, train.max_steps) if train.max_steps else steps

    def _batches(self) -> Iterator[Rows]:
        """Yield each step's examples, in a new order in every epoch, for at most train.max-steps steps if set."""
        train = self._task.config.train
        generator = self._rng.torch_generator()
        size = train.batch_size * train.gradient_accumulation_steps
        left = self._planned
        self._taken = []
        for _ in range(train.epochs):
            order = batches.epoch_order(self._rows, train.batch_size, generator, train.bucketing)
            for i in range(0, len(order), size):
                if left == 0:
                    return
                left -= 1
                self._taken.append(order[i : i + size])
                yield [self._rows[j] for j in self._taken[-1]]


@final
class _Held:
    """Frozen entries of the trained tensors.

    A fully frozen tensor has no gradient, so the optimizer neither moves it nor creates state for it. In other tensors,
    frozen entries are restored after the step. This is exact because AdamW treats entries independently.
    """

    def __init__(self, trained: Mapping[str, Tensor], frozen: Weights) -> None:
        if unknown := sorted(set(frozen) - set(trained)):
            raise TaskError(f"frozen: {unknown[0]} is not a tensor of the spec; use the same adapter on both sides")
        masks = [(p, frozen[name].to(p.device)) for name, p in trained.items() if name in frozen]
        whole = [bool(mask.all()) for _, mask in masks]
        self._whole = [p for (p, _), all_of_it in zip(masks, whole, strict=True) if all_of_it]
        self._masked = [pair for pair, all_of_it in zip(masks, whole, strict=True) if not all_of_it]
        self._kept = self._now()

    def begin(self, moved: bool) -> None:
        """Prepare a step once its gradients exist. `moved`: earlier steps may have moved entries frozen in this one."""
        for parameter in self._whole:
            parameter.grad = None
        if moved:
            self._kept = self._now()

    def _now(self) -> list[Tensor]:
        return [p.detach().masked_select(mask) for p, mask in self._masked]

    def quieten(self) -> None:
        """Zero the gradient of frozen entries so that they do not affect gradient-norm clipping."""
        for parameter, mask in self._masked:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(mask, 0.0)

    @torch.no_grad()
    def restore(self) -> None:
        for (parameter, mask), values in zip(self._masked, self._kept, strict=True):
            parameter.masked_scatter_(mask, values)


def _are_finite(parameters: list[Tensor]) -> bool:
    """Return whether all entries are finite. Waits for the device once."""
    largest = [torch.linalg.vector_norm(p.detach(), math.inf) for p in parameters if p.numel()]  # NaN is preserved
    return bool(torch.stack(largest).isfinite().all())


def _forget(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None
