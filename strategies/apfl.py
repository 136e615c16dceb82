"""APFL.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. 2020. https://arxiv.org/abs/2003.13461

FedAvg plus a local model at each client. The client uses a mixture of the two models, and trains its local model
within that mixture.

| paper | code | shape, unit |
|---|---|---|
| w | `server.tensors`; the received weights | every tensor of the adapter |
| w_i | the upload | every tensor of the adapter |
| v_i | the private state | every tensor of the adapter |
| alpha_i | `alpha`, or `private.scalars["alpha"]` | 0.05 to 1 |
| eta of alpha | `alpha_rate` | |
| n_i, m | `num_examples`, their sum over the cohort | examples |

    u_i      = alpha_i v_i + (1 - alpha_i) w_i                                   (the personalized model)
    alpha_i <- alpha_i - eta <v_i - w_i, gradient of f_i at u_i>                 (once per round, at w_i = w)
    v_i     <- local epochs on f_i(u_i) over v_i, at w_i = w                     (Algorithm 1, client)
    w_i     <- local epochs on f_i(w_i), from w                                  (Algorithm 1, client)
    w      <- sum_i (n_i / m) w_i                                                (Algorithm 1, server)

A client shares: all trained weights of the global model. A client keeps: its local model v_i, and alpha_i.

The client learns: the global weights of every round it takes part in.
The server learns: each client's trained w_i in full, as under FedAvg, and n_i. It gets neither v_i nor alpha_i, and w_i
does not depend on them.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`: both training
passes use noisy steps and are charged. `dp.*` is refused if alpha adapts, because no accountant covers the noiseless
gradient that adapts it.

| case | result |
|---|---|
| the server's model and the uploads | the same as FedAvg's, bit for bit, if training draws the same batches |
| alpha = 1 | u_i = v_i: the client trains alone, starting from the first weights it received |
| newcomer | v_i starts from w, with the configured alpha |
| a site that lost its private state | treated as a newcomer |
| an adaptive alpha outside 0.05 to 1 | clamped to that range: near 0, v_i would no longer be trained |
| no upload | w stays unchanged, bit for bit |
| reported losses | the losses of w_i |

Differences from the paper: the paper alternates plain SGD steps on w_i and v_i. Here v_i is trained first, mixed with
the received w, and then w_i; both use the optimizer set by `train.*`. Training updates the mixture u_i itself, and v_i
is then computed as w + (u_i - w) / alpha_i. This objective has the same minimum over v_i, but a different metric for
its steps. alpha_i adapts on one batch per round. The model "client" mixes v_i with the server's current w. The paper's
text was not available; the equations follow other authors' accounts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast, final

from torch import Tensor

from fedveil.adapters.adapter_types import AnyAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import check_number
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.wire.payloads import WireDtype, as_spec, payload_tensors

__all__ = ["APFL"]

_MIN_ALPHA = 0.05


@final
@dataclass(frozen=True)
class APFL(WeightAveragingMethod):
    """Every client shares all trained weights, and uses a mixture of the global model and its own local model.

    Attributes:
        alpha: weight of the local model in the mixture; the initial weight if alpha adapts.
        alpha_rate: learning rate of each client's alpha; 0 keeps alpha fixed.
        adapter: the trained parameters: LoRA factors or all weights.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per uploaded weight, 2 to 8, with one scale per 256 weights; 0 disables quantization.
    """

    alpha: float = 0.5
    alpha_rate: float = 0.0
    adapter: AnyAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        check_number("alpha_rate", self.alpha_rate, zero=True)
        if not _MIN_ALPHA <= self.alpha <= 1:
            raise ConfigError(f"alpha: expected a number from {_MIN_ALPHA} to 1, found {self.alpha}")
        self._uploads  # noqa: B018  # this access checks upload_bits

    @property
    def trainings(self) -> int:
        """Return the number of training passes in a client round."""
        return 2

    @property
    def requests_raw_gradient(self) -> bool:
        """Return whether alpha adapts, which requires the gradient of one batch."""
        return self.alpha_rate > 0

    @property
    def keeps_private_state(self) -> bool:
        """Return True: the local model and its alpha stay at the site."""
        return True

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Run Algorithm 1's client: train v_i in the mixture and keep it, then train w_i and send it."""
        spec = trainer.spec
        start = as_spec(payload_tensors(down), spec)
        own, alpha = (as_spec(private.tensors, spec), _alpha(private)) if private else (start, self.alpha)
        if self.alpha_rate:
            slope = trainer.gradient(_mixture(own, start, alpha)).weights
            along = sum(float(((own[n] - start[n]) * g.to(own[n])).sum()) for n, g in slope.items())
            alpha = min(1.0, max(_MIN_ALPHA, alpha - self.alpha_rate * along))
        mixed = trainer.train(_mixture(own, start, alpha)).weights
        # Do not extrapolate buffers, such as a running variance.
        own = {n: mixed[n] if spec[n].fixed else w + (mixed[n] - w) / alpha for n, w in start.items()}
        shared = trainer.train(start).weights  # last, so that the client round reports this training
        return FederatedState(own, {"alpha": alpha}), Payload(self._uploads.sent(shared))

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return w, the mean."""
        return FederatedState(sums.means(server.tensors))

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the server's model w; with `private` also that client's mixture."""
        if private is None:
            return {"server": server.tensors}
        return {"server": server.tensors, "client": _mixture(private.tensors, server.tensors, _alpha(private))}


def _alpha(private: FederatedState) -> float:
    return cast("float", private.scalars["alpha"])


def _mixture(own: Weights, shared: Weights, alpha: float) -> dict[str, Tensor]:
    """Return u = w + alpha (v - w), which is w bit for bit where v = w."""
    return {name: w + alpha * (own[name] - w) for name, w in shared.items()}
