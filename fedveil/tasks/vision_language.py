"""Vision and language: a vision-language model learns to caption images or to answer questions about them.

| form | when | prompt (after the image) | target |
|---|---|---|---|
| caption | neither column below is given | `CAPTION_PROMPT` | task.target-column: text, or a list of texts |
| open question | task.source-column is given | task.source-column | task.target-column: text, or a list of texts |
| choice | task.choices-column is set | task.source-column, the choices as letters, `CHOICE_PROMPT`
  | task.target-column: index of the right choice |

The prompts use the processor's own chat template, with the image first. LLaVA-style models are commonly tuned and
scored with these prompts. A question may have a hint (task.hint-column), which precedes it as "Context: ...". An
example that is too long (see `token_limits`) loses the end of its hint first, then the end of its target. An adapter
on the language model is trained; the vision tower and the connector are frozen. Each caption of an image is a separate
training example, but scoring counts the image once.

Images are bytes (as `datasets` stores them: {"bytes", "path"}) or paths relative to the data file.
"""

from __future__ import annotations

import logging
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fedveil.config import RunConfig, TaskConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import DatasetShard, Example, Examples, Metrics, Task, TaskInfo, loss_metric
from fedveil.data import images as decoding
from fedveil.data import prompt_template, tables, token_limits, tokenization
from fedveil.data.batches import TokenBatch, TokenExample
from fedveil.data.image_decoding import decode_image, image_conversions
from fedveil.data.prompt_template import PromptFrame
from fedveil.data.row_values import as_text, describe_value
from fedveil.data.tokenization import MarkedText
from fedveil.errors import ConfigError, TaskError
from fedveil.models import bundled, library_logging, loading
from fedveil.models.loaded_model import LoadedModel
from fedveil.sanitize import sanitize
from fedveil.training import adapter_task, causal_lm, text_metrics
from fedveil.training.scored_examples import draw_scored

__all__ = ["LETTERS", "ImageTextExample", "VisionLanguage"]

CAPTION_PROMPT = "Describe this image concisely."
CHOICE_PROMPT = "Answer with the option's letter from the given choices directly."
LETTERS = string.ascii_uppercase
log = logging.getLogger("fedveil.data")
_KEPT_BYTES = decoding.KEPT_BYTES
_OF_TOKENS = {"input_ids", "attention_mask"}


def _asks(task: TaskConfig) -> bool:
    """Return whether each image has a question.

    The default of task.source-column is for a different task, and does not name a question.
    """
    return bool(task.choices_column) or task.source_column != type(task).model_fields["source_column"].default


def _columns(task: TaskConfig) -> tuple[str, ...]:
    extra = (name for name in (task.choices_column, task.hint_column) if name)
    return (task.image_column, task.target_column, *((task.source_column, *extra) if _asks(task) else ()))


def _texts(task: TaskConfig) -> tuple[str, ...]:
    """Return the columns whose numbers are read as text, as written in the file; a choice index stays a number."""
    if task.choices_column:
        return (task.choices_column,)
    return (task.source_column, task.target_column) if _asks(task) else ()


def _metrics(task: TaskConfig) -> Metrics:
    return loss_metric(task, ("exact_match", *(() if task.choices_column else text_metrics.CAPTIONS)))


INFO = TaskInfo(
    mounts=("layers",),
    columns=_columns,
    tiny=lambda: bundled.bundled_folder("vision-language"),
    metrics=_metrics,
    texts=_texts,
)

Inputs = Mapping[str, Tensor]  # the model inputs for an image, each with shape (1, ...)


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """Create the task of `config`; the base is loaded on first use. Raises the same errors as text generation.

    Raises:
        ConfigError: also for a hint without questions.
    """
    if config.task.hint_column and not _asks(config.task):
        raise ConfigError(
            f'task.hint-column: captions have no hints ("{config.task.hint_column}"); leave this key out, or name '
            "the question column in task.source-column"
        )
    adapter_task.check_task_config(config, adapter, INFO)
    loading.check_context(config, adapter, INFO.tiny())
    return VisionLanguage(config, adapter, loading.pick_device(device))


def prompt_of_choices(question: str, choices: Sequence[str]) -> str:
    """Return the question, its choices as lettered lines, and an instruction on how to answer."""
    options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    return f"{question}\n{options}\n{CHOICE_PROMPT}"


