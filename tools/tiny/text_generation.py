"""Create the bundled base for the task text-generation: a small GPT-2 for offline use.

    python -m tools.tiny.text_generation --data <folder with the E2E NLG train.jsonl> --out
    fedveil/assets/tiny-text-generation

It has 4 layers, width 160, a context of 192 tokens, and a byte-level BPE with 1024 tokens; 1.4 M parameters, stored as
fp16. It is pretrained as a plain language model on the public part of E2E NLG: the meaning representations selected by
`is_public`. It sees paragraphs with several sentences about one restaurant, and lists of attributes, but never a
meaning representation together with its sentence: fine-tuning has to teach that mapping.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.tiny.training import Losses, byte_level_bpe, save, trained

PUBLIC_DIGITS = frozenset({8, 9})
END = "<|endoftext|>"

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 4, 160, 5, 192, 1024
BATCH, RATES = 10, (3e-3, 0.01)


def is_public(mr: str) -> bool:
    """Return whether the base was trained on examples with this meaning representation.

    Federated data contain no such examples.
    """
    return int(hashlib.sha256(mr.encode()).hexdigest(), 16) % 10 in PUBLIC_DIGITS


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def paragraphs(rows: Sequence[dict[str, str]], rng: random.Random) -> list[str]:
    """Return one epoch of text: each restaurant's sentences, two or three per paragraph, and its attributes twice."""
    sentences: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        sentences[row["mr"]].append(row["ref"])
    texts = []
    for mr, refs in sentences.items():
        refs = rng.sample(refs, len(refs))
        while refs:
            size = rng.choice((2, 3))
            texts.append("\n".join(refs[:size]))
            refs = refs[size:]
        texts.append("\n".join(", ".join(_shuffled(mr.split(", "), rng)) for _ in range(2)))
    rng.shuffle(texts)
    return texts


def _shuffled(items: list[str], rng: random.Random) -> list[str]:
    return rng.sample(items, len(items))


def make(data: Path, out: Path, seed: int, steps: int) -> float:
    """Train tokenizer and model on the public part of `data`/train.jsonl; return the mean loss over the last 50 steps.

    The same seed, data and machine give the same files.
    """
    import torch

    rows = [row for row in read_rows(data / "train.jsonl") if is_public(row["mr"])]
    rng = random.Random(seed)
    tokenizer = _tokenizer(paragraphs(rows, rng))
    model = _model(tokenizer, seed)
    blocks = _blocks(rows, tokenizer, rng)

    def losses() -> Losses:
        batch = torch.tensor([next(blocks) for _ in range(BATCH)])
        logits = model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return loss, loss

    loss = trained(model.parameters(), RATES, steps, losses)
    save(out, model, tokenizer)
    return loss


def _tokenizer(texts: list[str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    bpe = byte_level_bpe(texts, VOCABULARY, [END])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END)


def _model(tokenizer: Any, seed: int) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).train()


def _blocks(rows: Sequence[dict[str, str]], tokenizer: Any, rng: random.Random) -> Iterator[list[int]]:
    """Yield blocks of CONTEXT tokens from an endless stream of paragraphs, each followed by END."""
    stream: list[int] = []
    while True:
        for ids in tokenizer(paragraphs(rows, rng))["input_ids"]:
            stream += [*ids, tokenizer.eos_token_id]
            while len(stream) >= CONTEXT:
                yield stream[:CONTEXT]
                stream = stream[CONTEXT:]


def _main() -> None:
    parser = argparse.ArgumentParser(description="Create the tiny base model.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the E2E NLG train.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2500)
    arguments = parser.parse_args()
    loss = make(arguments.data, arguments.out, arguments.seed, arguments.steps)
    sys.stdout.write(f"{arguments.out}: loss {loss:.3f} per token\n")


if __name__ == "__main__":
    _main()
