"""Base classes of methods that broadcast the server's tensors and average the trained weights.

A method's own file has its fields, the algorithm of client and server (`client`, `server_update`), and its
deviations. `fedveil.ops.server_optimizer` has server optimizers for all methods.
"""

from __future__ import annotations

from fedveil.contract.contributions import ClientContributions, weighted_contributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, Method, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.ops.lora_algebra import factor_modules
from fedveil.ops.upload_quantization import UploadQuantization
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, cast_to, dense_fields


class WeightAveragingMethod(Method):
    """A method that averages trained weights. It is not a dataclass: each method declares its fields, in its own order.

    Attributes:
        wire_dtype: dtype on the wire in both directions.
        upload_bits: bits of the codes of an upload; a method without this field sends no codes.
    """

    wire_dtype: WireDtype
    upload_bits: int = 0

    def __post_init__(self) -> None:
        self._uploads  # noqa: B018  # this access checks upload_bits

    @property
    def _uploads(self) -> UploadQuantization:
        return UploadQuantization(self.wire_dtype, self.upload_bits)

    @property
    def stale_upload_conflict(self) -> str:
        """Return "": an upload is the server's tensors, moved by training."""
        return ""

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return the adapter's initial weights, drawn once for all clients."""
        return FederatedState(dict(weights))

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return the server's tensors, the same for every client."""
        return Payload(cast_to(server.tensors, self.wire_dtype))

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return every tensor of the upload times the client's number of examples, and that number."""
        return weighted_contributions(self._uploads.opened(payload), num_examples)

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare every tensor, in the broadcast and in the upload."""
        return MessageLayout(dense_fields(spec, "down", self.wire_dtype) + self._uploads.fields(spec))


class LoraAveragingMethod(WeightAveragingMethod):
    """A method that averages LoRA factors."""

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return (A_0, B_0), drawn once for all clients. Raises ConfigError if a factor has no partner."""
        factor_modules(spec)
        return super().init(spec, weights, rng)
