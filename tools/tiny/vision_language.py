"""The bundled base for the task vision-language: a small LLaVA, and the script that created it.

    python -m tools.tiny.vision_language --caltech101 <folder> --cifar10 <folder> --out
    fedveil/assets/tiny-vision-language

A CLIP vision tower (4 layers, width 96, 16 patches of a 48 x 48 image) in front of a Llama (8 layers, width 96, a
byte-level BPE with 512 tokens); 1.5 M parameters, stored as fp16. It is pretrained on CIFAR-10 and on the part of
Caltech-101 that `is_public` selects, with one-sentence captions and multiple-choice questions with four choices.
Federated data has none of these rows.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from fedveil.testing.pretraining import CHOICES, caption, is_public
from tools.tiny.training import Losses, byte_level_bpe, save, trained

END, IMAGE = "<|endoftext|>", "<image>"
PIXELS, PATCH, MARGIN = 48, 12, 8
WIDTH, VISION_LAYERS, LAYERS, HEADS, VOCABULARY, CONTEXT = 96, 4, 8, 4, 512, 256
BATCH, RATES = 32, (2e-3, 0.05)
# One message after another, each followed by a line break; the answer comes next.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
)


@dataclass(frozen=True)
class Picture:
    """A picture of one class."""

    pixels: Any  # uint8, (PIXELS + MARGIN) squared, 3
    name: str


def pictures(folder: Path, public_of: str = "") -> list[Picture]:
    """Return the pictures in `folder`/train.parquet: all, or those that `is_public` selects for `public_of`."""
    import numpy
    import pyarrow.parquet  # type: ignore[import-untyped]
    from datasets import Dataset
    from PIL import Image

    rows = Dataset(pyarrow.parquet.read_table(folder / "train.parquet"))
    names = rows.features["label"].names
    size = (PIXELS + MARGIN, PIXELS + MARGIN)
    picture_list = []
    for row in rows.to_list():
        if not public_of or is_public(row["source_path"], public_of):
            image = Image.open(BytesIO(row["image"]["bytes"])).convert("RGB").resize(size, Image.Resampling.BICUBIC)
            name = str(row.get("class_name") or names[row["label"]])
            picture_list.append(Picture(numpy.asarray(image), name))
    return picture_list


def make(caltech101: Path, cifar10: Path, out: Path, seed: int, steps: int) -> float:
    """Train tokenizer and model; return the mean loss over the last 50 steps."""
    import torch

    from fedveil.models.library_logging import quiet_libraries
    from fedveil.tasks.vision_language import prompt_of_choices

    rng = random.Random(seed)
    own, other = pictures(caltech101, "caltech101"), pictures(cifar10)
    names = sorted({picture.name for picture in own + other})
    class_of = {name: i for i, name in enumerate(names)}
    with quiet_libraries():
        processor = _processor(
            [caption(n) for n in names] * 3
            + [prompt_of_choices("What is in the image?", names[i : i + 4]) for i in range(len(names))]
        )
    model = _model(processor.tokenizer, seed)
    head = torch.nn.Linear(WIDTH, len(names))
    mean = torch.tensor(processor.image_processor.image_mean).view(3, 1, 1)
    std = torch.tensor(processor.image_processor.image_std).view(3, 1, 1)
    pad, image_id = processor.tokenizer.eos_token_id, processor.tokenizer.convert_tokens_to_ids(IMAGE)
    patches = [image_id] * (PIXELS // PATCH) ** 2

    def losses() -> Losses:
        chosen = [rng.choice(own if rng.random() < 0.5 else other) for _ in range(BATCH)]
        ids, mask, labels = _batch(chosen, names, patches, pad, processor, rng)
        pixels = (torch.stack([augmented(picture.pixels, rng) for picture in chosen]) / 255 - mean) / std
        out_ = model(input_ids=ids, attention_mask=mask, pixel_values=pixels, use_cache=False)
        loss = torch.nn.functional.cross_entropy(
            out_.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        pooled = out_.image_hidden_states.view(BATCH, -1, WIDTH).mean(1)
        sorted_out = torch.nn.functional.cross_entropy(head(pooled), torch.tensor([class_of[p.name] for p in chosen]))
        return loss + 0.5 * sorted_out, loss

    def after(step: int) -> None:
        if step % 1000 == 999:
            save(out, copy.deepcopy(model), processor)

    loss = trained([*model.parameters(), *head.parameters()], RATES, steps, losses, after)
    save(out, model, processor)
    return loss


def _batch(
    chosen: Sequence[Picture], names: list[str], patches: list[int], pad: int, processor: Any, rng: random.Random
) -> tuple[Any, Any, Any]:
    """Return the IDs, mask and labels of a caption or a multiple-choice question for each picture."""
    import torch

    from fedveil.tasks.vision_language import CAPTION_PROMPT, prompt_of_choices

    rows = []
    for picture in chosen:
        if rng.random() < 0.5:
            question, answer = CAPTION_PROMPT, caption(picture.name)
        else:
            others = [n for n in names if n != picture.name]
            options = rng.sample([picture.name, *rng.sample(others, CHOICES - 1)], CHOICES)
            question = prompt_of_choices("What is in the image?", options)
            answer = "ABCD"[options.index(picture.name)]
        prompt = processor.tokenizer.encode(question + "\n", add_special_tokens=False)
        rows.append((patches + prompt, [*processor.tokenizer.encode(answer, add_special_tokens=False), pad]))
    width = max(len(p) + len(a) for p, a in rows)
    ids = torch.tensor([p + a + [pad] * (width - len(p) - len(a)) for p, a in rows])
    mask = torch.tensor([[1] * (len(p) + len(a)) + [0] * (width - len(p) - len(a)) for p, a in rows])
    labels = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in rows])
    return ids, mask, labels


def augmented(pixels: Any, rng: random.Random) -> Any:
    """Return a random window of the picture, mirrored with probability one half."""
    import torch

    top, left = rng.randint(0, MARGIN), rng.randint(0, MARGIN)
    window = torch.from_numpy(pixels[top : top + PIXELS, left : left + PIXELS].copy()).permute(2, 0, 1)
    return window.flip(2) if rng.random() < 0.5 else window


def _processor(texts: Sequence[str]) -> Any:
    from transformers import LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    bpe = byte_level_bpe(texts, VOCABULARY, [END, IMAGE])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, extra_special_tokens={"image_token": IMAGE}
    )
    images = CLIPImageProcessorPil(
        size={"height": PIXELS, "width": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}, do_center_crop=False
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
    )


def _model(tokenizer: Any, seed: int) -> Any:
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    end = tokenizer.eos_token_id
    vision = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=VISION_LAYERS, num_attention_heads=HEADS,
        image_size=PIXELS, patch_size=PATCH, projection_dim=WIDTH,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1, vision_feature_select_strategy="default", image_seq_length=(PIXELS // PATCH) ** 2,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration(config).train()


def _main() -> None:
    parser = argparse.ArgumentParser(description="Create the base model for the task vision-language.")
    parser.add_argument("--caltech101", type=Path, required=True, help="folder with the Caltech-101 train.parquet")
    parser.add_argument("--cifar10", type=Path, required=True, help="folder with the CIFAR-10 train.parquet")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6000)
    arguments = parser.parse_args()
    loss = make(arguments.caltech101, arguments.cifar10, arguments.out, arguments.seed, arguments.steps)
    sys.stdout.write(f"{arguments.out}: loss {loss:.3f} per token\n")


if __name__ == "__main__":
    _main()
