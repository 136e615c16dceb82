"""Small bases for text classification, with a whole-word tokenizer, and rows that they can learn."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from fedveil import config as run_config
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.adapter import Adapter
from fedveil.models import library_logging
from fedveil.tasks import load_task
from fedveil.tasks.text_classification import TextClassification

NAMES = ("heart", "lung", "bone")
FINDINGS = {
    "heart": ("chest pain", "fast pulse"),
    "lung": ("short breath", "cough"),
    "bone": ("broken arm", "swelling"),
}
_WORDS = sorted(
    {word for texts in FINDINGS.values() for text in texts for word in text.split()} | {"and", "years", "no"}
)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", *_WORDS, *map(str, range(20, 40))]
CONTEXT = 24
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": len(WORDS), "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
}  # fmt: skip


def save_tokenizer(folder: Path, encoder: bool, **keys: Any) -> Path:
    """Saves a tokenizer that makes [CLS] text [SEP] with token types, or <s> text."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    at = {word: WORDS.index(word) for word in ("[CLS]", "[SEP]", "<s>")}
    if encoder:
        ends = [("[CLS]", at["[CLS]"]), ("[SEP]", at["[SEP]"])]
        words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    else:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", at["<s>"])])
        names = {"bos_token": "<s>", "eos_token": "[SEP]"}
    read = ["input_ids", *(["token_type_ids"] if encoder else []), "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", model_input_names=read, **names, **keys
    ).save_pretrained(folder)
    return folder


def save_base(folder: Path, kind: str, head: Sequence[str] = (), seed: int = 31415, **keys: Any) -> Path:
    """Saves a "bert" or a "llama" with that seed's weights; with a head for the classes `head`, or without one."""
    if head:
        keys |= {"id2label": dict(enumerate(head)), "label2id": {name: i for i, name in enumerate(head)}}
    with library_logging.quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "bert":
            config: Any = BertConfig(**_SIZES | keys)
            model: Any = (BertForSequenceClassification if head else BertForMaskedLM)(config)
        else:
            config = LlamaConfig(**_SIZES | {"num_key_value_heads": 2, "pad_token_id": WORDS.index("[SEP]")} | keys)
            model = (LlamaForSequenceClassification if head else LlamaForCausalLM)(config)
        model.save_pretrained(folder)
    return save_tokenizer(folder, kind == "bert")


def make_task(adapter: Adapter | None = None, **keys: object) -> TextClassification:
    """The task with those keys of the run config: task__max_tokens for task.max-tokens."""
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    base = {
        "task.name": "text-classification", "task.class-names": ",".join(NAMES), "task.source-column": "note",
        "task.target-column": "ward", "task.label-column": "ward", "task.max-tokens": CONTEXT, "train.batch-size": 4,
    }  # fmt: skip
    task = load_task(run_config.parse(base | flat), adapter or LoraAdapter(rank=4), "cpu")
    assert isinstance(task, TextClassification)
    return task


def draw_rows(count: int, seed: int = 0, several: bool = False) -> list[dict[str, Any]]:
    """Notes of one to three findings of their class; with `several`, of any number of classes, also none."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        chosen = [n for n in NAMES if draw.random() < 0.4] if several else [draw.choice(NAMES)]
        found = [draw.choice(FINDINGS[name]) for name in chosen for _ in range(1 if several else draw.randint(1, 3))]
        text = f"{draw.randint(20, 39)} years {' and '.join(found) or 'no'}"
        rows.append({"note": text, "ward": "|".join(chosen)})
    return rows


def save_rows(folder: Path, rows: Sequence[dict[str, Any]], split: str = "train") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def filled(task: TextClassification, std: float = 0.3) -> dict[str, torch.Tensor]:
    """Weights without a factor that is zero."""
    generator = torch.Generator().manual_seed(577215)
    return {n: std * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}
