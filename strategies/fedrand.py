"""FedRand.

Park, Lee, Kim, Hwang: FedRand: Enhancing Privacy in Federated Learning with Randomized LoRA Subparameter Updates.
2025.

Each client picks at random the LoRA factor that it shares, and keeps the other factor private. The server
separately averages the A factors and the B factors that it receives.

| paper | code | shape, unit |
|---|---|---|
| A^l, B^l | `<module>.lora_A`, `<module>.lora_B` | r x d_in and d_out x r, weights; A random, B zero at first |
| rho | `rho` | probability of sharing A |
| a_k | the upload's variant | "A" (a_k = 1) or "B" (a_k = 0), one draw for all layers |
| n_k, m_r | `num_examples`, their sum | examples |
| alpha, beta | `sums.weight(name) / sums.examples` | share of examples from clients that sent A, or B |

    u^(k) ~ U(0, 1),  a_k = 1[u^(k) <= rho]                                             (Eq. 5, on the client)
    start = (A_r, B^(k)_past) if a_k = 1 else (A^(k)_past, B_r)                         (Eq. 6)
    send A^(k) if a_k = 1 else B^(k), after E local epochs on both                      (Algorithm 2)
    A_{r+1} = sum_{a_k=1} n_k / (alpha m_r) A^(k),  B_{r+1} = sum_{a_k=0} n_k / (beta m_r) B^(k)   (Algorithm 1)

A client shares: one LoRA factor, drawn in each round. A client keeps: the other factor.

The client learns: A_r and B_r (with `downlink = "selected"` only the factor it shares).
The server learns: one trained factor of each client and round, which factor it is, and n_k. It never gets both
factors from one participation. However, if a client shares A after B, the server knows its B as of the previous
participation.

Formal guarantees: none (epsilon is infinite). By construction:
1. No upload contains both factors, or the partner of a factor sent in the same participation.
2. Without secure aggregation, the client draws from its own secret, which the server does not have.
3. Under secure aggregation, the server draws, and every site knows the draw: each factor is summed over no sites or
   over at least `secure.min-sites` sites. In a small cohort all sites send the same factor in a round, and rounds 2 k
   and 2 k + 1 are drawn together: with rho = 0.5 they send A and B once each, in random order.

| case | result |
|---|---|
| no client shares A (alpha = 0) | A_{r+1} = A_r, the same tensor; the same holds for B |
| rho = 1 | only A is shared; the server's B stays at zero, so its model is the base |
| rho = 0 | only B is shared; the server's A stays A_0 |
| newcomer in round 0 | it starts at the server's (A_0, B_0) |
| newcomer in a later round | `cold = "server"`: both factors come from the server. `cold = "initial"`, the paper's
  literal rule: its private factor starts as A_0 or B_0, which no longer matches the other factor |
| past factor of a site that skipped rounds | its value at the end of the last participation |
| site that lost its private state | with downlink = "both" it is a newcomer; with "selected" it reports an error and
  gets both factors next time |

Differences from the paper: the server draws A_0 once for all clients. `init_factors = "independent"` is the
paper's Algorithm 2, lines 2 and 3, which halves the norm of the first mean of A. The means are running means weighted
by n_k, so nothing is divided by alpha or beta. `downlink = "selected"` is ours: a client announces its next draw
in its upload, and the server sends only that factor. `past = false` and `normalise = false` are the paper's
ablations "w/o past parameters" and "w/o normalization".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast, final

import torch
from torch import Tensor

from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums, ClientContributions, weighted_contributions
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.layout import MessageLayout, Payload, ScalarField
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError, StateError, WireError
from fedveil.ops.lora_algebra import FACTORS, Factor, factor_modules, factor_name, parse_factor_name
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, payload_tensors

__all__ = ["FedRand"]

_INITIAL = "initial."  # prefix of A_0 in the server's state and on the wire; only used with cold = "initial"


@final
@dataclass(frozen=True)
class FedRand(WeightAveragingMethod):
    """Each client shares one randomly drawn LoRA factor and keeps the other.

    Attributes:
        rho: probability that a client shares A.
        downlink: broadcast "both" factors, or only the "selected" factor that the client announced.
        past: start the private factor from the client's last participation; False is "w/o past parameters".
        normalise: divide by alpha and beta; False is "w/o normalization".
        init_factors: a client's starting point in round 0: "shared" factors from the server, or its own "independent"
            factors.
        cold: private factor of a client that joins in a later round: the "server" factor or the "initial" factor.
        adapter: LoRA; no other adapter has factors.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded factor, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    rho: float = 0.5
    downlink: Literal["both", "selected"] = "both"
    past: bool = True
    normalise: bool = True
    init_factors: Literal["shared", "independent"] = "shared"
    cold: Literal["server", "initial"] = "server"
    adapter: LoraAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.rho <= 1.0:
            raise ConfigError(f"rho: expected a probability from 0 to 1, found {self.rho}")
        if self.downlink == "selected" and not self.past:
            raise ConfigError(
                'downlink: past = false requires "both", because both factors then come from the server; found '
                '"selected"'
            )
        if self.cold == "initial" and not self.past:
            raise ConfigError(
                'cold: "initial" has no effect with past = false, because a newcomer\'s factors then come from the '
                "server too; leave cold out"
            )
        self._uploads  # noqa: B018  # this access checks upload_bits

    @property
    def has_partial_uploads(self) -> bool:
        """Return whether sites draw their factor. With rho = 0 or 1 they do not: all sites send the same factor."""
        return 0.0 < self.rho < 1.0

    @property
    def stale_upload_conflict(self) -> str:
        """Return why late uploads are refused if sites start round 0 from factors that the server does not know."""
        if self.init_factors == "shared":
            return ""
        return 'starts each site from its own random factors (init_factors = "independent") instead of the server\'s'

    @property
    def plans_entries(self) -> bool:
        """Return True: under secure aggregation the server draws the factors, so that enough sites send each one."""
        return True

    @property
    def keeps_past(self) -> bool:
        """Return `past`: True unless it is switched off."""
        return self.past

    @property
    def sends_same_broadcast(self) -> bool:
        """Return whether all sites get both factors, without a selected factor or an initial factor for newcomers."""
        return self.downlink == "both" and self.cold == "server"

    @property
    def keeps_private_state(self) -> bool:
        """Return True: both factors stay at the site."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return (A_0, B_0), drawn once for all clients."""
        factor_modules(spec)
        initial_factors = (
            {_INITIAL + n: w for n, w in parse_factor_name(weights, "A").items()} if self.cold == "initial" else {}
        )
        return FederatedState({**weights, **initial_factors}, {"next_factor": {}})

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return (A_r, B_r), or only the factor that the client announced if `downlink = "selected"`."""
        variant = self._down_variant(server, ctx)
        sent = server.tensors if variant == "cold" else _factors(server.tensors)
        if variant in FACTORS:
            sent = parse_factor_name(sent, _side(variant))
        return Payload(cast_to(sent, self.wire_dtype), variant)

    def _down_variant(self, server: FederatedState, ctx: RoundContext) -> str:
        if ctx.is_new:
            return "cold" if self.cold == "initial" and ctx.round > 0 else "both"
        if self.downlink == "both":
            return "both"
        if ctx.entries is not None:
            return _planned_factor(ctx.entries, ctx.site, _factors(server.tensors))
        announced = cast("Mapping[str, str]", server.scalars["next_factor"])
        return announced.get(ctx.client, "both")

    def plan_entries(self, spec: Spec, cohort: Sequence[str], fewest: int, ctx: RoundContext) -> EntryTable:
        """Draw each site's factor with rho, then switch random sites until at least `fewest` sites send each factor.

        In a cohort of fewer than 2 `fewest` sites, all sites send the same factor (`_draw_for_all`).
        """
        if len(cohort) < 2 * fewest or not self.has_partial_uploads:
            drawn = dict.fromkeys(cohort, self._draw_for_all(ctx))
        else:
            drawn = {site: self._draw(replace(ctx, client=site), "factor") for site in cohort}
            for side, other in (FACTORS, FACTORS[::-1]):
                others = [site for site in cohort if drawn[site] == other]
                lacking = max(0, fewest - (len(cohort) - len(others)))
                moved = ctx.rng(f"moved to {side}").choice(len(others), lacking)
                drawn |= {others[i]: side for i in moved}
        senders = {side: tuple(sorted(site for site in cohort if drawn[site] == side)) for side in FACTORS}
        return EntryTable(blocks={name: senders[factor_name(name)] for name in spec}, fewest=fewest)

    def _draw_for_all(self, ctx: RoundContext) -> Factor:
        """Return the factor that all sites in a small cohort send; rounds 2 k and 2 k + 1 are drawn together.

        Independent draws would often pick the same factor in both rounds. If that factor is A, the server's B stays at
        zero, so its model stays the base. Therefore the two rounds are a systematic sample: with one draw of
        u ~ U(0, 1) for both, round 2 k + i sends A if floor(u + (i + 1) rho) > floor(u + i rho). Each round sends A
        with probability rho. The two rounds send A once if rho = 0.5, at most once if rho < 0.5, and at least once if
        rho > 0.5.
        """
        pair, place = divmod(ctx.round, 2)
        word = int.from_bytes(replace(ctx, round=pair).rng("factor of all in two rounds").bytes(4), "little")
        share = round(self.rho * 2**32)
        before, after = ((word + i * share) >> 32 for i in (place, place + 1))
        return "A" if after > before else "B"

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Apply eq. 5 and 6, train both factors, and send one of them (Algorithm 2)."""
        shared = self._shared(down, trainer.spec, ctx)
        start = self._start(shared, private, down, trainer.spec, ctx)  # Eq. 6
        trained = trainer.train(start).weights
        # Under secure aggregation the server also draws the next factor; this field then repeats the current one.
        upcoming = self._draw(ctx, "next factor") if ctx.entries is None else shared
        scalars = {"next_factor": upcoming} if self.downlink == "selected" else {}
        return FederatedState(dict(trained)), Payload(
            self._uploads.sent(parse_factor_name(trained, shared)), shared, scalars
        )

    def _shared(self, down: Payload, spec: Spec, ctx: RoundContext) -> Factor:
        """Return the factor to send: the announced factor, or a draw (Eq. 5), or the table's under secure aggregation.

        Raises WireError if the server sent a different factor than the table gives this site.
        """
        if ctx.entries is None:
            return _side(down.variant) if down.variant in FACTORS else self._draw(ctx, "factor")
        shared = _planned_factor(ctx.entries, ctx.site, spec)
        if down.variant in FACTORS and down.variant != shared:
            raise WireError(
                f"variant: the table of entries assigns {shared} to this site, but the server sent {down.variant}"
            )
        return shared

    def _draw(self, ctx: RoundContext, purpose: str) -> Factor:
        return "A" if bool(ctx.rng(purpose).bernoulli(self.rho, ())) else "B"

    def _start(
        self, shared: Factor, private: FederatedState | None, down: Payload, spec: Spec, ctx: RoundContext
    ) -> dict[str, Tensor]:
        received = payload_tensors(down)
        if private is None and ctx.round == 0 and self.init_factors == "independent":
            return _random_pair(spec, ctx.rng("init"))
        if private is not None and self.past:
            own_factors = private.tensors
        elif down.variant == "cold":
            own_factors = {
                n: received[_INITIAL + n] if factor_name(n) == "A" else torch.zeros(t.shape) for n, t in spec.items()
            }
        elif down.variant == "both":
            own_factors = received
        else:
            raise StateError(
                "private state: the factors of an earlier participation are missing, and the server sent only "
                f"{down.variant}; it will send both factors at the next participation"
            )
        return as_spec({n: received[n] if factor_name(n) == shared else own_factors[n] for n in spec}, spec)

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return n_k times the sent factor (decoded if quantized), n_k itself, and the announced draw in the clear."""
        return replace(weighted_contributions(self._uploads.opened(payload), num_examples), clear=payload.scalars)

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return the mean of A over the clients that sent A, and of B over those that sent B (Algorithm 1)."""
        announced = {client: _side(scalars["next_factor"]) for client, scalars in sums.clear.items() if scalars}
        new = sums.means(_factors(server.tensors))
        if not self.normalise:
            new = {n: w * (sums.weight(n) / sums.examples) if n in sums else w for n, w in new.items()}
        next_factors = cast("Mapping[str, str]", server.scalars["next_factor"])
        announced = announced if ctx.entries is None else {}
        return FederatedState({**server.tensors, **new}, {"next_factor": {**next_factors, **announced}})

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the server's model; with `private` also that client's model."""
        clients = {"client": private.tensors} if private is not None else {}
        return {"server": _factors(server.tensors), **clients}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare both factors or only the announced factor down, and exactly one factor up."""
        fields = dense_fields(
            parse_factor_name(spec, "A"), "down", self.wire_dtype, self._down_variants("A"), self._when("A")
        )
        fields += dense_fields(
            parse_factor_name(spec, "B"), "down", self.wire_dtype, self._down_variants("B"), self._when("B")
        )
        if self.cold == "initial":
            initial = dense_fields(
                parse_factor_name(spec, "A"), "down", self.wire_dtype, ("cold",), "to a newcomer", _INITIAL
            )
            fields += initial
        for side in FACTORS:
            fields += self._uploads.fields(parse_factor_name(spec, side), (side,), f"the client drew {side}")
        return MessageLayout(
            fields, (ScalarField("next_factor", "up", FACTORS),) if self.downlink == "selected" else ()
        )

    def _down_variants(self, side: Factor) -> tuple[str, ...]:
        cold = ("cold",) if self.cold == "initial" else ()
        return ("both", *cold, *((side,) if self.downlink == "selected" else ()))

    def _when(self, side: Factor) -> str:
        return "always" if self.downlink == "both" else f"newcomer, or the client announced {side}"


def _side(text: object) -> Factor:
    for side in FACTORS:
        if text == side:
            return side
    raise ConfigError(f'factor: expected "A" or "B", found {text!r}')


def _planned_factor(table: EntryTable, site: str, names: Collection[str]) -> Factor:
    """Return the factor that the table assigns to a site. Raises WireError unless it is exactly all A or all B."""
    planned = table.names_of(site) or frozenset()
    for side in FACTORS:
        if planned == frozenset(name for name in names if factor_name(name) == side):
            return side
    raise WireError("entries: the table must assign this site the same factor, A or B, in every layer, but does not")


def _factors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: w for name, w in tensors.items() if not name.startswith(_INITIAL)}


def _random_pair(spec: Spec, rng: RandomStream) -> dict[str, Tensor]:
    """Return A drawn uniformly from +-1/sqrt(d_in), as in PEFT, and B set to zero."""
    generator = rng.torch_generator()
    return {
        n: torch.zeros(t.shape)
        if factor_name(n) == "B"
        else (torch.rand(t.shape, generator=generator) * 2 - 1) / t.shape[1] ** 0.5
        for n, t in sorted(spec.items())
    }
