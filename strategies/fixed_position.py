"""Fixed position embedding.

Sawada, Imaizumi and Kiya use it as a baseline for their random binary weights in federated learning of the Vision
Transformer. APRIL's closed form needs the gradient of the position embedding. Clients never send it, and the embedding
never changes.

| paper | code | shape, unit |
|---|---|---|
| w | the weights in `server.tensors` | every tensor of the adapter |
| E_pos | tensors whose name matches `hidden` | withheld |
| g^n | `fedsgd.gradient` | gradient of client n: one batch, or w minus its locally trained weights |
| eta | `learning_rate` | the server's step size |

    send g^n_j for every tensor j that is not hidden
    w_j <- w_j - eta (1/N) sum_n g^n_j  (Eq. 10 and 12 without masks);  E_pos <- E_pos

A client shares: its gradient without the position embedding's part. A client keeps: that part of the gradient.

The client learns: the weights of every round it takes part in.
The server learns: each client's gradient of every tensor that is not hidden, in full.

Formal guarantees: none (epsilon is infinite). The hidden gradient may be computable from the gradients that are sent.

| case | result |
|---|---|
| hidden tensors | keep the server's initial values in every round, bit for bit: no step, no decay, no moments |
| `hidden` matches no tensor | ConfigError at the start: nothing would be withheld |
| `hidden` matches every tensor | an upload without fields; nothing changes |
| exchange = "epoch" | the hidden tensors train locally; their change is dropped at the end of each participation |
| no upload | nothing changes |

Differences from the paper: none in the rule. `exchange = "epoch"`, server Adam and `weighted` are ours, as in
`random_binary`. This method is `random_binary` with R = 1 for the hidden tensors and R = 0 for all others, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.adapter_types import AnyAdapter
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.contract.contributions import ClientContributions, weighted_contributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.ops import fedsgd
from fedveil.ops.fedsgd import Exchanged, FedSgdMethod, Optimiser
from fedveil.ops.random_masks import check_pattern, keep_probability
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, cast_to, dense_fields, payload_tensors

__all__ = ["FixedPosition"]


@final
@dataclass(frozen=True)
class FixedPosition(FedSgdMethod):
    """Plain FedSGD in which clients withhold some tensors.

    Attributes:
        hidden: regular expression, searched in tensor names; matching tensors are withheld.
        exchange: a client's upload: the gradient of one "batch", or the pseudo-gradient of local epochs ("epoch").
        optimiser: the server's optimizer.
        learning_rate: eta; None means 1 with exchange = "epoch" and SGD, and otherwise 1e-4.
        weighted: weight each client by its number of examples.
        adapter: the trained parameters.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
    """

    hidden: str = "position_embeddings|pos_embed"
    exchange: Exchanged = "batch"
    optimiser: Optimiser = "sgd"
    learning_rate: float | None = None
    weighted: bool = False
    adapter: AnyAdapter = field(default_factory=AllWeightsAdapter)
    wire_dtype: WireDtype = "float32"

    def __post_init__(self) -> None:
        check_pattern("hidden", self.hidden)
        fedsgd.check_learning_rate(self.learning_rate)
        fedsgd.check_wire_dtype(self.wire_dtype)

    def _sent(self, names: Iterable[str]) -> list[str]:
        return [name for name, keep in keep_probability({self.hidden: 1.0}, names).items() if keep]

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return w_0, and zero moments for Adam. Raises ConfigError if no tensor would be withheld."""
        if len(self._sent(spec)) == len(spec):
            raise ConfigError(
                f'hidden: "{self.hidden}" matches none of the {len(spec)} tensors, such as {min(spec)}; use a '
                "regular expression that matches some of them"
            )
        return fedsgd.start_state(weights, self.optimiser)

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Return g without the hidden tensors."""
        gradient = fedsgd.client_gradient(trainer, payload_tensors(down), self.exchange)
        return None, Payload(cast_to({n: gradient[n] for n in self._sent(trainer.spec)}, self.wire_dtype))

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return the uploaded gradients, with weight n_k or 1."""
        return weighted_contributions(payload_tensors(payload), float(num_examples) if self.weighted else 1.0)

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare every tensor for the broadcast, and all but the hidden ones for the upload."""
        up = {name: spec[name] for name in self._sent(spec)}
        return MessageLayout(dense_fields(spec, "down", self.wire_dtype) + dense_fields(up, "up", self.wire_dtype))
