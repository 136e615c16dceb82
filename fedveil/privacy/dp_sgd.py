"""DP-SGD in place of a client's plain training, under any method that trains (Abadi et al. 2016).

    w <- w - eta (sum_i clip_C(g_i) + N(0, (z C)^2)) / B,   rows by Poisson sampling, `frozen` entries as they were

The section `dp.*` of the run config asks for it: dp.clip = C, dp.noise = z, dp.learning-rate = eta, dp.epsilon.

Formal guarantees, for each row of the site, against everyone but that site:
1. A training is `steps` Poisson-subsampled Gaussian releases of multiplier z; `privacy_spent` says so to the accountant, and
   the site's ledger is charged before the rows are looked at. What a method makes of the trained weights is
   post-processing: it is given nothing that looks at a row in another way.
2. Sums are divided by the batch size that was meant, and no loss is reported. The number of rows is beside every upload;
   it is taken for public under add-or-remove-one, and does not change under replace-one.
3. With an epsilon, a turn that would take a record above it is refused by the site before its rows are looked at.

| case | result |
|---|---|
| noise 0 | clipped only: epsilon infinite |
| a batch that Poisson sampling left empty | a step of noise alone |
| a frozen entry | bit for bit as it was; its part of a gradient counts for no clipping |
| a penalty of the method's | its gradient is added to every step, after the noise: it looks at no row |
| a batch larger than the site's rows | ConfigError, before its rows are looked at |
| a method that trains twice in a turn | charged twice |
| a method with noise of its own, or one that sends gradients | ConfigError before any site is asked |
| train.accumulate above 1; a task without row gradients | ConfigError before any site is asked |
| run.deterministic with an epsilon | ConfigError: seeded noise protects nobody |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from fedveil.config import DpConfig, RunConfig
from fedveil.contract.budget import (
    Budget,
    Claim,
    Neighbours,
    Plan,
    Sampling,
    Spent,
    check_claim,
    check_number,
    check_seeded,
)
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Batch, FeatureGradients, Penalty, PerSample, RowGradients, Trained, Trainer
from fedveil.errors import ConfigError
from fedveil.privacy import accounting, clipping, noise
from fedveil.rng import Stream


@final
@dataclass(frozen=True)
class DpSgd(Claim):
    """How the noisy steps are made.

    Attributes:
        clip, noise: C and the multiplier z.
        learning_rate: eta, of plain SGD.
        epsilon: no record is charged more; None: charges are counted and stop nothing.
        delta, neighbours: of every epsilon.
    """

    clip: float
    noise: float
    learning_rate: float
    epsilon: float | None = None
    delta: float = 1e-5
    neighbours: Neighbours = Neighbours.REPLACE_ONE

    def __post_init__(self) -> None:
        check_number("dp.clip", self.clip)
        check_number("dp.noise", self.noise, zero=True)
        check_number("dp.learning-rate", self.learning_rate)
        check_claim(self.epsilon, self.delta, "poisson", self.neighbours)
        if self.epsilon is not None and self.noise == 0:
            raise ConfigError(
                "dp.noise: expected more than 0 with an epsilon, found 0; `fedveil privacy plan` says how much it takes"
            )

    @classmethod
    def of(cls, config: DpConfig) -> DpSgd | None:
        """What the section asks for; None where it is left alone. Raises ConfigError."""
        if config == DpConfig():
            return None
        if config.clip == 0:
            raise ConfigError("dp.clip: expected a number above 0 with other keys of [dp] set, found 0; set it")
        epsilon = config.epsilon or None
        return cls(
            config.clip, config.noise, config.learning_rate, epsilon, config.delta, Neighbours(config.neighbours)
        )

    @property
    @override
    def budget(self) -> Budget:
        return Budget(math.inf if self.epsilon is None else self.epsilon, self.delta, self.neighbours)

    @override
    def privacy_spent(self, plan: Plan) -> Spent:
        """Poisson-subsampled Gaussians."""
        return accounting.spent(self.noise, "poisson", plan, across_rounds=False)


def claim_of(method: Method, dp: DpSgd | None) -> Claim | None:
    """What a run promises of its rows: by `dp.*`, or by its method; None where it promises nothing."""
    return dp or (method if isinstance(method, Claim) else None)


def checked_claim(method: Method, config: RunConfig, has_row_gradients: bool) -> Claim | None:
    """The run's claim, once everything that it needs is there.

    Raises:
        ConfigError: `dp.*` with a method or a task that it does not go with, or a deterministic run with an epsilon.
    """
    dp = DpSgd.of(config.dp)
    if dp is not None:
        found = ""
        if isinstance(method, Claim):
            found = f"{config.method.name}, which adds noise of its own"
        elif method.sends == "gradients":
            found = f"{config.method.name}, which sends gradients"
        elif not has_row_gradients:
            found = f"the task {config.task.name}, which has no gradients of single rows"
        elif config.train.accumulate > 1:
            found = (
                f"train.accumulate = {config.train.accumulate}, which noisy steps do not know; raise train.batch-size"
            )
        if found:
            raise ConfigError(
                f"dp: expected a run whose clients can train by noisy steps, found {found}; leave [dp] out"
            )
    claim = claim_of(method, dp)
    check_seeded(claim.budget if claim else None, config.run.deterministic)
    return claim


@final
class NoisyTrainer(Trainer):
    """Trains by noisy steps on rows apart, and offers nothing else.

    Args:
        spec: what is trained.
        rows: metered, where the run makes a claim.
    """

    def __init__(self, spec: Spec, rows: RowGradients, how: DpSgd, ctx: RoundContext) -> None:
        self._spec, self._rows, self._how, self._ctx = spec, rows, how, ctx
        self._steps = 0

    @property
    @override
    def num_examples(self) -> int:
        return self._rows.num_examples

    @property
    @override
    def spec(self) -> Spec:
        return self._spec

    @property
    @override
    def rows(self) -> RowGradients:
        return _NoRows(self._rows.num_examples)

    @override
    def train(self, weights: Weights, frozen: Weights | None = None, penalty: Penalty | None = None) -> Trained:
        """`steps` noisy steps from `weights`, which stay as they are. Reports how many there were in this turn."""
        held, how, rows = frozen or {}, self._how, self._rows
        now = {n: w.clone() for n, w in weights.items()}
        drawn = rows.batches("poisson", rows.steps, Stream(self._ctx.noise("rows")(32)))
        for step, batch in enumerate(drawn):
            found = rows.per_sample(now, batch).gradients
            free = {n: g.masked_fill(held[n], 0.0) if n in held else g for n, g in found.items()}
            pull = _gradient(penalty, now) if penalty else {}
            for name, total in clipping.clipped_sum(free, how.clip).items():
                noisy = noise.added(total, how.clip * how.noise, self._ctx.noise(f"noise {name} {step}"))
                change = (how.learning_rate / rows.batch_size) * noisy.to(now[name])
                change = change + how.learning_rate * pull[name] if name in pull else change
                now[name] = now[name] - (change.masked_fill(held[name], 0.0) if name in held else change)
        self._steps += len(drawn)
        return Trained(now, {"steps": float(self._steps)})

    @override
    def gradient(self, weights: Weights) -> Trained:
        """Refused: nothing accounts for it."""
        raise ConfigError("gradient: expected a method that trains under noisy steps, found one that sends a gradient")


def _gradient(penalty: Penalty, weights: Weights) -> Weights:
    """Of the penalty at these weights."""
    leaves = {n: w.detach().requires_grad_() for n, w in weights.items()}
    found = torch.autograd.grad(penalty(leaves), list(leaves.values()), allow_unused=True)
    return {n: g for n, g in zip(leaves, found, strict=True) if g is not None}


@final
class _NoRows(RowGradients):
    """What a method sees of the rows under noisy steps: that they are there."""

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples

    @property
    @override
    def batch_size(self) -> int:
        return 0

    @property
    @override
    def steps(self) -> int:
        return 0

    @property
    @override
    def num_examples(self) -> int:
        return self._num_examples

    @override
    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        raise ConfigError("batches: expected a method that trains under noisy steps, found one with steps of its own")

    @override
    def per_sample(self, weights: Weights, batch: Batch) -> PerSample:
        raise ConfigError("batches: expected a method that trains under noisy steps, found one with steps of its own")

    @override
    def feature(self, weights: Weights, batch: Batch) -> FeatureGradients:
        raise ConfigError("batches: expected a method that trains under noisy steps, found one with steps of its own")
