"""DP-SGD in place of a client's plain training, under any method that trains (Abadi et al. 2016).

    w <- w - eta (sum_i clip_C(g_i) + N(0, (z C)^2)) / B,   rows by Poisson sampling, `frozen` entries as they were

It is a field of every such method, method.fields = "dp_sgd = {clip = 1.0, noise = 1.1, learning_rate = 0.1, epsilon = 8.0}".

Formal guarantees, for each row of the site, against everyone but that site:
1. A training is `steps` Poisson-subsampled Gaussian releases of multiplier z; `privacy_spent` says so to the accountant, and
   the site's ledger is charged before the rows are looked at. What a method makes of the trained weights is
   post-processing: it is given nothing that looks at a row in another way.
2. Sums are divided by the batch size that was meant, and no loss is reported. The number of rows is beside every upload;
   it is taken for public under add-or-remove-one, and does not change under replace-one.
3. With `epsilon`, a turn that would take a record above it is refused by the site before its rows are looked at.

| case | result |
|---|---|
| noise 0 | clipped only: epsilon infinite |
| a batch that Poisson sampling left empty | a step of noise alone |
| a frozen entry | bit for bit as it was; its part of a gradient counts for no clipping |
| a batch larger than the site's rows | ConfigError, before its rows are looked at |
| a method that trains twice in a turn | charged twice |
| a method with noise of its own, or one that sends gradients | ConfigError when it is made |
| run.deterministic with an epsilon | ConfigError: seeded noise protects nobody |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, final

from fedveil.contract.adapter import Adapter
from fedveil.contract.budget import Budget, Neighbours, Plan, Sampling, check_claim, check_number
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State, Upload
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Around, Batch, FeatureGradients, Local, PerSample, Preparing, Trained
from fedveil.errors import ConfigError
from fedveil.privacy import clipping, noise
from fedveil.rng import Stream


@dataclass(frozen=True)
class DpSgd:
    """How the noisy steps are made.

    Attributes:
        clip, noise: C and the multiplier z.
        learning_rate: eta, of plain SGD.
        epsilon: no record is charged more; None: charges are counted and stop nothing.
        delta, neighbours: of every epsilon.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    clip: float
    noise: float
    learning_rate: float
    epsilon: float | None = None
    delta: float = 1e-5
    neighbours: Neighbours = Neighbours.REPLACE_ONE

    def __post_init__(self) -> None:
        check_number("dp_sgd.clip", self.clip)
        check_number("dp_sgd.noise", self.noise, zero=True)
        check_number("dp_sgd.learning_rate", self.learning_rate)
        check_claim(self.epsilon, self.delta, "poisson", self.neighbours)
        if self.epsilon is not None and self.noise == 0:
            raise ConfigError(
                "dp_sgd.noise: expected more than 0 with an epsilon, found 0; `fedveil privacy plan` says how much it takes"
            )


@final
@dataclass(frozen=True)
class Noisy(Method):
    """A method whose clients train by noisy steps. All else is the method's own.

    Attributes:
        method: whose clients they are.
        dp_sgd: the steps.
    """

    method: Method
    dp_sgd: DpSgd

    def __post_init__(self) -> None:
        if self.method.budget is not None or self.method.uploads == "gradients":
            found = "one with noise of its own" if self.method.budget is not None else "one that sends gradients"
            raise ConfigError(f"dp_sgd: expected a method that trains without noise, found {found}; leave dp_sgd out")

    @property
    def plain(self) -> Method:
        """The method without the steps."""
        return self.method

    @property
    def fields(self) -> dict[str, Any]:
        """Those of the method, and `dp_sgd`."""
        return self.method.fields | {"dp_sgd": asdict(self.dp_sgd)}

    @property
    def budget(self) -> Budget:
        """See Method."""
        wished = self.dp_sgd.epsilon
        return Budget(math.inf if wished is None else wished, self.dp_sgd.delta, self.dp_sgd.neighbours)

    def privacy_spent(self, plan: Plan) -> Mapping[tuple[str, int, int, float], int]:
        """See Method: Poisson-subsampled Gaussians."""
        from fedveil.privacy import accounting

        return accounting.spent(self.dp_sgd.noise, "poisson", plan, across_rounds=False)

    def training(self, local: Local, ctx: RoundContext) -> NoisySteps:
        """The Local that the method gets in place of `local`."""
        return NoisySteps(local, self.dp_sgd, ctx)

    def client(
        self, private: State | None, down: Payload, local: Local, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """The method's own turn, on noisy steps."""
        return self.method.client(private, down, self.training(local, ctx), ctx)

    @property
    def adapter(self) -> Adapter:  # type: ignore[override]
        """See Method."""
        return self.method.adapter

    @property
    def version(self) -> int:  # type: ignore[override]
        """See Method."""
        return self.method.version

    @property
    def server_adapter(self) -> Adapter:
        """See Method."""
        return self.method.server_adapter

    @property
    def prepares(self) -> bool:
        """See Method."""
        return self.method.prepares

    @property
    def uploads(self) -> Literal["weights", "gradients", "coded"]:
        """See Method."""
        return self.method.uploads

    def prepare(self, weights: Weights, server: Preparing) -> Weights:
        """See Method."""
        return self.method.prepare(weights, server)

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """See Method."""
        return self.method.init(spec, weights, rng)

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """See Method."""
        return self.method.broadcast(server, ctx)

    def aggregate(self, server: State, uploads: Iterator[Upload]) -> State:
        """See Method."""
        return self.method.aggregate(server, uploads)

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """See Method."""
        return self.method.deployed(server, private, down)

    def layout(self, spec: Spec) -> Layout:
        """See Method."""
        return self.method.layout(spec)

    def check(self, payload: Payload, spec: Spec) -> None:
        """See Method."""
        self.method.check(payload, spec)


@final
class NoisySteps(Around):
    """A Local that trains by noisy steps on rows apart."""

    def __init__(self, local: Local, how: DpSgd, ctx: RoundContext) -> None:
        super().__init__(local)
        self._how, self._ctx = how, ctx

    def train(self, weights: Weights, frozen: Weights | None = None) -> Trained:
        """`steps` noisy steps from `weights`, which stay as they are. Reports their number alone."""
        held, how = frozen or {}, self._how
        now = {n: w.clone() for n, w in weights.items()}
        drawn = self._local.batches("poisson", self.steps, Stream(self._ctx.noise("rows")(32)))
        for step, batch in enumerate(drawn):
            found = self._local.per_sample_gradients(now, batch).gradients
            free = {n: g.masked_fill(held[n], 0.0) if n in held else g for n, g in found.items()}
            for name, total in clipping.clipped_sum(free, how.clip).items():
                noisy = noise.added(total, how.clip * how.noise, self._ctx.noise(f"noise {name} {step}"))
                change = (how.learning_rate / self.batch_size) * noisy.to(now[name])
                now[name] = now[name] - (change.masked_fill(held[name], 0.0) if name in held else change)
        return Trained(now, {"steps": float(len(drawn))})

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
