"""Where a site began its training beside a residual (`fedveil.adapters.residual_mean`), and where it left its pairs.

FedEx-LoRA and FLoRA send a residual R, or the change of it, with their pairs, and no training moves it. So all that a
site begins from went over the wire, and the server has it to the bit: it runs the client's half of the method again on
the broadcasts that the site answered, with a trainer that does not train.

| case | result |
|---|---|
| a broadcast of a change alone | the site's earlier broadcasts are read back to one that needs none |
| a repeated round | each attempt begins from what the site had kept of an earlier round |
| a broadcast that the view lacks | StateError, with the site and the round |
| a lower rank of the site (FLoRA) | its pairs, with zeros beyond the rank |
| uploads in codes | the weights that they stand for |
| sums unseen | FedEx-LoRA's mean pairs; of FLoRA products alone are summed, in which there are no pairs |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch import Tensor
from typing_extensions import override

from fedveil.adapters import ranks
from fedveil.algebra.coded import Uploads
from fedveil.attacks.base import Participation, Sighting, View
from fedveil.contract.address import Address
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext, State
from fedveil.contract.spec import Spec, Weights, movable
from fedveil.contract.trainer import Frozen, Penalty, Trained, Trainer
from fedveil.errors import StateError
from fedveil.foreign import shown
from fedveil.strategies.fedex_lora import FedExLora
from fedveil.strategies.flora import Flora


def is_beside(spec: Spec) -> bool:
    """Whether sites train beside tensors that no training moves."""
    return any(tensor.fixed for tensor in spec.values())


def misfit(view: View) -> str:
    """Why this cannot be done for a run beside a residual, in words; "" where it can."""
    method, spec = view.exchange.method, view.exchange.spec
    if not isinstance(method, FedExLora | Flora):
        return "the sites train beside a residual, and only FedEx-LoRA's and FLoRA's can be rebuilt"
    if view.is_unseen and not set(method.summed(spec, 0)) & set(movable(spec)):
        return "what was summed unseen are products of the pairs alone: where a site left its pairs is not known"
    return ""


def begun(view: View, answered: Sequence[Participation], index: int) -> Weights:
    """Every tensor of the spec as the site began with it in one of its participations.

    Args:
        view: of the server.
        answered: all participations of the site, in their order.
        index: which of them.

    Raises:
        StateError: a broadcast that this needs is not in the view.
    """
    turns = [index]  # back to a broadcast that needs nothing of an earlier one
    while True:
        try:
            kept, trained = _again(view, answered[turns[0]], None)
            break
        except StateError:
            earlier = [i for i in range(turns[0]) if answered[i].up.round < answered[turns[0]].up.round]
            if not earlier:
                raise
            turns.insert(0, earlier[-1])
    for turn in turns[1:]:
        kept, trained = _again(view, answered[turn], kept)
    return trained


def _again(view: View, part: Participation, private: State | None) -> tuple[State | None, Weights]:
    """What the site kept after that turn, and what it began from."""
    if part.down is None:
        raise StateError(
            f"tap: expected the broadcast that site {shown(part.up.site, 80)} answered in round {part.up.round}, "
            "found none; audit a run whose tap is whole"
        )
    still = _Still(view.exchange.spec)
    ctx = RoundContext(part.up.round, part.up.site, False, bytes(32), address=Address(site=part.up.site))
    kept, _ = view.exchange.method.client(private, view.read(part.down).payload, still, ctx)
    return kept, still.began


class _Still(Trainer):
    """Remembers what it was to train from, and leaves it there."""

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
        raise NotImplementedError("a method whose start is rebuilt makes no steps of its own")

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> Trained:
        self.began = weights
        return Trained(weights, {})

    @override
    def gradient(self, weights: Weights) -> NoReturn:
        raise NotImplementedError("a method whose start is rebuilt sends no gradient")


def left(view: View, upload: Sighting) -> dict[str, Tensor]:
    """The pairs that an upload holds, fp32, in the spec's shapes; of sums the mean pairs, where these are summed."""
    spec, method = view.exchange.spec, view.exchange.method
    assert isinstance(method, FedExLora | Flora), "see misfit"
    uploads = Uploads(method.wire_dtype, method.upload_bits)
    found: Mapping[str, Tensor] = {}
    for name, value in upload.payload.fields.items():
        if name in spec and not spec[name].fixed:
            weights = {name: value} if isinstance(value, Tensor) else uploads.opened(Payload({name: value}))
            found = {**found, **{n: w.float() for n, w in weights.items()}}
    return ranks.padded(found, spec)
