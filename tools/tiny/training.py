"""Code shared by the scripts for the tiny bases: the training loop, the byte-level BPE, and saving."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

WARM_UP_PART = 0.05
Losses = tuple[Any, Any]  # two scalars: the loss to minimize, and the loss to report


def trained(
    parameters: Iterable[Any],
    rates: tuple[float, float],
    steps: int,
    losses_of_a_batch: Callable[[], Losses],
    after: Callable[[int], None] = lambda step: None,
) -> float:
    """Train with AdamW over one learning-rate cycle, and print a line every 100 steps.

    Args:
        parameters: the parameters of the model and of anything trained with it.
        rates: maximum learning rate, and weight decay.
        steps: number of batches.
        losses_of_a_batch: draws the next batch and returns its losses.
        after: called with each step's number (0-based) after the step.

    Returns:
        The mean of the last 50 reported losses.
    """
    import torch

    trained_ = list(parameters)
    peak, decay = rates
    optimiser = torch.optim.AdamW(trained_, lr=peak, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, peak, total_steps=steps, pct_start=WARM_UP_PART)
    losses = []
    for step in range(steps):
        minimised, loss = losses_of_a_batch()
        optimiser.zero_grad()
        minimised.backward()
        torch.nn.utils.clip_grad_norm_(trained_, 1.0)
        optimiser.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 100 == 99:
            sys.stdout.write(f"step {step + 1} of {steps}: loss {sum(losses[-100:]) / 100:.3f}\n")
            sys.stdout.flush()
        after(step)
    last = losses[-50:]
    return sum(last) / len(last)


def byte_level_bpe(texts: Sequence[str], size: int, special: Sequence[str], prefix_space: bool = False) -> Any:
    """Train a byte-level BPE with `size` tokens, including the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def save(out: Path, model: Any, processor: Any) -> None:
    """Save the model as fp16, in place, and its tokenizer or processor."""
    from fedveil.models.library_logging import quiet_libraries

    with quiet_libraries():
        model.half().save_pretrained(out)
        processor.save_pretrained(out)
