"""Small bases for token classification, with tokenizers that split words into pieces, and sentences."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from fedveil import config as run_config
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.adapter import Adapter
from fedveil.models import library_logging
from fedveil.tasks import load_task
from fedveil.tasks.token_classification import TokenClassification

NAMES = ("DRUG", "DOSE")
TAGS = ("O", "B-DRUG", "I-DRUG", "B-DOSE", "I-DOSE")
DRUGS = ("aspirin", "ibuprofen", "folic acid", "vitamin")
UNITS = ("mg", "drops")
CONTEXT = 64
_WORDS = ["takes", "and", "no", "daily", "aspi", "ibu", "folic", "vitamin", "mg", "drops", "##rin", "##profen", "acid"]
_LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("0123456789")
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_WORDS, *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
START, END = 256 + len(_LETTERS), 257 + len(_LETTERS)  # of the tokenizer of bytes
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
}  # fmt: skip


def save_tokenizer(folder: Path, kind: str, **keys: Any) -> Path:
    """Saves WordPiece with [CLS] and [SEP] and token types for "bert"; bytes, a space with its letter, for "llama"."""
    if kind == "bert":
        pieces = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
        pieces.normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=False)
        pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        pieces.decoder = decoders.WordPiece()
        ends = [("[CLS]", PIECES.index("[CLS]")), ("[SEP]", PIECES.index("[SEP]"))]
        pieces.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
        read = ["input_ids", "token_type_ids", "attention_mask"]
    else:
        alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        alphabet |= {f"Ġ{letter}": 256 + i for i, letter in enumerate(_LETTERS)}
        alphabet |= {"<s>": len(alphabet), "</s>": len(alphabet) + 1}
        pieces = Tokenizer(models.BPE(alphabet, [("Ġ", letter) for letter in _LETTERS]))
        pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        pieces.decoder = decoders.ByteLevel()
        pieces.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        read = ["input_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=pieces, model_input_names=read, **names, **keys).save_pretrained(folder)
    return folder


def save_base(folder: Path, kind: str, head: Sequence[str] = (), **keys: Any) -> Path:
    """Saves a "bert" or a "llama" with a head for the tags `head`, or without one."""
    if head:
        keys |= {"id2label": dict(enumerate(head)), "label2id": {name: i for i, name in enumerate(head)}}
    with library_logging.quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(31415)
        if kind == "bert":
            config: Any = BertConfig(**_SIZES | {"vocab_size": len(PIECES)} | keys)
            model: Any = (BertForTokenClassification if head else BertForMaskedLM)(config)
        else:
            sizes = {"num_key_value_heads": 2, "pad_token_id": END, "vocab_size": END + 1}
            config = LlamaConfig(**_SIZES | sizes | keys)
            model = (LlamaForTokenClassification if head else LlamaForCausalLM)(config)
        model.save_pretrained(folder)
    return save_tokenizer(folder, kind)


def keys_of(**keys: object) -> dict[str, object]:
    """The keys of a run config: task__max_tokens for task.max-tokens."""
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    return {
        "task.name": "token-classification", "task.class-names": ",".join(NAMES), "task.source-column": "tokens",
        "task.target-column": "ner_tags", "task.max-tokens": CONTEXT, "train.batch-size": 4,
    } | flat  # fmt: skip


def make_task(adapter: Adapter | None = None, **keys: object) -> TokenClassification:
    task = load_task(run_config.parse(keys_of(**keys)), adapter or LoraAdapter(rank=4), "cpu")
    assert isinstance(task, TokenClassification)
    return task


def draw_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences with one to three drugs, each with a dose or without."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        tokens, tags = ["takes"], ["O"]
        for at in range(draw.randint(1, 2)):
            drug = draw.choice(DRUGS).split()
            tokens += [*(["and"] if at else []), *drug]
            tags += [*(["O"] if at else []), *(f"{'I' if i else 'B'}-DRUG" for i in range(len(drug)))]
            if draw.random() < 0.6:
                tokens += [str(draw.randint(1, 9)), draw.choice(UNITS)]
                tags += ["B-DOSE", "I-DOSE"]
        rows.append({"tokens": tokens, "ner_tags": tags})
    return rows


def save_rows(folder: Path, rows: Sequence[dict[str, Any]], split: str = "train") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def filled(task: TokenClassification, std: float = 0.3) -> dict[str, torch.Tensor]:
    """Weights without a factor that is zero."""
    generator = torch.Generator().manual_seed(577215)
    return {n: std * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}
