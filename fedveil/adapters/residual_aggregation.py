"""Exact mean of the products B_i A_i: R (ResidualLoraAdapter) absorbs the part that the factors cannot represent.

    W_t = W_0 + scale (R_t + B_t A_t),    R_{t+1} = R_t + D_t,    D_t = U_t V_t where the factors are smaller than D_t

R_t is dense: it is the sum of all D so far. A site that took part in the last completed round has R_{t-1} and gets U V.
Any other site gets the whole R_t. So a site keeps R on its disk and adds the same changes as the server, in the same
order. Both copies of R are then equal, except for rounding differences between machines.

| broadcast | receiver | sent in addition to the pairs |
|---|---|---|
| "start" | all sites, while R is zero | nothing |
| "step" | a site whose upload was in the last sums | U (d_out x k) and V (k x d_in) for each layer, of any rank k |
| "whole" | any other site; all sites if D has no such factors, or under secure aggregation | R, dense |

U V equals D to within 1e-6 of the norm of the averaged values. It is computed with a sketch, and its error is measured
(`low_rank.factor_pair`). U V itself is then added to R, so that server and sites agree. k is at most the sum of the
ranks sent, plus the rank of one more pair if the new pairs are rounded. It is also at most `_most`, the largest rank at
which the factors have no more entries than D. A median of products has full rank: the server then sends the whole R.
Under secure aggregation all sites get the whole R, so that the plan can name a single message, and they do not keep it.
R and the factors are fp32 for any wire dtype, because they accumulate over the run.

| memory | bytes per layer |
|---|---|
| the server's state, and its checkpoint | R, and space for U and V: at most twice 4 d_out d_in |
| a site's private state | R: 4 d_out d_in; none under secure aggregation |
| the sums of a round | the mean product: 4 d_out d_in, however many sites there are |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from fedveil.adapters.residual_lora import RESIDUAL, factor_names, residual_names
from fedveil.contract.contributions import AggregateSums, Contribution, weighted_contributions
from fedveil.contract.layout import Payload, WireField
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.errors import StateError, WireError
from fedveil.ops.lora_algebra import factor_modules, factor_product
from fedveil.ops.low_rank import factor_pair
from fedveil.wire.dense import DenseCodec
from fedveil.wire.payloads import WireDtype, as_spec, dense_fields, payload_tensors

_STEP, _LEFT, _RIGHT = "step.", ".left", ".right"  # U and V, in the server's state and on the wire
_KNOWN = "step.known"  # in the server's state: 1 if U V is the last D
_FORMS = ("start", "step", "whole")
_LOST = 1e-6  # relative to the norm of the average


def start_state(spec: Spec, weights: Weights) -> FederatedState:
    """Return the server's initial state, with the pairs and R from `weights` and no step."""
    room: dict[str, Tensor] = {}
    for module in factor_modules(factor_names(spec)):
        d_out, d_in = spec[module + RESIDUAL].shape
        room[_STEP + module + _LEFT] = torch.zeros(d_out, _most(d_out, d_in))
        room[_STEP + module + _RIGHT] = torch.zeros(_most(d_out, d_in), d_in)
    return FederatedState({**weights, **room, _KNOWN: torch.tensor(0)}, {"holders": []})


def _most(d_out: int, d_in: int) -> int:
    return d_out * d_in // (d_out + d_in)


def server_model(server: FederatedState) -> dict[str, Tensor]:
    """Return the tensors in the spec, without the steps."""
    return {name: w for name, w in server.tensors.items() if not name.startswith(_STEP)}


def make_broadcast(server: FederatedState, pairs: Mapping[str, Tensor], ctx: RoundContext) -> Payload:
    """Return a broadcast with `pairs` in wire form, and the part of R that the client lacks.

    Under secure aggregation every site gets the whole R, so that all get the same message.
    """
    r = residual_names(server_model(server))
    if not any(bool(tensor.any()) for tensor in r.values()):
        return Payload(dict(pairs), "start")
    holders = cast("Sequence[str]", server.scalars["holders"])
    if ctx.in_secure_sum or ctx.is_new or ctx.client not in holders or not bool(server.tensors[_KNOWN]):
        return Payload({**pairs, **r}, "whole")
    sent = dict(pairs)
    for name, left in server.tensors.items():
        if name.endswith(_LEFT):
            other = name.removesuffix(_LEFT) + _RIGHT
            rank = int(left.any(0).sum())
            sent |= {name: left[:, :rank], other: server.tensors[other][:rank]}
    return Payload(sent, "step")


