"""Prompts as tensors: the contexts for each form of `fedveil.adapters.prompt.PromptAdapter`, and the texts' logits.

b = length, d = width of the token embeddings, D = width of the joint space, M = patches, C = classes. All features
have norm 1.

    logit_c = s <f, t_c>                                                 one text per class, f the image
    logit_c = s sum_mp T_mp <f_m, t_cp>                                  two texts per class, f_m its patches    (1)
    T = argmin <T, 1 - F> - eps H(T),  T 1 <= 1 / M,  T^T 1 = gamma / 2   no gradient flows through T            (2)
        by scaling: T = diag(u) K diag(v),  K = exp((F - 1) / eps)
                    u <- min(1, (1 / M) / K v),  v <- (gamma / 2) / K^T u
    R = mean_c ln(1 + exp((<t_G, t_own> - <t_G, t_0>) / tau))             the contrastive term                   (3)

t_0: the text with the placeholder "X X ... X" as context; t_G: with the shared prompt; t_own: with the site's own
prompt.
(1) and (2): Li et al., FedOTP, CVPR 2024. (3): Cui et al., FedPGP, ICML 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from fedveil.adapters.prompt import PromptAdapter
from fedveil.errors import ConfigError

SHARED = "prompt"  # the tensor that every form has, and that sites send
EPSILON, ITERATIONS, TOLERANCE = 0.01, 100, 1e-3  # for Eq. 2; the tolerance applies to ln u


def check_form(adapter: PromptAdapter, forms: tuple[str, ...]) -> None:
    """Raise ConfigError unless the prompt has one of these forms."""
    if adapter.form not in forms:
        wanted = " or ".join(f'"{form}"' for form in forms)
        raise ConfigError(
            f'adapter.form: this method requires {wanted}, found "{adapter.form}"; set it in method.params'
        )


def context_vectors(adapter: PromptAdapter, weights: Mapping[str, Tensor]) -> Float[Tensor, "prompts b d"]:
    """Return the contexts whose texts are needed: the scored one first, and for a contrast also the shared one."""
    prompt = weights[SHARED]
    match adapter.form:
        case "one":
            return prompt[None]
        case "sum":
            return (prompt + weights["prompt.local"])[None]
        case "transport":
            return torch.stack([prompt, weights["prompt.local"]])
        case "factored":
            whole = prompt + weights["prompt.u"] @ weights["prompt.v"]
            return torch.stack([whole, prompt]) if adapter.contrast else whole[None]


def class_similarities(
    adapter: PromptAdapter, images: Float[Tensor, "rows points D"], texts: Float[Tensor, "prompts classes D"]
) -> Float[Tensor, "rows classes"]:
    """Return the logits before scaling. An image's first point is the whole image, the others are its patches."""
    if adapter.form != "transport":
        return images[:, 0] @ texts[0].T
    similarities = torch.einsum("rmd,pcd->rcmp", images[:, 1:], texts)
    return (transport_plan(similarities, adapter.mass) * similarities).sum((-1, -2))


@torch.no_grad()
def transport_plan(
    similarity: Float[Tensor, "*s M P"],
    mass: float,
    epsilon: float = EPSILON,
    iterations: int = ITERATIONS,
    tolerance: float = TOLERANCE,
) -> Float[Tensor, "*s M P"]:
    """Compute T of Eq. 2 for each leading index, in the log domain.

    Column marginals hold exactly, row marginals to within about `tolerance`.

    | case | result |
    |---|---|
    | mass = 1 | row constraints are tight: the balanced problem |
    | equal columns of `similarity` | equal columns of T |
    | costs of 2 with epsilon 0.01 | finite, because nothing is exponentiated before the division |
    | a batch of problems | the loop ends when all have converged, so a problem's last digits depend on the others |
    """
    points, prompts = similarity.shape[-2:]
    log_k = (similarity - 1) / epsilon
    log_column = math.log(mass / prompts)
    log_u = torch.zeros_like(log_k[..., :1])
    # Update v first, because a smaller v would make all rows look slack.
    log_v = log_column - torch.logsumexp(log_k, -2, keepdim=True)
    for _ in range(iterations):
        before = log_u
        log_u = (-math.log(points) - torch.logsumexp(log_k + log_v, -1, keepdim=True)).clamp(max=0.0)
        log_v = log_column - torch.logsumexp(log_k + log_u, -2, keepdim=True)
        if float((log_u - before).abs().max()) < tolerance:
            break
    return (log_u + log_k + log_v).exp()


def contrastive_loss(
    placeholder: Float[Tensor, "classes D"],
    of_shared: Float[Tensor, "classes D"],
    of_own: Float[Tensor, "classes D"],
    temperature: float,
) -> Float[Tensor, ""]:
    """Return R of Eq. 3, which pulls the shared text toward the placeholder text and away from the site's own text."""
    positive, negative = (of_shared * placeholder).sum(-1), (of_shared * of_own).sum(-1)
    return torch.nn.functional.softplus((negative - positive) / temperature).mean()