@dataclass(frozen=True)
class ImageTextExample(TokenExample):
    """An example with an image: `ids` has one image token per image part, and `inputs` returns the model inputs."""

    inputs: Callable[[], Inputs]


@dataclass(frozen=True)
class _Asked:
    """One image with its prompt and correct answers."""

    image: Callable[[], bytes]
    prompt: str
    targets: list[str]
    where: str
    hint: str = ""

    @property
    def text(self) -> str:
        """Return the text that follows the image."""
        return f"Context: {self.hint}\n{self.prompt}" if self.hint else self.prompt


@final
class VisionLanguage(causal_lm.CausalTask):
    """A model that captions images or answers questions about them, with or without multiple choice."""

    @override
    def _load(self) -> LoadedModel:
        return loading.load_seeing(self.config, self.adapter, self.device, INFO.tiny())

    @override
    def examples(self, data: Path, split: str, share: DatasetShard | None = None) -> Examples:
        table = tables.read_for_task(data, split, INFO, self.config.task)
        return decoding.locate_pictures(table, self.config.task.image_column).examples(split, share, self.config)

    @override
    def encode(self, examples: Examples) -> list[ImageTextExample]:
        """Return a tokenized example for each target of each image, with the image as model inputs.

        Raises:
            TaskError: an image cannot be decoded or a row has no target, with the file and row.
            ConfigError: a prompt leaves no room for an answer.
        """
        asked = [self._asked(example, _reading(examples, i)) for i, example in enumerate(examples)]
        window = self.config.task.gray_window
        decoding.note_conversions([image_conversions(each.image(), each.where, window) for each in asked])
        return [row for of_image in self._encoded(asked) for row in of_image]

    def _encoded(self, asked: Sequence[_Asked]) -> list[list[ImageTextExample]]:
        """Return the examples of each image, limited in length as `token_limits` says. Raises like `encode`."""
        room = decoding.DecodeMemoryLimit(_KEPT_BYTES)
        given, context = self.config.task.max_tokens, self.base.context
        most = given or context or sys.maxsize
        rows = [self._rows(each, room, most, most) for each in asked]
        if not given:
            limit = token_limits.length_of([row.whole for of_image in rows for row in of_image], context)
            for i, of_image in enumerate(rows):
                if any(row.length > limit for row in of_image):
                    rows[i] = self._rows(asked[i], room, limit, most)
        lengths = np.array([row.whole for of_image in rows for row in of_image])
        cuts = np.array([row.cut for of_image in rows for row in of_image])
        if cut := int((cuts > 0).sum()):
            about = given, context, self.config.task.model
            token_limits.require_whole(cut, lengths, *about)
            limit = max(row.length for of_image in rows for row in of_image)
            log.warning(
                "task.max-tokens = %d: %s examples lose the end of their hint, or %d of these of their target; %s",
                given, token_limits.describe_share(cut, len(cuts)), int((cuts > 1).sum()),
                token_limits.describe_remedy(lengths, limit, *about),
            )  # fmt: skip
        return rows

    @override
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """ "loss" over all targets of evaluate.eval-examples images (see `draw_scored`); with `generate` also
        exact_match and, without choices, bleu_1 to bleu_4, rouge_l, cider and cider_r of one text per image, except
        scores that say nothing about short answers (see `text_metrics.select_telling`).

        Raises:
            TaskError: there are no examples, the weights do not match the spec, evaluate.metric is a score that says
                nothing about the answers, or as in `encode`.
        """
        if not examples:
            raise TaskError("examples: there are none to score; correct task.evaluation")
        chosen = [self._asked(example) for example in draw_scored(examples, self.config)]
        self.show(weights)
        rows = self._encoded(chosen)
        scores = {"loss": self.mean_loss([row for of_image in rows for row in of_image])}
        if generate:
            written = self._texts_of([of_image[0] for of_image in rows])
            targets = [asked.targets for asked in chosen]
            scores["exact_match"] = text_metrics.exact_match(written, targets)
            if not self.config.task.choices_column:
                scores |= text_metrics.score_captions(written, targets)
            scores = text_metrics.select_telling(scores, targets, self.config.evaluate.metric)
        return scores

    def generate(self, weights: Weights, examples: Examples) -> list[str]:
        """Return the text that the model with `weights` generates about each image, greedily or by beam search."""
        self.show(weights)
        return self._texts_of([rows[0] for rows in self._encoded([self._asked(example) for example in examples])])

    def write(self, weights: Weights, prompts: Sequence[str], images: Sequence[tuple[str, bytes]]) -> list[str]:
        """Generate text about each image; at most one prompt may replace the caption prompt.

        Raises:
            ConfigError: there are no images or several prompts, or no prompt although the run trained on questions.
            TaskError: an image cannot be decoded.
        """
        asks = _asks(self.config.task)
        if not images or len(prompts) > 1 or (asks and not prompts):
            least = "one --prompt" if asks else "at most one --prompt"
            raise ConfigError(
                f"--image: expected at least one image and {least}, found {len(images)} images and {len(prompts)} "
                "prompts"
            )
        self.show(weights)
        prompt = prompts[0] if prompts else CAPTION_PROMPT
        asked = [_Asked(partial(bytes, data), prompt, [""], name) for name, data in images]
        return self._texts_of([rows[0] for rows in self._encoded(asked)])

    @override
    def collate(self, rows: Sequence[TokenExample]) -> TokenBatch:
        """Return one batch, on the CPU, with the model inputs for its images."""
        batch = super().collate(rows)
        # Threads are not used, because the processor calls a tokenizer, which is not thread-safe.
        inputs = [row.inputs() for row in rows if isinstance(row, ImageTextExample)]
        return replace(batch, inputs={key: torch.cat([each[key] for each in inputs]) for key in inputs[0]})

    def _asked(self, example: Example, again: Callable[[], Example] | None = None) -> _Asked:
        """Return the image, prompt and answers of an example.

        `again` rereads the example when its image is needed; without it, the example itself is kept.
        """
        task, where, values = self.config.task, example.where, example.values
        read = again or (lambda: example)

        def image() -> bytes:
            return decoding.image_bytes(read(), task.image_column)

        if not task.choices_column:
            if not _asks(task):
                return _Asked(image, CAPTION_PROMPT, _answers(example, task.target_column, "a caption"), where)
            asked = as_text(values.get(task.source_column))
            if asked is None or not asked.strip():
                raise TaskError(
                    f'task.data: expected a question in column "{task.source_column}", found '
                    f"{describe_value(values.get(task.source_column))} in {where}; correct or drop the row"
                )
            answers = _answers(example, task.target_column, "an answer")
            return _Asked(image, asked, answers, where, _hint(example, task.hint_column))
        choices, answer = values.get(task.choices_column), values.get(task.target_column)
        question = values.get(task.source_column)
        if not isinstance(question, str) or not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
            raise TaskError(
                f'task.data: expected a text in "{task.source_column}" and 2 to {len(LETTERS)} choices in '
                f'"{task.choices_column}", found '
                f"{describe_value(question)} and {describe_value(choices)} in {where}; correct or drop the row"
            )
        if not isinstance(answer, int) or not 0 <= answer < len(choices):
            raise TaskError(
                f'task.data: expected an index from 0 to {len(choices) - 1} in "{task.target_column}", found '
                f"{describe_value(answer)} in {where}; correct or drop the row"
            )
        options = [text for choice in choices if (text := as_text(choice)) is not None]
        if len(options) < len(choices):
            raise TaskError(
                f'task.data: expected a text or number for each choice in "{task.choices_column}", found '
                f"{len(choices) - len(options)} of {len(choices)} without, in {where}; correct or drop the row"
            )
        prompt = prompt_of_choices(question, options)
        return _Asked(image, prompt, [LETTERS[answer]], where, _hint(example, task.hint_column))

    def _rows(self, asked: _Asked, room: decoding.DecodeMemoryLimit, limit: int, most: int) -> list[ImageTextExample]:
        """Return an image's examples, with at most `limit` tokens; a prompt without a hint may have up to `most`."""
        tokenizer, whole = self.base.tokenizer, asked.hint
        prompt, inputs = self._seen(asked)
        uncut = len(prompt)
        while asked.hint and (over := len(prompt) + 2 - limit) > 0:
            left = tokenizer.decode(tokenizer.encode(asked.hint, add_special_tokens=False)[:-over]).rstrip("\ufffd ")
            asked = replace(asked, hint=left if len(left) < len(asked.hint) else "")
            prompt, inputs = self._seen(asked)
        if len(prompt) + 2 > most:
            todo = "raise it" if self.config.task.max_tokens else "the base does not support more; shorten the prompt"
            raise ConfigError(
                f"task.max-tokens: image and prompt take {len(prompt)} tokens, which leaves no room for an answer "
                f"within {most} ({asked.where}); {todo}"
            )
        longest = max(limit, len(prompt) + 2)
        text, hint_cut, taken = self._prompt_text(asked), asked.hint != whole, self._kept(asked, inputs, room)
        rows = []
        for target in asked.targets:
            ids, start = self._answered(prompt, text, target)
            cut = 2 if len(ids) > longest else int(hint_cut)
            length = len(ids) - len(prompt) + uncut
            rows.append(ImageTextExample(ids[:longest], start, taken, cut=cut, whole=length))
        return rows

    def _answered(self, prompt: list[int], text: str, target: str) -> tuple[list[int], int]:
        """Return the tokens of a prompt with its answer, and the position of the answer.

        The whole text is tokenized again, with one token for the image, and provides the tokens from the first one that
        the answer changes.
        """
        asked, whole = self._tokens.tokenize(
            [MarkedText(text), MarkedText(text + self._frame.answer(target), (len(text),))]
        )
        shared = min(tokenization.common_length(asked.ids, whole.ids), whole.marks[0])
        kept = len(prompt) - (len(asked.ids) - shared)
        return [*prompt[:kept], *whole.ids[shared:], *self._frame.end], kept + whole.marks[0] - shared

    @cached_property
    @override
    def _frame(self) -> PromptFrame:
        def refusal(expected: str, found: str) -> ConfigError:
            return ConfigError(
                f"task.model: expected {expected} in {sanitize(self.config.task.model, 200)}, found {found}; "
                "use another base"
            )

        base = self.base
        return prompt_template.frame_of(base.processor, base.tokenizer, base.end_tokens, _content, refusal)

    def _prompt_text(self, asked: _Asked) -> str:
        messages = [{"role": "user", "content": _content(asked.text, True)}]
        text: str = self.base.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    def _processed(self, asked: _Asked) -> dict[str, Tensor]:
        image = decode_image(asked.image(), asked.where, window=self.config.task.gray_window)
        with library_logging.quiet_libraries():
            return dict(self.base.processor(images=[image], text=[self._prompt_text(asked)], return_tensors="pt"))

    def _seen(self, asked: _Asked) -> tuple[list[int], dict[str, Tensor]]:
        """Return the prompt tokens, with one token per part of the image, and the model inputs for the image."""
        encoding = self._processed(asked)
        ids: list[int] = encoding.pop("input_ids")[0].tolist()
        inputs = {name: value for name, value in encoding.items() if name not in _OF_TOKENS}
        if more := [name for name, value in inputs.items() if name.endswith("token_type_ids")]:
            raise TaskError(
                "task.model: expected a model that takes only tokens and images (LLaVA-style), but "
                f'"{self.config.task.model}" also takes {more[0]}; {loading.NEXT}'
            )
        return ids, inputs

    def _kept(self, asked: _Asked, inputs: dict[str, Tensor], room: decoding.DecodeMemoryLimit) -> Callable[[], Inputs]:
        """Return a function that returns `inputs`, from a cache if there is room, otherwise computed again."""
        if room.holds(sum(value.nbytes for value in inputs.values())):
            return lambda: inputs
        names = list(inputs)
        return lambda: {name: value for name, value in self._processed(asked).items() if name in names}


def _content(text: str, has_image: bool) -> list[dict[str, str]]:
    """Return a message's content: the image first, then the text."""
    return [*([{"type": "image"}] if has_image else []), {"type": "text", "text": text}]


def _reading(examples: Examples, index: int) -> Callable[[], Example]:
    return lambda: examples[index]


def _hint(example: Example, column: str) -> str:
    """Return the hint for a question; the hint may be missing."""
    value = example.values.get(column) if column else ""
    if not isinstance(value, str | None):
        raise TaskError(
            f'task.data: expected a text, or none, in column "{column}", found {describe_value(value)} in '
            f"{example.where}; correct or drop the row"
        )
    return (value or "").strip()


def _answers(example: Example, column: str, name: str) -> list[str]:
    """Return the captions of an image or the answers to its question: at least one, and none of them empty."""
    value = example.values.get(column)
    given = value if isinstance(value, list) else [value]
    answers = [text for each in given if (text := as_text(each)) is not None and text.strip()]
    if not answers or len(answers) < len(given):
        raise TaskError(
            f'task.data: expected {name}, or a list of them, in column "{column}", found {describe_value(value)} in '
            f"{example.where}; correct or drop the row"
        )
    return answers
