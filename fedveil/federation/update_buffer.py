"""Server steps from a buffer of uploads instead of rounds with a cohort (`cohort.buffer-size`; ops/staleness.py).

A site trains on the server's state that it received, while the server takes further steps without it. Each step takes
`cohort.buffer-size` uploads, and each site that is not training is asked again after a step.

| an upload ... | what happens |
|---|---|
| for the current state | is added unchanged |
| for a state at most `cohort.max-staleness` steps older | is added with weight 1 / sqrt(1 + staleness) |
| for an older state | is discarded and recorded as such; the site is asked again after the step |

A site has one request at a time, and no site has two uploads in a step. A site is asked for each state at most once,
unless a step fails: with fewer uploads than it needs, the attempt is repeated from the same state, like a round, and
all sites are asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

import torch
from typing_extensions import override

from fedveil.contract.contributions import AggregateSums, ClientContributions
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import movable_names
from fedveil.federation.exchange import MessageExchange
from fedveil.ops.staleness import rebase_contributions

__all__ = ["BufferedExchange", "SitesInFlight", "describe_discard"]


@dataclass(frozen=True)
class BufferedExchange(MessageExchange):
    """An exchange whose uploads may have been trained from earlier server states.

    Attributes:
        version: the number of server steps so far; the round of the next one.
        states: the server's states by the round in which they were sent, including the current one.
    """

    version: int = 0
    states: Mapping[int, FederatedState] = field(default_factory=dict, repr=False)

    @classmethod
    def from_exchange(
        cls, exchange: MessageExchange, version: int, states: Mapping[int, FederatedState]
    ) -> BufferedExchange:
        """Return the exchange for one server step."""
        return cls(exchange.method, exchange.name, exchange.spec, exchange.optimizer, version, states)

    @override
    def contributions(self, upload: AcceptedUpload) -> ClientContributions:
        """Return an upload's contributions to the current state."""
        return rebase_contributions(
            super().contributions(upload),
            self.version - upload.ctx.round,
            self.method.upload_kind,
            self.states[upload.ctx.round].tensors,
            self.states[self.version].tensors,
            set(movable_names(self.spec)),
            getattr(torch, getattr(self.method, "wire_dtype", "float32")),
        )

    @override
    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return the next state. The context is that of the current round, not of the last upload's round."""
        return super().server_update(server, sums, replace(ctx, round=self.version))


@final
class SitesInFlight:
    """The sites that have been asked and have not answered, and the states that they train from.

    Args:
        max_staleness: cohort.max-staleness.
        keeps_all: also keep the states of uploads that will be discarded, for sites whose training is simulated.
    """

    def __init__(self, max_staleness: int, keeps_all: bool = False) -> None:
        self.max_staleness, self.keeps_all, self.version = max_staleness, keeps_all, 0
        self.contexts: dict[str, RoundContext] = {}
        self.states: dict[int, FederatedState] = {}

    def begin(self, version: int, state: FederatedState) -> None:
        """Begin the step from this state; release the states that no site in flight can still need."""
        self.version = version
        in_flight = self.contexts.values()
        needed = {ctx.round for ctx in in_flight if self.keeps_all or not self.is_too_stale(ctx)}
        self.states = {round_: old for round_, old in self.states.items() if round_ in needed} | {version: state}

    def ask(self, ctx: RoundContext) -> None:
        """Record a request to the context's site for the current state."""
        if ctx.client in self.contexts:
            raise ValueError(f"{ctx.client}: this site already has an open request")
        self.contexts[ctx.client] = ctx

    def land(self, site: str) -> RoundContext:
        """Remove and return the context of the site's open request, which has ended."""
        return self.contexts.pop(site)

    def staleness(self, ctx: RoundContext) -> int:
        """Return the number of server steps since the context's state was sent."""
        return self.version - ctx.round

    def is_too_stale(self, ctx: RoundContext) -> bool:
        """Return whether an upload for the context's state is discarded."""
        return self.staleness(ctx) > self.max_staleness

    @property
    def rounds(self) -> dict[str, int]:
        """Return, for each site in flight, the round that it was asked for."""
        return {site: ctx.round for site, ctx in sorted(self.contexts.items())}


def describe_discard(staleness: int, most: int) -> str:
    """Return the reason why an upload is discarded."""
    return f"it is {staleness} server steps old, above the limit of {most} (cohort.max-staleness)"
