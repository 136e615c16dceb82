"""Imprint: a server broadcasts a crafted LoRA pair, so that one upload reveals the first tokens of the examples.

After Fowl, Geiping, Czaja, Goldblum, Goldstein: Robbing the Fed. ICLR 2022, and Shi et al.: From Efficiency to Leakage
(NeuroImprint). 2026, arXiv 2606.20553. Both insert biases and a ReLU that sort examples into neurons. A LoRA pair has
neither, so this attack uses the activation after the adapted layer instead. It searches the span of the learned update,
as in DAGER (Petrov et al. 2024).

With u = W x + b + s B A x before the activation of the first block's MLP, x (d) a token's input, and r the rank:

    A_0 = gate, B[k, 0] = slope / s for r - 1 neurons k     u_k is far below 0, with slope 0, unless gate . x > 0
    B[k_j, j] = FAINT for j = 1 .. r - 1, one neuron each   dL/dA_j = s FAINT sum_t (dL/du_t)_(k_j) x_t over those t
    A_j <- A_j - lr g / (|g| + 1e-8)                        AdamW's first step; g is small enough to solve for

The gate is open at a few chosen positions. Their x depends only on the tokens up to that position and on the public
base. So if at most r - 1 different x pass the gate, their span is known. The attack extends a prefix by each vocabulary
token whose x lies in that span.

| case | result |
|---|---|
| one step of AdamW, at most r - 1 different prefixes at the chosen positions | every example's prefix, exactly |
| more than r - 1 different prefixes | few or none: the span is too large or wrong |
| an honest broadcast (B = 0) | none: dL/dA is 0 |
| several local steps | worse with each step: once step 1 has changed B, every token contributes to A |
| a method that withholds A | none from that upload |
| noise on the gradient (`dp.*`) | none |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from fedveil.contract.param_spec import Weights
from fedveil.data.batches import TokenExample
from fedveil.training.adapter_task import AdaptedTask

__all__ = [
    "FAINT",
    "Tokens",
    "craft_broadcast",
    "gate_direction",
    "layer_inputs",
    "recover_gradient",
    "recover_prefixes",
]

Tokens = tuple[int, ...]

FAINT = 1e-6  # small enough that AdamW's first step is not just the gradient's sign
_ADAM = 1e-8  # AdamW's epsilon, as in torch
_RANK = 1e-5  # singular values below this fraction of the largest are rounding
_OUTSIDE = 0.02  # fraction of a candidate's norm that may lie outside the span
_MARGIN_STEPS = 100
_MOST_PATHS = 1000


def layer_inputs(
    task: AdaptedTask, weights: Weights, layer: str, rows: Sequence[Sequence[int]]
) -> Float64[Tensor, "n t d"]:
    """Return a layer's inputs at each position of equally long examples; `layer` names a module with a LoRA pair."""
    task.put(weights)
    caught: list[Tensor] = []
    module = task.base.model.get_submodule(layer)
    handle = module.register_forward_pre_hook(lambda _, given: caught.append(given[0].detach()))
    ids = torch.tensor(rows, device=task.device)
    try:
        with torch.no_grad():
            task.base.model(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        handle.remove()
    return caught[0].double().cpu()


def gate_direction(
    task: AdaptedTask, weights: Weights, layer: str, positions: range, public: Sequence[TokenExample]
) -> Float64[Tensor, " d"]:
    """Return a direction whose product with inputs of public examples is about 1 or more at `positions`, and -1 or
    less elsewhere."""
    states = [(layer_inputs(task, weights, layer, [row.ids])[0], len(row.ids)) for row in public]
    x = torch.cat([each for each, _ in states])
    inside = torch.cat([torch.arange(n) for _, n in states])
    is_inside = (inside >= positions.start) & (inside < positions.stop)
    direction = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([direction], max_iter=_MARGIN_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        short = torch.nn.functional.softplus(8 * (1 - (x @ direction) * torch.where(is_inside, 1.0, -1.0)))
        total: Tensor = short[is_inside].mean() + 5 * short[~is_inside].mean() + 1e-3 * direction.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    return direction.detach()


def craft_broadcast(
    task: AdaptedTask, weights: Weights, layer: str, gate: Tensor, slope: float, plain: bool = True
) -> Weights:
    """Return `weights` with an imprinting pair at `layer`; the other layers do not change.

    Args:
        slope: slope of the neurons' inputs in the gate's product; below about 5, the gate does not close.
        plain: True sets the reading rows of A to 0, for a more exact result. Otherwise these rows do not change, and
            the broadcast differs less.
    """
    a, b = weights[f"{layer}.lora_A"].clone(), weights[f"{layer}.lora_B"].clone()
    read, scale = len(a) - 1, float(getattr(task.adapter, "scale", 1.0))
    neurons = _quiet(task, layer, read)
    norm = float(gate.norm())
    size = (slope * norm * read**0.5 / scale) ** 0.5  # norm of A_0 at which A_0 and B's first column are equally large
    a[0] = (gate / norm * size).float()
    if plain:
        a[1:] = 0.0
    b[neurons, 0] = slope * norm / scale / size
    b[neurons, torch.arange(1, read + 1)] = FAINT
    return {**weights, f"{layer}.lora_A": a, f"{layer}.lora_B": b}


def _quiet(task: AdaptedTask, layer: str, count: int) -> Tensor:
    """Return the layer's neurons with the smallest weights, because the base affects their inputs least."""
    module = task.base.model.get_submodule(layer)
    matrix = module.get_parameter("base_layer.weight").detach().float()
    out = len(task.trained[f"{layer}.lora_B"])
    sizes: Tensor = torch.linalg.vector_norm(matrix, dim=0 if matrix.shape[1] == out else 1)
    return sizes.argsort()[:count].cpu()


def recover_gradient(
    sent: Weights, answered: Weights, layer: str, rate: float, decay: float, adamw: bool = True
) -> Float64[Tensor, "read d"] | None:
    """Return the gradient of the reading rows of A, up to a factor; None if the upload has no A.

    Args:
        sent, answered: the broadcast and the upload.
        rate, decay: the run's learning rate and weight decay.
        adamw: True if the step is AdamW's; otherwise the step is the gradient.
    """
    name = f"{layer}.lora_A"
    if name not in answered:
        return None
    if not adamw:
        return (answered[name].double() - sent[name].double())[1:]
    step = (answered[name].double() - sent[name].double() * (1 - rate * decay))[1:] / rate
    step = step.clamp(-1 + 1e-9, 1 - 1e-9)
    return _ADAM * step / (step.abs() - 1)  # a step descends the gradient


def recover_prefixes(
    task: AdaptedTask, weights: Weights, layer: str, found: Tensor | None, prefix: Tokens, length: int
) -> set[Tokens]:
    """Return the prefixes of `length` tokens whose inputs at each position after the public `prefix` lie in the span.

    Args:
        weights: weights of the broadcast.
        found: result of `recover_gradient`.
    """
    if found is None or not found.any() or not found.isfinite().all():
        return set()
    _, sizes, rows = torch.linalg.svd(found, full_matrices=False)
    span = rows[sizes > _RANK * sizes[0]]
    paths = [prefix]
    vocabulary = int(task.base.model.config.vocab_size)
    while paths and len(paths[0]) < length:
        grown: list[Tokens] = []
        for path in paths[:_MOST_PATHS]:
            candidates = [(*path, token) for token in range(vocabulary)]
            x = layer_inputs(task, weights, layer, candidates)[:, -1]
            outside = (x - x @ span.T @ span).norm(dim=1) / x.norm(dim=1)
            grown += [candidates[i] for i in (outside < _OUTSIDE).nonzero().flatten().tolist()]
        paths = grown
    return set(paths)
