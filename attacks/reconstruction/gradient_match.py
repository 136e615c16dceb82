"""Masked gradient matching: the adversary who knows which entries of a gradient were withheld.

Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS 2019, with two changes: only observed entries are matched, and small
images are found by Levenberg-Marquardt (Marquardt 1963). The prior is that of Geiping, Bauermeister, Dröge, Moeller:
Inverting Gradients. NeurIPS 2020.

    r(u) = m o (grad_w L(f_w(T u), y) - g) / ||m o g||         the residual is ||r||
    levenberg_marquardt:  (J^T J + mu t I) du = -J^T r,        J = dr/du,  t = mean diagonal of J^T J
    of a batch            J = [J_1 ... J_b],  J_i = dg_i/du_i / (b ||m o g||),  g_i the gradient of image i alone
    first_order:          min ||r(u)||^2 + tv TV(T u)          by Adam

u is the unknown image, T a known map into the model's input (an upsampling, else the identity), m the mask, which
anybody sees from the zeros, and y the known label. An adversary who does not know y tries each label and keeps the
least residual. Of several starts the one of least residual is kept. Nothing here sees the true image. The gradient of a
mean of losses is the mean of the images' gradients, so a column of J costs one image, however large the batch.

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
        model: in evaluation mode, where no image of a batch changes what another gives; its attention by `sdpa`:
            transformers' eager attention rounds to single precision.
        labels: (batch,) classes.
        shape: of the unknown (batch, channels, height, width). Without `upsample` it is the shape of the model's input.
        upsample: T, of each image by itself.
        starts: the most; there is no further one once a residual is below `tolerance`.
        damping: mu of the first step. A step that helps divides it by 5, a step that does not multiplies it by 4.

    Raises:
        ValueError: a Jacobian above 4 GiB, or nothing observed.
    """
    residual = _residual(model, observed, labels, upsample, torch.float64)
    entries, unknowns = residual.targets.numel(), math.prod(shape)
    if entries * unknowns > _LARGEST_JACOBIAN:
        raise ValueError(
            f"expected at most {_LARGEST_JACOBIAN} entries of a Jacobian, found {entries} x {unknowns}: match fewer "
            "tensors, or use first_order"
        )

    def descend(flat: Tensor) -> tuple[Tensor, float, int]:
        return _damped(residual, shape, flat, iterations, tolerance, damping)

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return _least(descend, shape, generator, starts, tolerance, (low, high), labels.device, torch.float64)


@dataclass(frozen=True)
class _Residual:
    """r(u) over all exchanges.

    Attributes:
        sent: the observed entries of the gradient of the mean loss of images with these labels.
        targets: those entries as the client sent them.
        labels: of the batch.
        size: ||m o g||.
    """

    sent: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor
    labels: Tensor
    size: Tensor

    def __call__(self, unknown: Tensor) -> Tensor:
        return (self.sent(unknown, self.labels) - self.targets) / self.size

    def jacobian(self, unknown: Tensor) -> Tensor:
        """(entries, unknowns), image by image."""
        count, each = len(self.labels), unknown[0].numel()
        eye = torch.eye(each, dtype=unknown.dtype, device=unknown.device)
        columns = []
        for image, label in zip(unknown.flatten(1), self.labels, strict=True):

            def alone(flat: Tensor, label: Tensor = label) -> Tensor:
                return self.sent(flat.reshape(1, *unknown.shape[1:]), label[None])

            columns.append(vmap(lambda v, at=image, f=alone: jvp(f, (at,), (v,))[1], chunk_size=_CHUNK)(eye))
        return torch.cat(columns).T / (count * self.size)


def _damped(
    residual: _Residual, shape: Sequence[int], flat: Tensor, iterations: int, tolerance: float, mu: float
) -> tuple[Tensor, float, int]:
    """Levenberg-Marquardt from one start: where it ended, the residual's norm there, and the steps it took."""
    eye = torch.eye(flat.numel(), dtype=flat.dtype, device=flat.device)
    r = residual(flat.reshape(*shape))
    for step in range(iterations):
        if r.norm() < tolerance:
            return flat, float(r.norm()), step
        j = residual.jacobian(flat.reshape(*shape))
        normal, slope = j.T @ j, j.T @ r
        scale = normal.diagonal().mean()
        while mu < _MOST:
            moved = flat - _solved(normal + mu * scale * eye, slope)
            tried = residual(moved.reshape(*shape))
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
    residual = _residual(model, observed, labels, upsample, kind)

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
) -> _Residual:
    parts: list[tuple[dict[str, Tensor], dict[str, Tensor], Tensor]] = []
    targets: list[Tensor] = []
    device = labels.device
    for each in observed:
        state = {**model.state_dict(), **(each.weights or {})}
        state = {n: t.to(device, kind if t.is_floating_point() else t.dtype) for n, t in state.items()}
        matched = {n: state.pop(n) for n in each.values}
        # An index, not a mask: under vmap no shape may depend on values.
        index = torch.cat([each.seen[n].flatten() for n in matched]).nonzero().flatten().to(device)
        targets.append(torch.cat([each.values[n].detach().flatten() for n in matched]).to(device, kind)[index])
        parts.append((matched, state, index))
    if not sum(target.numel() for target in targets):
        raise ValueError("expected at least one observed entry, found none")

    def sent(unknown: Tensor, of: Tensor) -> Tensor:
        images = upsample(unknown) if upsample else unknown
        rows = []
        for matched, rest, index in parts:

            def loss(weights: dict[str, Tensor], rest: dict[str, Tensor] = rest) -> Tensor:
                logits = functional_call(model, {**rest, **weights}, (images,)).logits
                mean: Tensor = functional.cross_entropy(logits, of)
                return mean

            rows.append(torch.cat([g.flatten() for g in grad(loss)(matched).values()])[index])
        return torch.cat(rows)

    joined = torch.cat(targets)
    return _Residual(sent, joined, labels, joined.norm().clamp_min(torch.finfo(kind).tiny))


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