def apply_broadcast(private: FederatedState | None, down: Payload, spec: Spec) -> dict[str, Tensor]:
    """Return the server's R, as rebuilt at the site.

    Raises:
        StateError: the site has no R to add a step to.
        WireError: U and V do not form a pair.
    """
    tensors = payload_tensors(down)
    shapes = residual_names(spec)
    if down.variant == "start":
        return {name: torch.zeros(t.shape) for name, t in shapes.items()}
    if down.variant == "whole":
        return as_spec({name: tensors[name] for name in shapes}, spec)
    if private is None:
        raise StateError(
            "private state: the residual of an earlier participation is missing, and the server sent only its "
            "change; it will send the whole residual at the next participation"
        )
    return {name: w + _change(tensors, name.removesuffix(RESIDUAL)) for name, w in private.tensors.items()}


def _change(found: Weights, module: str) -> Tensor:
    left, right = found[_STEP + module + _LEFT], found[_STEP + module + _RIGHT]
    if left.shape[1] != len(right):
        raise WireError(f"{_STEP}{module}{_RIGHT}: expected {left.shape[1]} rows to match {_LEFT}, found {len(right)}")
    return left @ right


def client_upload(
    private: FederatedState | None,
    down: Payload,
    trainer: Trainer,
    pairs: Mapping[str, Tensor],
    frozen: Weights,
    ctx: RoundContext,
) -> tuple[FederatedState | None, dict[str, Tensor]]:
    """Train the local epochs from `pairs` with the received R frozen; return the site's new state and trained pairs.

    Under secure aggregation the site trains only from the broadcast, and keeps no state.

    Raises:
        WireError: under secure aggregation, the broadcast has only the last change to R.
    """
    if ctx.in_secure_sum and down.variant == "step":
        raise WireError(
            "variant: secure aggregation requires the whole residual, the same for all sites, but the server sent "
            "only its last change"
        )
    spec, r = trainer.spec, apply_broadcast(private, down, trainer.spec)
    frozen_masks = {**frozen, **{name: torch.tensor(True) for name in r}}
    begun = {name: r[name] if name in r else pairs[name].to(tensor.dtype) for name, tensor in spec.items()}
    trained = factor_names(trainer.train(begun, frozen_masks).weights)
    return None if ctx.in_secure_sum else FederatedState(r), trained


def factor_products(pairs: Weights, weight: float) -> Iterator[Contribution]:
    """Yield n_i B_i A_i under the names of R, one layer at a time."""
    for module in factor_modules(pairs):
        a, b = (pairs[f"{module}.lora_{side}"].float() for side in "AB")
        yield Contribution(module + RESIDUAL, b @ a, weight)


def pairs_and_products(pairs: Weights, weight: float) -> Iterator[Contribution]:
    """Yield n_i A_i, n_i B_i and n_i B_i A_i."""
    yield from weighted_contributions(pairs, weight).tensors
    yield from factor_products(pairs, weight)


def settle_residual(
    server: FederatedState, sums: AggregateSums, pairs: Weights, subtracted: bool, ranks: int, ctx: RoundContext
) -> FederatedState:
    """Return the next state with these pairs; if `subtracted`, their product is subtracted from the mean product.

    `ranks`: the largest possible rank of a change. Either all layers have a step, or none do.
    """
    r, steps, known = dict[str, Tensor](), dict[str, Tensor](), True
    for module in factor_modules(pairs):
        name, own = module + RESIDUAL, factor_product(pairs, module)
        mean = sums.take(name)
        size = max(_norm(mean), _norm(own) if subtracted else 0.0)
        change = mean - own if subtracted else mean
        generator = ctx.rng(f"sketch {module}").torch_generator()
        step_pair = factor_pair(change, min(ranks, _most(*change.shape)), _LOST * size, generator)
        r[name] = server.tensors[name] + (change if step_pair is None else step_pair[0] @ step_pair[1])
        known = known and step_pair is not None
        for side, part in zip((_LEFT, _RIGHT), step_pair or (change[:, :0], change[:0]), strict=True):
            room = torch.zeros_like(server.tensors[f"{_STEP}{module}{side}"])
            room[: part.shape[0], : part.shape[1]] = part
            steps[f"{_STEP}{module}{side}"] = room
    order = {**pairs, **r, **steps, _KNOWN: torch.tensor(int(known))}
    return FederatedState({name: order[name] for name in server.tensors}, {"holders": sorted(sums.clear)})


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def residual_fields(spec: Spec, pairs: Spec, dtype: WireDtype) -> tuple[WireField, ...]:
    """Return all fields of a broadcast that contains these pairs."""
    fields = dense_fields(pairs, "down", dtype, _FORMS)
    fields += dense_fields(
        residual_names(spec), "down", "float32", ("whole",), "to a site that lacks more than the last step"
    )
    codec, when = DenseCodec(), "to a site that was in the last sums"
    for name, tensor in residual_names(spec).items():
        (d_out, d_in), module = tensor.shape, _STEP + name.removesuffix(RESIDUAL)
        most = _most(d_out, d_in)
        fields += (
            WireField(module + _LEFT, "down", codec, (d_out, None), "weight", ("step",), when, (d_out, most)),
            WireField(module + _RIGHT, "down", codec, (None, d_in), "weight", ("step",), when, (most, d_in)),
        )
    return fields
