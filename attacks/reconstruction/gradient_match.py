"""Masked gradient matching: the adversary who knows which entries of a gradient were withheld.

Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS 2019, with two changes: only observed entries are matched, and small
images are found by Levenberg-Marquardt (Marquardt 1963). The prior is that of Geiping, Bauermeister, Dröge, Moeller:
Inverting Gradients. NeurIPS 2020.

    r(u) = m o (grad_w L(f_w(T u), y) - g) / ||m o g||         the residual is ||r||
    levenberg_marquardt:  (J^T J + mu t I) du = -J^T r,        J = dr/du,  t = mean diagonal of J^T J
    first_order:          min ||r(u)||^2 + tv TV(T u)          by Adam

u is the unknown image, T a known map into the model's input (an upsampling, else the identity), m the mask, which
anybody sees from the zeros, and y the known label. An adversary who does not know y tries each label and keeps the
least residual. Of several starts the one of least residual is kept. Nothing here sees the true image.

| case | result |
|---|---|
| nothing observed | ValueError |
| fewer observed entries than unknowns | the damped step of least norm: an image of small residual, not the image |
| pre-norm ViT with D <= C P^2 and D - 1 < S | a residual of 0 and not the image: layer norms do not see z + c 1 |
| several exchanges | one residual over all, each at its own weights; `gradients.union` merges those of equal weights |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.attacks.reconstruction.gradients import Observed

Map = Callable[[Tensor], Tensor]

_LARGEST_JACOBIAN = 1 << 29  # entries in double precision: 4 GiB
_CHUNK = 64  # columns of the Jacobian at a time
_START = 0.05  # deviation of a start, in parts of the valid range: wider ones end in a wrong minimum more often
_EASED, _RAISED, _LEAST, _MOST = 1 / 5, 4.0, 1e-15, 1e6  # of the damping mu


@dataclass(frozen=True)
class Match:
    """The image of least residual.

    Attributes:
        image: of the unknown's shape, clipped to the valid range.
        residual: ||r|| before the clipping; 1 = no better than a gradient of zeros.
        iterations: how many the start that was kept took.
        start: the number of that start.
    """

    image: Tensor
    residual: float
    iterations: int
    start: int


def levenberg_marquardt(
    model: nn.Module,
    observed: Sequence[Observed],
    labels: Tensor,
    shape: Sequence[int],
    *,
    generator: torch.Generator,
    starts: int = 3,
    iterations: int = 60,
    tolerance: float = 1e-12,
    damping: float = 1e-2,
    upsample: Map | None = None,
    low: float = -1.0,
    high: float = 1.0,
) -> Match:
    """The image by damped Gauss-Newton steps in double precision, for about a thousand unknowns.

    Args:
        model: in evaluation mode, its attention by `sdpa`: transformers' eager attention rounds to single precision.
        labels: (batch,) classes.
        shape: of the unknown (batch, channels, height, width). Without `upsample` it is the shape of the model's input.
        starts: the most; there is no further one once a residual is below `tolerance`.
        damping: mu of the first step. A step that helps divides it by 5, a step that does not multiplies it by 4.

    Raises:
        ValueError: a Jacobian above 4 GiB, or nothing observed.
    """
    residual, entries = _residual(model, observed, labels, upsample, torch.float64)
    unknowns = math.prod(shape)
    if entries * unknowns > _LARGEST_JACOBIAN:
        raise ValueError(
            f"expected at most {_LARGEST_JACOBIAN} entries of a Jacobian, found {entries} x {unknowns}: match fewer "
            "tensors, or use first_order"
        )

    def descend(flat: Tensor) -> tuple[Tensor, float, int]:
        return _damped(lambda at: residual(at.reshape(*shape)), flat, iterations, tolerance, damping)

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return _least(descend, shape, generator, starts, tolerance, (low, high), labels.device, torch.float64)


def _damped(residual: Map, flat: Tensor, iterations: int, tolerance: float, mu: float) -> tuple[Tensor, float, int]:
    """Levenberg-Marquardt from one start: where it ended, the residual's norm there, and the steps it took."""
    eye = torch.eye(flat.numel(), dtype=flat.dtype, device=flat.device)

    def jacobian(at: Tensor) -> Tensor:
        columns: Tensor = vmap(lambda along: jvp(residual, (at,), (along,))[1], chunk_size=_CHUNK)(eye)
        return columns.T

    r = residual(flat)
    for step in range(iterations):
        if r.norm() < tolerance:
            return flat, float(r.norm()), step
        j = jacobian(flat)
        normal, slope = j.T @ j, j.T @ r
        scale = normal.diagonal().mean()
        while mu < _MOST:
            moved = flat - _solved(normal + mu * scale * eye, slope)
            tried = residual(moved)
            if tried.norm() < r.norm():  # false for a NaN
                flat, r, mu = moved, tried, max(mu * _EASED, _LEAST)
                break
            mu *= _RAISED
        else:  # no damping helps: a minimum, global or local
            return flat, float(r.norm()), step
    return flat, float(r.norm()), iterations


