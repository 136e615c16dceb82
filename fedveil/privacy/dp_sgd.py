"""DP-SGD (Abadi et al. 2016) instead of a client's plain training, for any method that trains.

    w <- w - eta (sum_i clip_C(g_i) + N(0, (z C)^2)) / B,   rows by Poisson sampling, `frozen` entries unchanged

The section `dp.*` of the run config turns it on: dp.clip-norm = C, dp.noise-multiplier = z,
dp.learning-rate = eta, dp.epsilon.

Formal guarantees, for each example of the site, against everyone but that site, with a server that does
not time the site:
1. A training pass consists of `steps` Poisson-subsampled Gaussian releases with multiplier z. `privacy_spent`
   reports them to the accountant, and the site's ledger is charged before the examples are used. A method's use
   of the trained weights is post-processing, because the method has no other access to the examples.
2. Sums are divided by the configured batch size, and no loss is reported. Every upload states the number of examples:
   zero-out treats this number as public, and replace-one never changes it.
3. With an epsilon set, the site refuses a client round that would charge a record more than that, before the examples
   are used.

| case | result |
|---|---|
| noise 0 | gradients are only clipped: epsilon is infinite |
| an empty Poisson batch | a noise-only step |
| a frozen entry | stays unchanged, bit for bit, in the steps in which it is frozen; its part of a gradient does not
  count for clipping |
| a penalty from the method | its gradient is added to every step after the noise, because it depends on no example |
| a batch larger than the site's examples | ConfigError, before its examples are used |
| a method that trains twice in a client round | charged twice |
| a method that adds noise itself or sends gradients | ConfigError before any site is asked |
| train.gradient-accumulation-steps above 1; a task without per-example gradients | ConfigError before any site is
  asked |
| secure.noise = "sum" | one step without noise; the sites' shares are added to the integers (distributed_dgauss.py) |
| run.deterministic with an epsilon | ConfigError: seeded noise gives no protection |

The examples in a site's client round are drawn exactly as the accountant assumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from fedveil.config import DpConfig
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.privacy import (
    Adjacency,
    PrivacyBudget,
    PrivacyGuarantee,
    Sampling,
    SamplingPlan,
    Spent,
    SummableNoise,
    check_batch,
    check_claim,
    check_number,
)
from fedveil.contract.trainer import (
    BatchIndices,
    Frozen,
    Penalty,
    PerExampleFeatureGradients,
    PerExampleGradients,
    PerExampleGradientSource,
    TrainingResult,
    alternating_sets,
)
from fedveil.contract.trainer_wrappers import PerExampleTrainerWrapper
from fedveil.errors import ConfigError
from fedveil.privacy import accounting, clipping, gaussian_noise
from fedveil.rng import RandomStream

__all__ = ["DpSgdConfig", "NoisyTrainer"]


@final
@dataclass(frozen=True)
class DpSgdConfig(PrivacyGuarantee):
    """The parameters of the noisy steps.

    Attributes:
        clip, noise: the bound C and the noise multiplier z.
        learning_rate: eta of plain SGD.
        epsilon: limit on each record's charge; with None, charges are counted but not limited.
        delta, neighbours: delta and adjacency of every epsilon.
    """

    clip: float
    noise: float
    learning_rate: float
    epsilon: float | None = None
    delta: float = 1e-5
    neighbours: Adjacency = Adjacency.REPLACE_ONE

    def __post_init__(self) -> None:
        check_number("dp.clip-norm", self.clip)
        check_number("dp.noise-multiplier", self.noise, zero=True)
        check_number("dp.learning-rate", self.learning_rate)
        check_claim(self.epsilon, self.delta, "poisson", self.neighbours)
        if self.epsilon is not None and self.noise == 0:
            raise ConfigError(
                "dp.noise-multiplier: an epsilon requires a value above 0; `fedveil privacy plan` computes it"
            )

    @classmethod
    def from_config(cls, config: DpConfig) -> DpSgdConfig | None:
        """Create the settings from the section; return None if it does not ask for noisy steps. Raises ConfigError."""
        if not config.is_noisy:
            return None
        if config.clip_norm == 0:
            raise ConfigError("dp.clip-norm: other keys of [dp] are set, but this one is 0; set it to a number above 0")
        epsilon = config.epsilon or None
        return cls(
            config.clip_norm,
            config.noise_multiplier,
            config.learning_rate,
            epsilon,
            config.delta,
            Adjacency(config.adjacency),
        )

    @property
    @override
    def budget(self) -> PrivacyBudget:
        return PrivacyBudget(math.inf if self.epsilon is None else self.epsilon, self.delta, self.neighbours)

    @override
    def privacy_spent(self, plan: SamplingPlan) -> Spent:
        """Return the charge: Poisson-subsampled Gaussian releases."""
        return accounting.max_charged(self.noise, "poisson", plan, across_rounds=False)

    def summable(self, batch: int, most_steps: int) -> SummableNoise:
        """Return the noise: an upload is w - eta sum / B, and one example's part of the sum has a norm of at most C."""
        if most_steps != 1:
            raise ConfigError(
                f'train.max-steps: expected 1 with secure.noise = "sum", found {most_steps}: a second step would '
                'compute gradients at a point without noise; set it to 1, or secure.noise to "site"'
            )
        return SummableNoise(self.noise, self.learning_rate * self.clip / batch)


