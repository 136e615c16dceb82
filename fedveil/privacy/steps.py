"""DP-SGD in place of a client's plain training, under any method that trains (Abadi et al. 2016).

    w <- w - eta (sum_i clip_C(g_i) + N(0, (z C)^2)) / B,   rows by Poisson sampling, `frozen` entries as they were

Formal guarantees, for each row of the site, against everyone but that site:
1. A training is `steps` Poisson-subsampled Gaussian releases of multiplier z; `spent` says so to the accountant. What a
   method makes of the trained weights is post-processing, as long as it looks at no row by itself.
2. Sums are divided by the batch size that was meant, and no loss is reported.

| case | result |
|---|---|
| noise 0 | clipped only: epsilon infinite |
| a batch that Poisson sampling left empty | a step of noise alone |
| a frozen entry | bit for bit as it was; its part of a gradient counts for no clipping |
| a batch larger than the site's rows | ConfigError, before its rows are looked at |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from fedveil.errors import ConfigError
from fedveil.method import Batch, FeatureGradients, Local, PerSample, RoundContext, Spec, Trained, Weights
from fedveil.privacy import accounting, clip, noise
from fedveil.privacy.plan import Plan, Sampling, check_number
from fedveil.rng import Stream


@final
class NoisySteps:
    """A Local that trains by noisy steps on rows apart.

    Attributes:
        bound, multiplier: C and z.
        learning_rate: eta, of plain SGD.
    """

    def __init__(self, local: Local, bound: float, multiplier: float, learning_rate: float, ctx: RoundContext) -> None:
        check_number("clip", bound)
        check_number("noise", multiplier, zero=True)
        check_number("learning_rate", learning_rate)
        self._local, self._ctx = local, ctx
        self.bound, self.multiplier, self.learning_rate = bound, multiplier, learning_rate

    @property
    def num_examples(self) -> int:
        """See Local."""
        return self._local.num_examples

    @property
    def spec(self) -> Spec:
        """See Local."""
        return self._local.spec

    @property
    def batch_size(self) -> int:
        """See Local."""
        return self._local.batch_size

    @property
    def steps(self) -> int:
        """See Local."""
        return self._local.steps

    def train(self, weights: Weights, frozen: Weights | None = None) -> Trained:
        """`steps` noisy steps from `weights`, which stay as they are. Reports their number alone."""
        held = frozen or {}
        now = {n: w.clone() for n, w in weights.items()}
        drawn = self._local.batches("poisson", self.steps, Stream(self._ctx.noise("rows")(32)))
        for step, batch in enumerate(drawn):
            found = self._local.per_sample_gradients(now, batch).gradients
            free = {n: g.masked_fill(held[n], 0.0) if n in held else g for n, g in found.items()}
            for name, total in clip.clipped_sum(free, self.bound).items():
                noisy = noise.added(total, self.bound * self.multiplier, self._ctx.noise(f"noise {name} {step}"))
                change = (self.learning_rate / self.batch_size) * noisy.to(now[name])
                now[name] = now[name] - (change.masked_fill(held[name], 0.0) if name in held else change)
        return Trained(now, {"steps": float(len(drawn))})

    def spent(self, plan: Plan) -> Mapping[tuple[str, int, int, float], int]:
        """What a record is charged over the plan (`fedveil.privacy.accounting.Spent`)."""
        return accounting.spent(self.multiplier, "poisson", plan, across_rounds=False)

    def gradient(self, weights: Weights) -> Trained:
        """Refused: nothing accounts for it."""
        raise ConfigError("gradient: expected a method that trains under noisy steps, found one that sends a gradient")

    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        """See Local."""
        raise ConfigError("batches: expected a method that trains under noisy steps, found one with steps of its own")

    def per_sample_gradients(self, weights: Weights, batch: Batch) -> PerSample:
        """Refused: nothing accounts for it."""
        raise ConfigError("batches: expected a method that trains under noisy steps, found one with steps of its own")

    def feature_gradients(self, weights: Weights, batch: Batch) -> FeatureGradients:
        """Refused: nothing accounts for it."""
        raise ConfigError("batches: expected a method that trains under noisy steps, found one with steps of its own")
