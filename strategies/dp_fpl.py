"""DP-FPL.

Tran, Sun, Patterson, Milanova: Privacy-Preserving Personalized Federated Prompt Learning for Multimodal Large
Language Models. ICLR 2025. Every client trains a shared prompt and a private one. The private prompt learns
through a low-rank factorization that is recomputed at every step.

| paper | code | shape, unit |
|---|---|---|
| p_G, p_L,i | "prompt" in the server's and in the client's state | b x d, context vectors; p_L is never sent |
| u, v | `low_rank.factorise(p_L, v_0)` | b x k with orthonormal columns, k x d with orthonormal rows |
| g_i | `per_sample` at p_G + u v + r | b x d, of one row; dL/du = g_i v^T, dL/dv = u^T g_i |
| C, B | `clip_local`, `clip_global`, `rows.batch_size` | norm; configured batch size, however many rows were drawn |
| sigma | z C with z = `noise_local`, `noise_global` or `_nominal` | standard deviation of the noise on a sum of rows |
| T, x_i | `feature` at p_G + u v + r | the texts, classes x D; the feature of row i's image |
| eta | `learning_rate_local`, `learning_rate` | step on p_L, step on p_G |

    v_0 ~ N(0, 1);  u = orth(p_L v_0);  v = orth(p_L^T u)^T                             (Factorise)
    (D_u, D_v) = (sum_i clip_C(g_i v^T, u^T g_i) + N(0, (z_L C_L)^2)) / B;  mode strict clips the two together
    D_G = (sum_i clip_C(g_i) + N(0, (z_G C_G)^2)) / B
    D_L = D_u v + u D_v - u u^T D_u v,  p_L <- p_L - eta D_L                            (Eq. 4)
    p_G <- p_G - eta mean_i D_G (on the server);  z = sqrt(T ln(1 / delta)) / epsilon   (modes paper and code)

`clipped = "texts"` is not in the paper. The gradient of example i with respect to T is d_i x_i^T, with d_i = scale
(softmax_i - onehot_i).
With J = dT/dP, C = clip_texts and z^-2 = z_L^-2 + z_G^-2:
    D_G = J^T (sum_i clip_C(d_i x_i^T) + N(0, (z C)^2)) / B;  D_u = D_G v^T,  D_v = u^T D_G,  D_L by Eq. 4

A client shares: the noisy gradient of a shared prompt, or the prompt's noisy change. A client keeps: a private
prompt; an epsilon bounds what single examples reveal.

The client learns: p_G of every round it takes part in. The server learns: each client's noisy D_G, or with
`exchange = "epoch"` its noisy change of p_G; and its number of examples. In modes "paper" and "code" the server
learns D_G without noise and adds the noise to the mean, so the clients have to trust the server.

Formal guarantees for each example of each site, against everyone but that site. They also cover p_L. With Poisson
sampling they assume that the server does not time the site:
1. strict: the (p_L, p_G) of a step are one Gaussian release with z^-2 = z_L^-2 + z_G^-2; `privacy_spent` composes
   the steps. With `exchange = "epoch"` every local step has noise, because its sums depend on all earlier steps.
   The client computes the change that it sends from these steps, so the change costs nothing more.
   clipped = "texts": |d_i x_i^T| = |d_i| |x_i|, so adding an example moves the sum by at most C and replacing one
   by at most 2 C. One release of z pays for u, v and p_G, because J, u and v are computed from noised steps, the
   model and the class names (which are public: task.class-names).
2. paper: u, v and p_G are clipped separately, so they are three releases, each with z. Nothing protects against the
   server.
3. code: the batch mean is clipped, so one example moves it by up to 2 C instead of C / B. Otherwise the same as
   "paper".
4. Clients report no loss. They send the number of examples without noise, so under zero-out adjacency no epsilon
   covers that number.

| case | result |
|---|---|
| noise 0 and no epsilon set | gradients are clipped, and epsilon is infinite |
| an empty Poisson batch | a noise-only step |
| secure.noise = "sum" | D_G is sent without noise, because the sum gets noise; the noise on u and v does not change |
| a batch larger than the site's data set | the site refuses the batch before reading an example |
| deterministic run | refused if an epsilon is set, because seeded noise gives no guarantee |
| a repeated client round | draws new examples and new noise, and is charged again |
| "paper" or "code" with "epoch" or "texts" | refused: the server's noise would come after noiseless local steps |

Differences from the paper: Eq. 4 has a minus sign; the published code adds, and divides the local step by 10 (mode
"code"). Here clipping is per example, with u and v together. Each site draws its own p_L^0; the published code
uses one p_L^0 for all sites. The optimizer is plain SGD. residual = "rank-k" uses u u^T p_L, the true rank-k part, in
the forward pass. residual = false uses the orthonormal u v, which has unit scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from fedveil import rng
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract import privacy as plan
from fedveil.contract.contributions import AggregateSums, ClientContributions, Contribution
from fedveil.contract.layout import MessageLayout, Payload, WireField
from fedveil.contract.method import FederatedState, Method, RoundContext, Sends
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.privacy import (
    Adjacency,
    PrivacyBudget,
    PrivacyGuarantee,
    Sampling,
    SamplingPlan,
    Spent,
    SummableNoise,
    joint_budget,
)
from fedveil.contract.trainer import BatchIndices, PerExampleGradientSource, Trainer
from fedveil.errors import ConfigError, WireError
from fedveil.ops import low_rank
from fedveil.ops.low_rank import Residual
from fedveil.privacy import accounting, clipping, gaussian_noise
from fedveil.privacy import dp_sgd as turn
from fedveil.rng import RandomStream
from fedveil.wire.dense import DenseCodec
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, payload_tensors

__all__ = ["DPFPL", "PROMPT"]

PROMPT = "prompt"
_ROWS = "rows_a_step"  # B, by which the server divides its noise in modes "paper" and "code"


@final
@dataclass(frozen=True)
class DPFPL(Method, PrivacyGuarantee):
    """Train a shared and a private prompt under differential privacy.

    Attributes:
        rank: k, at most the prompt's length.
        residual: the forward pass uses u v + r (true), u v (false), or u u^T p_L ("rank-k").
        mode: "strict"; "paper" has nominal noise and clips u and v separately; "code" clips each batch and uses the
            published code's Eq. 4.
        exchange: a client's upload: the noisy gradient of one "batch", or the change after the configured "epoch"s.
        sampling: how batches are drawn: "poisson", "disjoint" over an epoch, or of "fixed" size.
        clipped: whether the gradient of the "prompt" or of the "texts" is clipped per example and gets noise ("texts":
            mode "strict" only; one backward pass for all examples).
        clip_local, clip_global, clip_texts: clipping bound C for (u, v), for p_G and for the texts.
        noise_local, noise_global: z_L and z_G in mode "strict"; "texts" uses the one multiplier equivalent to both.
        epsilon: in mode "strict", the limit on each record's charge; in modes "paper" and "code", the required nominal
            epsilon that sets the noise.
        delta, neighbours: delta and adjacency of every epsilon.
        rounds: T in the formula for the nominal noise.
        learning_rate, learning_rate_local: eta for p_G and p_L.
        adapter: the prompt p_G; p_L has the same shape.
        wire_dtype: dtype of the tensors on the wire.
    """

    rank: int = 8
    mode: Literal["strict", "paper", "code"] = "strict"
    residual: Residual = True
    exchange: Literal["batch", "epoch"] = "batch"
    sampling: Sampling = "poisson"
    clipped: Literal["prompt", "texts"] = "prompt"
    clip_local: float = 10.0
    clip_global: float = 10.0
    clip_texts: float = 10.0
    noise_local: float = 1.0
    noise_global: float = 1.0
    epsilon: float | None = None
    delta: float = 1e-5
    neighbours: Adjacency = Adjacency.REPLACE_ONE
    rounds: int = 100
    learning_rate_local: float = 1e-4
    learning_rate: float = 1e-4
    adapter: PromptAdapter = field(default_factory=PromptAdapter)
    wire_dtype: WireDtype = "float32"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= self.adapter.length:
            raise ConfigError(
                f"rank: expected 1 to {self.adapter.length} (adapter.length), found {self.rank}; lower it"
            )
        for name in ("clip_local", "clip_global", "clip_texts", "learning_rate_local", "learning_rate", "rounds"):
            plan.check_number(name, getattr(self, name))
        for name in ("noise_local", "noise_global"):
            plan.check_number(name, getattr(self, name), zero=True)
        plan.check_claim(self.epsilon, self.delta, self.sampling, self.neighbours)
        if self.mode == "strict" and self.epsilon is not None and 0 in (self.noise_local, self.noise_global):
            problem = f"{self.noise_local} and {self.noise_global}; `fedveil privacy plan` computes the noise needed"
            raise ConfigError(
                f"epsilon: an epsilon requires noise_local and noise_global above 0, but they are {problem}"
            )
        if self.mode != "strict" and (self.epsilon is None or (self.exchange, self.clipped) != ("batch", "prompt")):
            problem = (
                f'"{self.mode}" with {self.epsilon}, "{self.exchange}", "{self.clipped}"; set them, or use "strict"'
            )
            raise ConfigError(
                f'mode: this mode requires an epsilon, exchange = "batch" and clipped = "prompt"; found {problem}'
            )

    @property
    def stale_upload_conflict(self) -> str:
        """Return why late uploads are refused: they change the number or scale of uploads, and so a mean's noise."""
        return "calibrates the noise on its mean to the uploads of one round"

    @property
    def upload_kind(self) -> Sends:
        """Return "gradients" for uploads of D_G, or "changes" for uploads of a change of p_G."""
        return "gradients" if self.exchange == "batch" else "changes"

    @property
    def uses_local_optimizer(self) -> bool:
        """Return False: the method's steps have their own learning rates."""
        return False

    @property
    def budget(self) -> PrivacyBudget:
        """Return the privacy budget.

        Modes "paper" and "code" count the real epsilon but do not enforce it, because it exceeds the nominal
        epsilon.
        """
        strict, epsilon = self.mode == "strict", math.inf if self.epsilon is None else self.epsilon
        return PrivacyBudget(
            epsilon if strict else math.inf, self.delta, self.neighbours, None if strict else epsilon, not strict
        )

    @property
    def _nominal(self) -> float:
        return math.sqrt(self.rounds * math.log(1 / self.delta)) / (self.epsilon or math.nan)

    @override
    def privacy_spent(self, plan: SamplingPlan) -> Spent:
        """Return the charge against all parties except the site and, in modes "paper" and "code", the server."""
        z = (
            joint_budget(self.noise_local, self.noise_global)
            if self.mode == "strict"
            else joint_budget(*[self._nominal] * 3)
        )
        if self.mode == "code":
            # Adding a row moves the mean by 2 C, just as replacing a row does, but the accountant assumes half.
            z /= plan.batch if self.sampling == "disjoint" else 2 * plan.batch
        return accounting.max_charged(z, self.sampling, plan, self.exchange == "batch")

    def summable(self, batch: int, most_steps: int) -> SummableNoise:
        """Return the noise on one step's D_G with clipped = "prompt"; the site itself adds the noise on u and v."""
        asked = {"mode": "strict", "exchange": "batch", "clipped": "prompt", "wire_dtype": "float32"}
        for name, expected in asked.items():
            if (value := getattr(self, name)) != expected:
                raise ConfigError(
                    f'{name}: secure.noise = "sum" requires "{expected}", found "{value}"; change it, or set '
                    'secure.noise to "site"'
                )
        if self.sampling == "fixed":
            raise ConfigError('sampling: secure.noise = "sum" requires "poisson" or "disjoint", found "fixed"')
        return SummableNoise(self.noise_global, self.clip_global / batch, (self.noise_local,), self.sampling, True)

    @property
    def keeps_private_state(self) -> bool:
        """Return True: the private prompt stays at the site."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return p_G."""
        if list(spec) != [PROMPT] or spec[PROMPT].shape[0] != self.adapter.length:
            raise ConfigError(
                f'adapter: the only tensor must be "prompt" with {self.adapter.length} rows, found {dict(spec)}'
            )
        return FederatedState(dict(weights))

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return p_G."""
        return Payload(cast_to(server.tensors, self.wire_dtype))

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Run one step or the local epochs, keep p_L, and send either the noisy step on p_G or the change of p_G."""
        plan.check_seeded(self.budget, ctx.seeded)
        received = as_spec(payload_tensors(down), trainer.spec)[PROMPT]
        drawn = 0.02 * torch.randn(received.shape, generator=ctx.rng("local prompt").torch_generator())
        p_local = (drawn if private is None else private.tensors[PROMPT]).to(received.device)
        p_global, sent = received, torch.zeros_like(received)
        for step, batch in enumerate(turn.draw_batches(trainer.rows, self.sampling, ctx, self.exchange == "batch")):
            step_local, step_global = self._step(p_global, p_local, trainer.rows, batch, ctx, step)
            p_local = p_local - self.learning_rate_local * step_local
            if self.exchange == "epoch":
                p_global = p_global - self.learning_rate * step_global
            sent = step_global if self.exchange == "batch" else p_global - received
        rows = {} if self.mode == "strict" else {_ROWS: torch.tensor(float(trainer.rows.batch_size))}
        return FederatedState({PROMPT: p_local}), Payload({**cast_to({PROMPT: sent}, self.wire_dtype), **rows})

    def _step(
        self,
        p_global: Tensor,
        p_local: Tensor,
        rows: PerExampleGradientSource,
        batch: BatchIndices,
        ctx: RoundContext,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        """Return D_L of Eq. 4 and D_G, clipped, with noise, and divided by B."""
        start = torch.randn(p_local.shape[1], self.rank, generator=ctx.rng(f"factors {step}").torch_generator())
        u, v = low_rank.factorize_matrix(p_local, start.to(p_local))
        seen = {PROMPT: p_global + low_rank.compose_factors(p_local, u, v, self.residual)}
        size, c_local, c_global = rows.batch_size, self.clip_local, self.clip_global
        if self.clipped == "texts":
            feature_grads = rows.feature(seen, batch)
            total = clipping.clipped_outer_sum(feature_grads.left, feature_grads.right, self.clip_texts)
            std = self.clip_texts * joint_budget(self.noise_local, self.noise_global)
            whole = feature_grads.pull(gaussian_noise.add_noise(total, std, ctx.noise(f"noise texts {step}")) / size)[
                PROMPT
            ]
            return low_rank.full_gradient(u, v, whole @ v.T, u.T @ whole), whole
        g = rows.per_sample(seen, batch).gradients[PROMPT]
        parts = {"u": g @ v.T, "v": u.T @ g}
        if self.mode == "code":
            sums = {n: clipping.clipped_mean(part, size, c_local) * size for n, part in parts.items()}
            whole = clipping.clipped_mean(g, size, c_global) * size
        else:
            together = [parts] if self.mode == "strict" else [{n: part} for n, part in parts.items()]
            sums = {n: s for group in together for n, s in clipping.clipped_sum(group, c_local).items()}
            whole = clipping.clipped_sum({PROMPT: g}, c_global)[PROMPT]
        std = c_local * (self.noise_local if self.mode == "strict" else self._nominal)
        d_u, d_v = (gaussian_noise.add_noise(sums[n], std, ctx.noise(f"noise {n} {step}")) / size for n in ("u", "v"))
        if self.mode == "strict" and not ctx.noise_in_sum:
            whole = gaussian_noise.add_noise(whole, c_global * self.noise_global, ctx.noise(f"noise {PROMPT} {step}"))
        plus = 0.1 * (d_u @ v + u @ d_v)  # as in the published code
        return plus if self.mode == "code" else low_rank.full_gradient(u, v, d_u, d_v), whole / size

    def check(self, payload: Payload, spec: Spec) -> None:
        """Raise WireError for a batch size below 1, because the server divides by it."""
        if self.mode != "strict" and not (rows := float(payload_tensors(payload)[_ROWS])) >= 1:
            raise WireError(f"{_ROWS}: expected at least 1, found {rows}")

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return D_G with weight 1; in modes "paper" and "code" also B in the clear, for the server's noise."""
        fields = payload_tensors(payload)
        clear = {} if self.mode == "strict" else {_ROWS: float(fields[_ROWS])}
        return ClientContributions([Contribution(PROMPT, fields[PROMPT], 1.0)], clear)

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Step p_G along the unweighted mean; in modes "paper" and "code", add the noise to the mean first."""
        old = server.tensors[PROMPT]
        moved = sums.means({PROMPT: old.float()})[PROMPT]
        if self.mode != "strict":  # a row that is clipped individually moves the mean of N clients by C / (N B)
            fewest = min(float(scalars[_ROWS]) for scalars in sums.clear.values())
            std = self._nominal * self.clip_global / (sums.weight(PROMPT) * fewest)
            moved = gaussian_noise.add_noise(moved, std, ctx.noise("noise on the mean"))
        step = moved if self.exchange == "epoch" else -self.learning_rate * moved
        return FederatedState({PROMPT: (old.float() + step).to(old.dtype)}, server.scalars)

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the shared prompt; with `private` also that client's p_G + p_L, composed according to `residual`."""
        shared = server.tensors[PROMPT]
        if private is None:
            return {"server": {PROMPT: shared}}
        v_0 = torch.randn(shared.shape[1], self.rank, generator=rng.initial_stream(0, "evaluation").torch_generator())
        p_local = private.tensors[PROMPT]
        own = low_rank.compose_factors(p_local, *low_rank.factorize_matrix(p_local, v_0), self.residual)
        return {"server": {PROMPT: shared}, "client": {PROMPT: (shared + own).to(shared.dtype)}}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare one prompt in each direction; in modes "paper" and "code", uploads also have the batch size."""
        fields = dense_fields(spec, "down", self.wire_dtype) + dense_fields(spec, "up", self.wire_dtype)
        rows = () if self.mode == "strict" else (WireField(_ROWS, "up", DenseCodec(torch.float32), (), "rows"),)
        return MessageLayout(fields + rows)
