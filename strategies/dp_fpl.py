"""DP-FPL.

Tran, Sun, Patterson, Milanova: Privacy-Preserving Personalized Federated Prompt Learning for Multimodal Large Language
Models. ICLR 2025. A shared prompt plus a private one, which learns through a fresh low-rank factorisation at every step.

| paper | code | shape, unit |
|---|---|---|
| p_G, p_L,i | "prompt" in the server's state, in the client's private one | b x d, context vectors; p_L is never sent |
| u, v | `low_rank.factorise(p_L, v_0)` | b x k with orthonormal columns, k x d with orthonormal rows |
| g_i | `per_sample` at p_G + u v + r | b x d, of one row; dL/du = g_i v^T, dL/dv = u^T g_i |
| C, B | `clip_local`, `clip_global`, `rows.batch_size` | norm; rows, fixed whatever was drawn |
| sigma | z C with z = `noise_local`, `noise_global`, or `_nominal` | standard deviation of the noise on a sum over rows |
| T, x_i | `feature` at p_G + u v + r | the texts, classes x D; the feature of row i's image |
| eta | `learning_rate_local`, `learning_rate` | step on p_L, step on p_G |

    v_0 ~ N(0, 1);  u = orth(p_L v_0);  v = orth(p_L^T u)^T                             (Factorise)
    (D_u, D_v) = sum_i clip_C(g_i v^T, u^T g_i) + N(0, (z_L C_L)^2), over B; strict clips the two together
    D_G = sum_i clip_C(g_i) + N(0, (z_G C_G)^2), over B
    D_L = D_u v + u D_v - u u^T D_u v,  p_L <- p_L - eta D_L                            (Eq. 4)
    p_G <- p_G - eta mean_i D_G (on the server);  z = sqrt(T ln(1 / delta)) / epsilon   (modes paper and code)

With `clipped = "texts"`, which the paper has not, row i's gradient in T is d_i x_i^T, d_i = scale (softmax_i - onehot_i);
J = dT/dP, C = clip_texts, z^-2 = z_L^-2 + z_G^-2:
    D_G = J^T (sum_i clip_C(d_i x_i^T) + N(0, (z C)^2)), over B;  D_u = D_G v^T,  D_v = u^T D_G,  D_L by Eq. 4

The client learns: p_G of every round it takes part in. The server learns: each client's noised D_G, or with
`exchange = "epoch"` its noised change of p_G; the number of its rows. In the modes paper and code it learns D_G without
noise, and puts the noise on the mean itself: it is trusted.

Formal guarantees, for each row of each site, against everyone but that site, p_L included:
1. strict: a step's (p_L, p_G) is one Gaussian release, z^-2 = z_L^-2 + z_G^-2; `privacy_spent` composes them. In epoch form
   every step of the local copy has noise, for its sums depend on all steps before: the change then costs nothing more.
   clipped = "texts": |d_i x_i^T| = |d_i| |x_i|, so a row moves the sum by C, its replacement by 2 C, and one release of z
   pays for u, v and p_G: J, u, v come from noised steps, and from model and names of classes (public: task.class-names).
2. paper: as clipped apart, u, v and p_G are three releases of z each. Against the server there is no guarantee.
3. code: the batch's mean is clipped: one row moves it by up to 2 C, not by C / B. Else as paper.
4. No loss is reported. The number of rows is sent as it is: under add-or-remove-one no epsilon covers it.

| case | result |
|---|---|
| noise 0, without epsilon; an empty Poisson batch | clipped, but epsilon infinite; a step of noise alone |
| a batch larger than the site's rows | refused by the site, before its rows are looked at |
| deterministic run; a turn that is repeated | seeded noise: refused with an epsilon; drawn and charged anew |
| paper or code with exchange = "epoch", or "texts" | refused: the server's noise would come after clean local steps |

Differences from the paper: the minus sign of Eq. 4 (the published code adds, and divides the local step by 10: mode code);
clipping of single rows, u and v together; each site draws its own p_L^0 (the code has one for all); plain SGD.
residual = "rank-k" forwards u u^T p_L, the true rank-k part; with false the orthonormal u v stands for p_L, of unit scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from fedveil import rng
from fedveil.adapters.prompt import Prompt
from fedveil.algebra import low_rank
from fedveil.algebra.low_rank import Residual
from fedveil.contract import budget as plan
from fedveil.contract.budget import Budget, Neighbours, Plan, Sampling, Spent, joint
from fedveil.contract.layout import Field, Layout, Payload
from fedveil.contract.method import Method, RoundContext, Sends, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Term, Terms
from fedveil.contract.trainer import Batch, RowGradients, Trainer
from fedveil.errors import ConfigError, WireError
from fedveil.privacy import clipping, noise
from fedveil.privacy import sampling as turn
from fedveil.rng import Stream
from fedveil.wire.dense import Dense
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, tensors_of

PROMPT = "prompt"
_ROWS = "rows_a_step"  # B, which the server's noise is divided by in the modes paper and code


@final
@dataclass(frozen=True)
class DpFpl(Method):
    """A shared and a private prompt under differential privacy.

    Attributes:
        rank: k, at most the prompt's length. residual: forward u v + r (true), u v (false), or u u^T p_L ("rank-k").
        mode: "strict"; "paper": nominal noise, u and v clipped apart; "code": clipped by batch, with the code's Eq. 4.
        exchange: what a participation is: the noised gradient of one "batch", or local steps of the configured "epoch"s.
        sampling: how batches are drawn: "poisson", "disjoint" over an epoch, or of "fixed" size.
        clipped: where rows are clipped and noised: in the gradient of the "prompt", or of the "texts" (strict, one backward).
        clip_local, clip_global, clip_texts: C of (u, v), of p_G and of the texts.
        noise_local, noise_global: z_L and z_G of mode strict; for the texts, only what they are worth together counts.
        epsilon: strict: no record is charged more. paper, code: the nominal one, which sets the noise; needed there.
        delta, neighbours: of every epsilon. rounds: T of the nominal noise. learning_rate: eta on p_G, _local: on p_L.
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
    neighbours: Neighbours = Neighbours.REPLACE_ONE
    rounds: int = 100
    learning_rate_local: float = 1e-4
    learning_rate: float = 1e-4
    adapter: Prompt = field(default_factory=Prompt)
    wire_dtype: WireDtype = "float32"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= self.adapter.length:
            raise ConfigError(f"rank: expected 1 to adapter.length, {self.adapter.length}, found {self.rank}; lower it")
        for name in ("clip_local", "clip_global", "clip_texts", "learning_rate_local", "learning_rate", "rounds"):
            plan.check_number(name, getattr(self, name))
        for name in ("noise_local", "noise_global"):
            plan.check_number(name, getattr(self, name), zero=True)
        plan.check_claim(self.epsilon, self.delta, self.sampling, self.neighbours)
        if self.mode == "strict" and self.epsilon is not None and 0 in (self.noise_local, self.noise_global):
            found = f"{self.noise_local} and {self.noise_global}; `fedveil privacy plan` says how much it takes"
            raise ConfigError(f"epsilon: expected noise_local and noise_global above 0 with it, found {found}")
        if self.mode != "strict" and (self.epsilon is None or (self.exchange, self.clipped) != ("batch", "prompt")):
            found = f'"{self.mode}" with {self.epsilon}, "{self.exchange}", "{self.clipped}"; set them, or use "strict"'
            raise ConfigError(f'mode: expected an epsilon, exchange = "batch" and clipped = "prompt", found {found}')

    @property
    def sends(self) -> Sends:
        """D_G, or a change of p_G."""
        return "gradients" if self.exchange == "batch" else "changes"

    @property
    def budget(self) -> Budget:
        """In the modes paper and code the honest epsilon is counted, and nothing is stopped: it is above the nominal one."""
        strict, kept = self.mode == "strict", math.inf if self.epsilon is None else self.epsilon
        return Budget(kept if strict else math.inf, self.delta, self.neighbours, None if strict else kept, not strict)

    @property
    def _nominal(self) -> float:
        return math.sqrt(self.rounds * math.log(1 / self.delta)) / (self.epsilon or math.nan)

    def privacy_spent(self, plan: Plan) -> Spent:
        """See Method: what everyone but the site sees; in the modes paper and code, everyone but site and server."""
        from fedveil.privacy import accounting

        z = joint(self.noise_local, self.noise_global) if self.mode == "strict" else joint(*[self._nominal] * 3)
        if self.mode == "code":  # absent to present is 2 C too; the accountant takes it for half of a replacement
            z /= plan.batch if self.sampling == "disjoint" else 2 * plan.batch
        return accounting.spent(z, self.sampling, plan, self.exchange == "batch")

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """p_G."""
        if list(spec) != [PROMPT] or spec[PROMPT].shape[0] != self.adapter.length:
            raise ConfigError(f'adapter: expected one tensor "prompt", {self.adapter.length} rows, found {dict(spec)}')
        return State(dict(weights))

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """p_G."""
        return Payload(cast_to(server.tensors, self.wire_dtype))

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """One step, or the local epochs; p_L stays, what is known of p_G's gradient goes."""
        plan.check_seeded(self.budget, ctx.seeded)
        received = as_spec(tensors_of(down), trainer.spec)[PROMPT]
        drawn = 0.02 * torch.randn(received.shape, generator=ctx.rng("local prompt").torch_generator())
        p_local = (drawn if private is None else private.tensors[PROMPT]).to(received.device)
        p_global, sent = received, torch.zeros_like(received)
        for step, batch in enumerate(turn.batches(trainer.rows, self.sampling, ctx, self.exchange == "batch")):
            step_local, step_global = self._step(p_global, p_local, trainer.rows, batch, ctx, step)
            p_local = p_local - self.learning_rate_local * step_local
            if self.exchange == "epoch":
                p_global = p_global - self.learning_rate * step_global
            sent = step_global if self.exchange == "batch" else p_global - received
        rows = {} if self.mode == "strict" else {_ROWS: torch.tensor(float(trainer.rows.batch_size))}
        return State({PROMPT: p_local}), Payload({**cast_to({PROMPT: sent}, self.wire_dtype), **rows})

    def _step(
        self, p_global: Tensor, p_local: Tensor, rows: RowGradients, batch: Batch, ctx: RoundContext, step: int
    ) -> tuple[Tensor, Tensor]:
        """D_L of Eq. 4 and D_G, clipped, noised and divided by B."""
        start = torch.randn(p_local.shape[1], self.rank, generator=ctx.rng(f"factors {step}").torch_generator())
        u, v = low_rank.factorise(p_local, start.to(p_local))
        seen = {PROMPT: p_global + low_rank.composed(p_local, u, v, self.residual)}
        size, c_local, c_global = rows.batch_size, self.clip_local, self.clip_global
        if self.clipped == "texts":
            found = rows.feature(seen, batch)
            total = clipping.clipped_outer_sum(found.left, found.right, self.clip_texts)
            std = self.clip_texts * joint(self.noise_local, self.noise_global)
            whole = found.pull(noise.added(total, std, ctx.noise(f"noise texts {step}")) / size)[PROMPT]
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
        d_u, d_v = (noise.added(sums[n], std, ctx.noise(f"noise {n} {step}")) / size for n in ("u", "v"))
        if self.mode == "strict":
            whole = noise.added(whole, c_global * self.noise_global, ctx.noise(f"noise {PROMPT} {step}"))
        plus = 0.1 * (d_u @ v + u @ d_v)  # as the published code has it
        return plus if self.mode == "code" else low_rank.full_gradient(u, v, d_u, d_v), whole / size

    def check(self, payload: Payload, spec: Spec) -> None:
        """A batch has rows. Raises WireError."""
        if self.mode != "strict" and not (rows := float(tensors_of(payload)[_ROWS])) >= 1:
            raise WireError(f"{_ROWS}: expected at least 1, found {rows}")

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """D_G, without weights; in the modes paper and code B in clear, which the server's noise is divided by."""
        fields = tensors_of(payload)
        clear = {} if self.mode == "strict" else {_ROWS: float(fields[_ROWS])}
        return Terms([Term(PROMPT, fields[PROMPT], 1.0)], clear)

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """p_G moves along the unweighted mean; in the modes paper and code the mean gets its noise here."""
        old = server.tensors[PROMPT]
        moved = sums.means({PROMPT: old.float()})[PROMPT]
        if self.mode != "strict":  # one row moves the mean of N clients by C / (N B), when it is clipped by itself
            fewest = min(float(said[_ROWS]) for said in sums.clear.values())
            std = self._nominal * self.clip_global / (sums.weight(PROMPT) * fewest)
            moved = noise.added(moved, std, ctx.noise("noise on the mean"))
        step = moved if self.exchange == "epoch" else -self.learning_rate * moved
        return State({PROMPT: (old.float() + step).to(old.dtype)}, server.scalars)

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """The shared prompt; where its private state is given, a client's p_G + p_L as `residual` has it."""
        shared = server.tensors[PROMPT]
        if private is None:
            return {"server": {PROMPT: shared}}
        v_0 = torch.randn(shared.shape[1], self.rank, generator=rng.initial(0, "evaluation").torch_generator())
        p_local = private.tensors[PROMPT]
        own = low_rank.composed(p_local, *low_rank.factorise(p_local, v_0), self.residual)
        return {"server": {PROMPT: shared}, "client": {PROMPT: (shared + own).to(shared.dtype)}}

    def layout(self, spec: Spec) -> Layout:
        """One prompt each way; in the modes paper and code the size of a batch beside it."""
        fields = dense_fields(spec, "down", self.wire_dtype) + dense_fields(spec, "up", self.wire_dtype)
        rows = () if self.mode == "strict" else (Field(_ROWS, "up", Dense(torch.float32), (), "rows"),)
        return Layout(fields + rows)
