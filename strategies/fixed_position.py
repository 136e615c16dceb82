"""Fixed position embedding.

Sawada, Imaizumi, Kiya compare their random binary weights for federated learning of the Vision Transformer with it.
Clients never send the gradient of the position embedding, from which APRIL's closed form starts; it stays as it is.

| paper | code | shape, unit |
|---|---|---|
| w | the weights in `server.tensors` | every tensor of the adapter |
| E_pos | tensors whose name matches `hidden` | withheld |
| g^n | `fedsgd.gradient` | gradient of client n: one batch, or w minus its locally trained weights |
| eta | `learning_rate` | step of the server |

    send g^n_j for every tensor j that is not hidden
    w_j <- w_j - eta (1/N) sum_n g^n_j  (Eq. 10 and 12 without masks);  E_pos <- E_pos

A client shares: its gradient without that of the position embedding. With it stays: that part of the gradient.

The client learns: the weights of every round it takes part in.
The server learns: each client's gradient of every tensor that is not hidden, in full.

Formal guarantees: none (epsilon is infinite). The hidden gradient may be computable from what is sent.

| case | result |
|---|---|
| hidden tensors | the server's initial values in every round, bit for bit: no step, no decay, no moments |
| `hidden` matches no tensor | ConfigError at the start: nothing would be withheld |
| `hidden` matches every tensor | an upload without fields; nothing changes |
| exchange = "epoch" | the hidden tensors train locally; their change is dropped at the end of each participation |
| no upload | everything stays |

Differences from the paper: none in the rule. `exchange = "epoch"`, server Adam and `weighted` are ours, as in
`random_binary`. It is `random_binary` with R = 1 for the hidden tensors and R = 0 for all others, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.all_weights import AllWeights
from fedveil.adapters.kinds import AnyAdapter
from fedveil.algebra import fedsgd
from fedveil.algebra.fedsgd import Exchanged, Optimiser
from fedveil.algebra.masks import check_pattern, keeps
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, Sends, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms, weighted
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, cast_to, dense_fields, tensors_of


@final
@dataclass(frozen=True)
class FixedPosition(Method):
    """Plain FedSGD, with some tensors withheld.

    Attributes:
        hidden: regular expression, searched in tensor names.
        exchange: what a client sends: the gradient of one "batch", or the pseudo-gradient of local epochs ("epoch").
        optimiser: the server's.
        learning_rate: eta; None: 1 with exchange = "epoch" and SGD, otherwise 1e-4.
        weighted: weight every client with its number of examples.
        adapter: what is trained.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
    """

    hidden: str = "position_embeddings|pos_embed"
    exchange: Exchanged = "batch"
    optimiser: Optimiser = "sgd"
    learning_rate: float | None = None
    weighted: bool = False
    adapter: AnyAdapter = field(default_factory=AllWeights)
    wire_dtype: WireDtype = "float32"

    @property
    def sends(self) -> Sends:
        """Gradients, or pseudo-gradients of an epoch, without the hidden tensors."""
        return "gradients"

    @property
    def optimises(self) -> bool:
        """In local epochs; for a single batch there is nothing but its gradient."""
        return self.exchange == "epoch"

    def __post_init__(self) -> None:
        check_pattern("hidden", self.hidden)
        fedsgd.check_learning_rate(self.learning_rate)
        fedsgd.check_wire_dtype(self.wire_dtype)

    def _sent(self, names: Iterable[str]) -> list[str]:
        return [name for name, keep in keeps({self.hidden: 1.0}, names).items() if keep]

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """w_0, and zero moments for Adam. Raises ConfigError where nothing would be withheld."""
        if len(self._sent(spec)) == len(spec):
            raise ConfigError(
                f"hidden: expected a regular expression that matches some of {len(spec)} tensors such as {min(spec)}, "
                f'found "{self.hidden}"'
            )
        return fedsgd.start(weights, self.optimiser)

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """w, the same for every client."""
        return Payload(cast_to(fedsgd.weights_of(server), self.wire_dtype))

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """g without the hidden tensors."""
        found = fedsgd.gradient(trainer, tensors_of(down), self.exchange)
        return None, Payload(cast_to({n: found[n] for n in self._sent(trainer.spec)}, self.wire_dtype))

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """What was sent, with weight n_k or 1."""
        return weighted(tensors_of(payload), float(num_examples) if self.weighted else 1.0)

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """A step along the mean of what was sent."""
        eta = fedsgd.rate_of(self.learning_rate, self.exchange, self.optimiser)
        return fedsgd.descend(server, sums, self.optimiser, eta)

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """One model: the server's."""
        return {"server": fedsgd.weights_of(server)}

    def layout(self, spec: Spec) -> Layout:
        """Every tensor down, all but the hidden ones up."""
        up = {name: spec[name] for name in self._sent(spec)}
        return Layout(dense_fields(spec, "down", self.wire_dtype) + dense_fields(up, "up", self.wire_dtype))