@final
class NoisyTrainer(PerExampleTrainerWrapper):
    """A trainer that takes noisy steps on per-example gradients. A method gets no other access to the examples.

    Args:
        spec: the trained tensors.
        rows: per-example gradients, charged to the ledger if the run has a guarantee.
        how: the parameters of the steps.
        ctx: the client's context, the source of the noise; if the noise is in the sum, the only step has no noise.

    Attributes:
        started, without_noise: weights before and after the step if the noise is in the sum. They must not leave the
        site in any other way.
    """

    def __init__(self, spec: Spec, rows: PerExampleGradientSource, how: DpSgdConfig, ctx: RoundContext) -> None:
        super().__init__(spec, rows)
        self._how, self._ctx = how, ctx
        self._steps = 0
        self.started: Weights = {}
        self.without_noise: Weights | None = None

    @property
    @override
    def rows(self) -> PerExampleGradientSource:
        return _NoRows(self._rows.num_examples)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        """Take `steps` noisy steps from `weights`, which do not change. Report the client round's steps so far."""
        sets, how, rows = alternating_sets(frozen), self._how, self._rows
        in_sum = self._ctx.noise_in_sum
        if in_sum and (rows.steps > 1 or self.without_noise is not None):
            raise ConfigError(
                'secure.noise: "sum" allows only one step per client round, because a second one would compute '
                "gradients at a point without noise; choose another method, or add the noise at the site"
            )
        std = 0.0 if in_sum else how.clip * how.noise
        now = {n: w.clone() for n, w in weights.items()}
        drawn = rows.batches("poisson", rows.steps, RandomStream(self._ctx.noise("rows")(32)))
        for step, batch in enumerate(drawn):
            frozen_masks, gradients = sets[step % len(sets)], rows.per_sample(now, batch).gradients
            free = {n: g.masked_fill(frozen_masks[n], 0.0) if n in frozen_masks else g for n, g in gradients.items()}
            pull = _gradient(penalty, now) if penalty else {}
            for name, total in clipping.clipped_sum(free, how.clip).items():
                noisy = gaussian_noise.add_noise(total, std, self._ctx.noise(f"noise {name} {step}"))
                change = (how.learning_rate / rows.batch_size) * noisy.to(now[name])
                change = change + how.learning_rate * pull[name] if name in pull else change
                now[name] = now[name] - (
                    change.masked_fill(frozen_masks[name], 0.0) if name in frozen_masks else change
                )
        self._steps += len(drawn)
        if in_sum:
            self.started, self.without_noise = weights, now
        return TrainingResult(now, {"steps": float(self._steps)})

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        """Raise ConfigError, because no accountant covers a plain gradient."""
        raise ConfigError("gradient: this method sends a plain gradient, but dp.* allows only noisy steps")


def _gradient(penalty: Penalty, weights: Weights) -> Weights:
    """Return the penalty's gradient at these weights."""
    leaves = {n: w.detach().requires_grad_() for n, w in weights.items()}
    gradients = torch.autograd.grad(penalty(leaves), list(leaves.values()), allow_unused=True)
    return {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}


@final
class _NoRows(PerExampleGradientSource):
    """The view of the examples that a method gets under noisy steps: only their number."""

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
    def batches(self, sampling: Sampling, steps: int, rng: RandomStream, skip: int = 0) -> list[BatchIndices]:
        raise _own_steps()

    @override
    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        raise _own_steps()

    @override
    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        raise _own_steps()


def _own_steps() -> ConfigError:
    return ConfigError("batches: this method takes its own steps, but dp.* allows only noisy steps")


def draw_batches(
    rows: PerExampleGradientSource, sampling: Sampling, ctx: RoundContext, one: bool
) -> list[BatchIndices]:
    """Draw a client round's batches: `rows.steps`, or one. Raises ConfigError for a batch larger than the site's data.

    A repeated client round draws new examples, because the accountant's amplification assumes independent
    draws. With `one` and "disjoint", consecutive rounds take consecutive batches of one epoch, in a single
    order.
    """
    if not one or sampling != "disjoint":
        return rows.batches(sampling, 1 if one else rows.steps, RandomStream(ctx.noise("rows")(32)))
    check_batch(rows.batch_size, rows.num_examples)
    epoch, place = divmod(ctx.round, rows.num_examples // rows.batch_size)
    order = RandomStream.derive(ctx.secret, epoch, ctx.client, "order of an epoch")
    return rows.batches("disjoint", 1, order, place)
