"""A small ViT in double precision, smooth images, gradients by name, masks."""

from __future__ import annotations

import math

import torch
from transformers import ViTConfig, ViTForImageClassification

POSITION = "vit.embeddings.position_embeddings"
LABEL = torch.tensor([3])


def vit(size=32, patch=4, hidden=96, layers=2, heads=4, seed=0):
    """Of 10 classes, without dropout; `hidden` is at least the tokens and the pixels of a patch."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ViTForImageClassification(
            ViTConfig(
                image_size=size,
                patch_size=patch,
                hidden_size=hidden,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=2 * hidden,
                num_labels=10,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    return model.double().eval()


def smooth(count, size, seed=271828):
    """Sums of four waves a channel, within [-0.9, 0.9]."""
    generator = torch.Generator().manual_seed(seed)
    line = torch.linspace(0, 1, size, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    waves = torch.rand(count, 3, 4, 4, generator=generator, dtype=torch.float64)[..., None, None].unbind(3)
    images = (waves[3] * torch.sin(2 * math.pi * (3 * waves[0] * x + 3 * waves[1] * y + waves[2]))).sum(2)
    return 0.9 * images / images.abs().amax((1, 2, 3), keepdim=True)


def gradients(model, images, labels=LABEL):
    """Of the mean loss, by parameter name."""
    model.zero_grad()
    model(pixel_values=images, labels=labels).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def masks(of, rate, seed=161803):
    """True where an entry is sent."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.rand(g.shape, generator=generator) >= rate for n, g in of.items()}


def masked(of, rate, seed=161803):
    """What a client sends: zeros at the withheld entries."""
    seen = masks(of, rate, seed)
    return {n: g * seen[n] for n, g in of.items()}
