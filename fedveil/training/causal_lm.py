"""The common base class of tasks with a causal language model: its loss, scoring, generation."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from fedveil.contract.param_spec import Weights
from fedveil.contract.task import ExamplePrediction, Rows
from fedveil.data import batches
from fedveil.data.batches import TokenBatch, TokenExample
from fedveil.data.prompt_template import PromptFrame
from fedveil.data.tokenization import MarkedText, TextTokenizer
from fedveil.errors import ConfigError
from fedveil.models import base_files, library_logging
from fedveil.training.adapter_task import AdaptedTask

_PROBE = [1, 2, 3]  # tokens that every vocabulary has


class CausalTask(AdaptedTask):
    """A causal language model with its adapter.

    The loss is the mean over the target tokens (including the end token), or over the tokens that training counts.
    """

    @property
    @abstractmethod
    def _frame(self) -> PromptFrame:
        """Return the template's text around a prompt and its answer."""

    @cached_property
    def _tokens(self) -> TextTokenizer:
        return TextTokenizer(
            self.base.tokenizer, partial(self._check_tokens, base_files.embedding_rows(self.base.model))
        )

    def _check_tokens(self, rows: int, ids: Sequence[int]) -> None:
        if rows and max(ids, default=0) >= rows:
            base_files.check_tokens(self.config.task.model, {*ids} - {self.base.image_token}, rows)

    @override
    def _probe_rows(self) -> Rows:
        return [TokenExample(_PROBE, 1)] * 2

    @property
    @override
    def end_tokens(self) -> tuple[int, ...]:
        """Return the base's end tokens and the token that ends a turn in its chat template."""
        return tuple(dict.fromkeys((*self.base.end_tokens, self._frame.stop)))

    @override
    def find_cut(self, rows: Rows) -> Bool[np.ndarray, " rows"]:
        return np.array([row.cut > 0 for row in rows], bool)

    @override
    def collate(self, rows: Sequence[TokenExample]) -> TokenBatch:
        """Return one batch, on the CPU."""
        return batches.collate_batch(rows, self.base.tokenizer.eos_token_id)

    def _logits(self, batch: TokenBatch) -> Tensor:
        # Packed examples come with position IDs, from which the library builds their mask.
        mask = None if "position_ids" in batch.inputs else batch.mask
        return self._forward({"input_ids": batch.ids, "attention_mask": mask, "use_cache": False, **batch.inputs})

    @override
    def loss_sum(self, batch: TokenBatch) -> Tensor:
        """Return the summed loss of the counted tokens in `batch`, which is on the device.

        Raises:
            ConfigError: train.compile on a machine that does not support it.
        """
        counted = self._logits(batch).flatten(0, 1)[batch.positions].float()
        return torch.nn.functional.cross_entropy(counted, batch.wanted, reduction="sum")

    @override
    @torch.no_grad()
    def mean_loss(self, encoded: Sequence[TokenExample]) -> float:
        """Return the mean loss per target token with the most recently loaded weights."""
        ordered = sorted(encoded, key=lambda row: len(row.ids))  # examples of similar length need little padding
        total = terms = 0.0
        for part in self._parts(len(ordered)):
            batch = self.collate([ordered[i] for i in part])
            total += float(self.loss_sum(batch.to(self.device)))
            terms += batch.terms
        return total / terms

    @override
    @torch.no_grad()
    def predict(
        self, weights: Weights, rows: Sequence[TokenExample], generate: bool = False
    ) -> Iterator[ExamplePrediction]:
        """Yield the predictions; the slice "image" exists if the model has image tokens."""
        self.show(weights)
        image = self.base.image_token
        for part in self._parts(len(rows)):
            chosen = [rows[i] for i in part]
            logits = self._logits(self.collate(chosen).to(self.device)).float().cpu()
            written = self._written(chosen) if generate else []
            for i, row in enumerate(chosen):
                targets = row.targets()
                slices = {"target": logits[i, [at - 1 for at in targets]]}
                if image is not None:
                    slices["image"] = logits[i, [at for at, token in enumerate(row.ids) if token == image]]
                if generate:
                    slices["generated"] = written[i][1]
                yield ExamplePrediction(slices, torch.tensor([row.ids[at] for at in targets]))

    @torch.no_grad()
    def _texts_of(self, prompts: Sequence[TokenExample]) -> list[str]:
        """Return the text that the model generates after each prompt: greedy, or with evaluate.num-beams beams."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        texts = [""] * len(prompts)
        for part in self._parts(len(prompts)):
            chosen = [order[i] for i in part]
            for i, (ids, _) in zip(chosen, self._written([prompts[i] for i in chosen]), strict=True):
                written = ids[:-1] if len(ids) and int(ids[-1]) in self.end_tokens else ids
                texts[i] = self._target_of(self.base.tokenizer.decode(written, skip_special_tokens=True))
        return texts

    def _target_of(self, answer: str) -> str:
        """Return generated text without the template's own text around a target, such as an empty thinking block."""
        lead, tail = self._words_around
        return answer.strip().removeprefix(lead).removesuffix(tail).strip()

    @cached_property
    def _words_around(self) -> tuple[str, str]:
        """Return the template text before and after an answer's target, decoded like generated text."""
        around = self._tokens.tokenize([MarkedText(self._frame.lead), MarkedText(self._frame.tail)])
        decoded = [self.base.tokenizer.decode(each.ids, skip_special_tokens=True).strip() for each in around]
        return decoded[0], decoded[1]

    @property
    def _prompt_limit(self) -> int:
        """Return the maximum prompt length that leaves room for evaluate.max-new-tokens. Raises ConfigError."""
        new, context = self.config.evaluate.max_new_tokens, self.base.context
        longest = self.config.task.max_tokens or sys.maxsize
        limit = longest if context is None else min(longest, context - new)
        if limit < 1:
            raise ConfigError(
                f"evaluate.max-new-tokens: expected less than {context}, the context of {self.config.task.model}, "
                f"found {new}; lower it"
            )
        return limit

    def _written(self, rows: Sequence[TokenExample]) -> list[tuple[Tensor, Tensor]]:
        """Generate text from each example's prompt, in one batch; return the tokens and the logits of each token."""
        from transformers import GenerationConfig

        end = self.base.tokenizer.eos_token_id
        how = GenerationConfig(
            max_new_tokens=self.config.evaluate.max_new_tokens,
            num_beams=self.config.evaluate.num_beams,
            do_sample=False,
            eos_token_id=list(self.end_tokens),
            pad_token_id=end,
            return_dict_in_generate=True,
            output_logits=True,
        )
        prompts = [_prompt(row) for row in rows]
        width = max(len(row.ids) for row in prompts)
        batch = self.collate([_padded(row, width, end) for row in prompts]).to(self.device)
        mask = torch.tensor([[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in prompts], device=self.device)
        # Unpadded prompts need no mask; transformers then treats a generated end token as padding, and warns.
        with self._computing(), library_logging.quiet_libraries():
            out = self.base.model.generate(
                input_ids=batch.ids, attention_mask=mask, generation_config=how, **batch.inputs
            )
        generations, ends = [], torch.tensor(self.end_tokens)
        logits = torch.stack(out.logits, 1).float().cpu() if self.config.evaluate.num_beams == 1 else None
        for i, ids in enumerate(out.sequences[:, width:].cpu()):
            found = torch.isin(ids, ends).nonzero()
            length = int(found[0]) + 1 if len(found) else len(ids)
            generations.append((ids[:length], torch.empty(0) if logits is None else logits[i, :length]))
        return generations


def _prompt(row: TokenExample) -> TokenExample:
    """Return the part of an example before its last answer."""
    return replace(row, ids=row.ids[: row.gaps[-1][1] if row.gaps else row.start], gaps=())


def _padded(row: TokenExample, width: int, token: int) -> TokenExample:
    """Return the row, left-padded with `token` to `width`."""
    return replace(row, ids=[token] * (width - len(row.ids)) + row.ids, start=width)