def first_order(
    model: nn.Module,
    observed: Sequence[Observed],
    labels: Tensor,
    shape: Sequence[int],
    *,
    generator: torch.Generator,
    starts: int = 1,
    iterations: int = 2000,
    tolerance: float = 1e-12,
    learning_rate: float = 0.05,
    variation: float = 1e-4,
    upsample: Map | None = None,
    low: float = -1.0,
    high: float = 1.0,
) -> Match:
    """The image by Adam with a cosine schedule and a total-variation prior, in the model's own precision.

    For large images. The arguments are those of `levenberg_marquardt`; `variation` is the weight of the prior, which is
    taken of the mapped image.
    """
    kind = next(model.parameters()).dtype
    residual, _ = _residual(model, observed, labels, upsample, kind)

    def descend(flat: Tensor) -> tuple[Tensor, float, int]:
        unknown = flat.clone().requires_grad_()
        optimizer = torch.optim.Adam([unknown], lr=learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
        best, least, at = flat, math.inf, 0
        for step in range(iterations):
            image = unknown.reshape(*shape)
            r = residual(image)
            # The prior moves the image off the least residual, so the one of least residual is remembered on the way.
            if float(r.detach().norm()) < least:
                best, least, at = unknown.detach().clone(), float(r.detach().norm()), step
            if least < tolerance:
                break
            loss = r.square().sum() + variation * total_variation(upsample(image) if upsample else image)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                unknown.clamp_(low, high)
        return best, least, at + 1

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        return _least(descend, shape, generator, starts, tolerance, (low, high), labels.device, kind)


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, across plus down; `images` is (..., height, width)."""
    return images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()


def _residual(
    model: nn.Module, observed: Sequence[Observed], labels: Tensor, upsample: Map | None, kind: torch.dtype
) -> tuple[Map, int]:
    """r(u) over all exchanges, and how many entries it has."""
    parts: list[tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]] = []
    device = labels.device
    for each in observed:
        state = {**model.state_dict(), **(each.weights or {})}
        state = {n: t.to(device, kind if t.is_floating_point() else t.dtype) for n, t in state.items()}
        matched = {n: state.pop(n) for n in each.values}
        # An index, not a mask: under vmap no shape may depend on values.
        index = torch.cat([each.seen[n].flatten() for n in matched]).nonzero().flatten().to(device)
        target = torch.cat([each.values[n].detach().flatten() for n in matched]).to(device, kind)[index]
        parts.append((matched, state, index, target))
    targets = torch.cat([target for *_, target in parts]) if parts else torch.empty(0)
    if not targets.numel():
        raise ValueError("expected at least one observed entry, found none")
    size: Tensor = targets.norm().clamp_min(torch.finfo(kind).tiny)

    def residual(unknown: Tensor) -> Tensor:
        images = upsample(unknown) if upsample else unknown
        rows = []
        for matched, rest, index, target in parts:

            def loss(weights: dict[str, Tensor], rest: dict[str, Tensor] = rest) -> Tensor:
                logits = functional_call(model, {**rest, **weights}, (images,)).logits
                mean: Tensor = functional.cross_entropy(logits, labels)
                return mean

            gradient = grad(loss)(matched)
            rows.append(torch.cat([g.flatten() for g in gradient.values()])[index] - target)
        r: Tensor = torch.cat(rows) / size
        return r

    return residual, targets.numel()


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """By Cholesky; NaN, which no comparison takes for an improvement, where rounding left the matrix indefinite."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        return torch.full_like(right, math.nan)
    solution: Tensor = torch.cholesky_solve(right[:, None], factor)
    return solution[:, 0]


def _least(
    descend: Callable[[Tensor], tuple[Tensor, float, int]],
    shape: Sequence[int],
    generator: torch.Generator,
    starts: int,
    tolerance: float,
    span: tuple[float, float],
    device: torch.device,
    kind: torch.dtype,
) -> Match:
    """The start of least residual."""
    if starts < 1:
        raise ValueError(f"starts: expected at least 1, found {starts}")
    low, high = span
    matches: list[Match] = []
    for start in range(starts):
        noise = torch.randn(math.prod(shape), generator=generator, dtype=torch.float64).to(device, kind)
        found, residual, iterations = descend((low + high) / 2 + (high - low) * _START * noise)
        matches.append(Match(found.reshape(*shape).clamp(low, high), residual, iterations, start))
        if residual < tolerance:
            break
    return min(matches, key=lambda match: match.residual)
