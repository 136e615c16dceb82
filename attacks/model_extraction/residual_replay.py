"""Recover a site's initial and final pairs in training with a residual (`fedveil.adapters.residual_aggregation`).

FedEx-LoRA and FLoRA send a residual R, or its change, along with their pairs, and training never changes R. The
site's complete starting weights were thus transmitted, and the server knows them exactly. The attack reruns the
client side of the method on the broadcasts that the site answered, with a trainer that does nothing.

| case | result |
|---|---|
| a broadcast with only a change | the attack also reads earlier broadcasts, back to a complete one |
| a repeated round | each attempt begins from the state that the site kept from an earlier round |
| a broadcast missing from the view | StateError, with the site and the round |
| a site with a lower rank (FLoRA) | the site's pairs, with zeros beyond the rank |
| quantized uploads | the decoded weights |
| secure sums | FedEx-LoRA's mean pairs; FLoRA sums only products, which contain no pairs |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch import Tensor
from typing_extensions import override

from fedveil.adapters import heterogeneous_ranks
from fedveil.attacks.base import AdversaryView, ObservedMessage, ObservedParticipation
from fedveil.contract.layout import Payload
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights, movable_names
from fedveil.contract.trainer import Frozen, Penalty, Trainer, TrainingResult
from fedveil.errors import StateError
from fedveil.ops.upload_quantization import UploadQuantization
from fedveil.sanitize import sanitize
from fedveil.strategies.fedex_lora import FedExLoRA
from fedveil.strategies.flora import FLoRA

__all__ = ["explain_misfit", "final_factors", "has_residual", "starting_weights"]


def has_residual(spec: Spec) -> bool:
    """Return whether sites train with tensors that training never changes."""
    return any(tensor.fixed for tensor in spec.values())


def explain_misfit(view: AdversaryView) -> str:
    """Return why a run with a residual cannot be replayed, in words; "" if it can."""
    method, spec = view.exchange.method, view.exchange.spec
    if not isinstance(method, FedExLoRA | FLoRA):
        return "the sites train with a residual, which can be rebuilt only for FedEx-LoRA and FLoRA"
    if view.is_unseen and not set(method.aggregate_shapes(spec, 0)) & set(movable_names(spec)):
        return "the server saw only sums of the pairs' products: a site's last pairs are not known"
    return ""


def starting_weights(view: AdversaryView, answered: Sequence[ObservedParticipation], index: int) -> Weights:
    """Return every tensor of the spec at the start of one participation of a site.

    Args:
        view: the server's view.
        answered: all participations of the site, in order.
        index: index of the participation.

    Raises:
        StateError: the view lacks a required broadcast.
    """
    turns = [index]  # back to a complete broadcast
    while True:
        try:
            state, trained = _again(view, answered[turns[0]], None)
            break
        except StateError:
            earlier = [i for i in range(turns[0]) if answered[i].up.round < answered[turns[0]].up.round]
            if not earlier:
                raise
            turns.insert(0, earlier[-1])
    for turn in turns[1:]:
        state, trained = _again(view, answered[turn], state)
    return trained


def _again(
    view: AdversaryView, part: ObservedParticipation, private: FederatedState | None
) -> tuple[FederatedState | None, Weights]:
    """Return the site's private state after that client round, and the weights that training started from."""
    if part.down is None:
        raise StateError(
            f"captured messages: the broadcast that site {sanitize(part.up.site, 80)} answered in round "
            f"{part.up.round} is missing; audit a run whose messages were all captured"
        )
    still = _Still(view.exchange.spec)
    ctx = RoundContext(part.up.round, part.up.site, False, bytes(32), address=MessageAddress(site=part.up.site))
    state, _ = view.exchange.method.client(private, view.read(part.down).payload, still, ctx)
    return state, still.began


class _Still(Trainer):
    """A trainer that records its start and returns it unchanged."""

    num_examples = 1

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.began: Weights = {}

    @property
    @override
    def spec(self) -> Spec:
        return self._spec

    @property
    @override
    def rows(self) -> NoReturn:
        raise NotImplementedError("a method whose starting weights are rebuilt does not take its own steps")

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        self.began = weights
        return TrainingResult(weights, {})

    @override
    def gradient(self, weights: Weights) -> NoReturn:
        raise NotImplementedError("a method whose starting weights are rebuilt does not send a gradient")


def final_factors(view: AdversaryView, upload: ObservedMessage) -> dict[str, Tensor]:
    """Return an upload's pairs in fp32 and in the spec's shapes; for sums, the mean pairs, if the sums have pairs."""
    spec, method = view.exchange.spec, view.exchange.method
    assert isinstance(method, FedExLoRA | FLoRA), "see misfit"
    uploads = UploadQuantization(method.wire_dtype, method.upload_bits)
    factors: Mapping[str, Tensor] = {}
    for name, value in upload.payload.fields.items():
        if name in spec and not spec[name].fixed:
            weights = {name: value} if isinstance(value, Tensor) else uploads.opened(Payload({name: value}))
            factors = {**factors, **{n: w.float() for n, w in weights.items()}}
    return heterogeneous_ranks.pad_to_rank(factors, spec)
