"""The bundled base for the task clip-prompt: a small CLIP, and the script that created it.

    python -m tools.tiny.clip_prompt --caltech101 <folder> --cifar10 <folder> --out fedveil/assets/tiny-clip-prompt

An image tower (4 layers, width 96, 16 patches of a 48 x 48 image) and a causal text tower (4 layers, width 96, 77
positions, a byte-level BPE with 1024 tokens) with a joint space of 64 dimensions; 1 M parameters, stored as fp16. Both
are trained contrastively, from random weights, on the parts of CIFAR-10 (one half) and Caltech-101 (one fifth) that
`fedveil.testing.pretraining.is_public` selects; federated data has no pictures from these parts.

    L = 1/2 sum_i -ln p(text of i's class | image i) / rows + 1/2 sum_c -ln p(images of class c | text c) / classes

over the pictures and the distinct class names in a batch; for several pictures of a class, -ln p is the mean over them.
Labels are smoothed by 0.1, so that the model is less confident about classes that it saw often.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.tiny.training import Losses, byte_level_bpe, save, trained
from tools.tiny.vision_language import PATCH, PIXELS, augmented, pictures

START, END = "<|startoftext|>", "<|endoftext|>"
WIDTH, LAYERS, HEADS, SPACE, VOCABULARY, CONTEXT = 96, 4, 4, 64, 1024, 77
BATCH, RATES, LEAST_TEMPERATURE = 48, (1.5e-3, 0.05), 0.01
SMOOTHING = 0.1
TEMPLATES = (
    "a photo of a {}.", "{}.", "a picture of the {}.", "a small {}.", "an image of one {} in the middle.",
    "this is a {}.",
    "a photo of my {}.", "a drawing of a {}.", "a good photo of the {}.", "a low resolution photo of a {}.",
    "a close-up photo of a {}.", "there is a {} in the scene.", "a photo of the large {}.",
    "one {}, seen from the side.",
)  # fmt: skip


def make(caltech101: Path, cifar10: Path, out: Path, seed: int, steps: int) -> float:
    """Train tokenizer and model; return the mean loss over the last 50 steps. The same seed gives the same files."""
    import torch

    from fedveil.models.library_logging import quiet_libraries

    rng = random.Random(seed)
    own, other = pictures(caltech101, "caltech101"), pictures(cifar10, "cifar10")
    names = sorted({picture.name for picture in own + other})
    with quiet_libraries():
        processor = _processor([t.format(n) for n in names for t in TEMPLATES])
        model = _model(processor.tokenizer, seed)
    mean = torch.tensor(processor.image_processor.image_mean).view(3, 1, 1)
    std = torch.tensor(processor.image_processor.image_std).view(3, 1, 1)

    def losses() -> Losses:
        chosen = [rng.choice(own if rng.random() < 0.6 else other) for _ in range(BATCH)]
        there = sorted({picture.name for picture in chosen})
        text = processor.tokenizer([rng.choice(TEMPLATES).format(n) for n in there], padding=True, return_tensors="pt")
        pixels = (torch.stack([augmented(picture.pixels, rng) for picture in chosen]) / 255 - mean) / std
        logits = model(input_ids=text["input_ids"], pixel_values=pixels).logits_per_image
        labels = torch.tensor([there.index(picture.name) for picture in chosen])
        of_class = torch.nn.functional.one_hot(labels, len(there)).T.float()
        loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING) / 2
        loss = loss + torch.nn.functional.cross_entropy(logits.T, of_class / of_class.sum(1, keepdim=True)) / 2
        return loss, loss

    def after(step: int) -> None:
        with torch.no_grad():
            model.logit_scale.clamp_(max=-torch.tensor(LEAST_TEMPERATURE).log())

    loss = trained(model.parameters(), RATES, steps, losses, after)
    save(out, model, processor)
    return loss


def _processor(texts: Sequence[str]) -> Any:
    from tokenizers import processors
    from transformers import CLIPProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    bpe = byte_level_bpe(texts, VOCABULARY, [START, END], prefix_space=True)
    ends = [(token, bpe.token_to_id(token)) for token in (START, END)]
    bpe.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ends)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=START, eos_token=END, pad_token=END)
    size = {"height": PIXELS, "width": PIXELS}
    return CLIPProcessor(CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False), tokenizer)


def _model(tokenizer: Any, seed: int) -> Any:
    import torch
    from transformers import CLIPConfig, CLIPModel

    of_tower = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS, "projection_dim": SPACE}  # fmt: skip
    config = CLIPConfig(
        text_config=of_tower | {
            "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id,
        },
        vision_config=of_tower | {"image_size": PIXELS, "patch_size": PATCH},
        projection_dim=SPACE,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLIPModel(config).train()


def _main() -> None:
    parser = argparse.ArgumentParser(description="Create the base model for the task clip-prompt.")
    parser.add_argument("--caltech101", type=Path, required=True, help="folder with the Caltech-101 train.parquet")
    parser.add_argument("--cifar10", type=Path, required=True, help="folder with the CIFAR-10 train.parquet")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6000)
    arguments = parser.parse_args()
    loss = make(arguments.caltech101, arguments.cifar10, arguments.out, arguments.seed, arguments.steps)
    sys.stdout.write(f"{arguments.out}: loss {loss:.3f}\n")


if __name__ == "__main__":
    _main()
