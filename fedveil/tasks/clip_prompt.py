"""Prompts for a frozen CLIP model: train context vectors before the class names to classify images.

    logits = exp(scale) cos(image, [SOS][context][class name].[EOS])          scale: the model's logit scale

Adapter: `PromptAdapter`. Model: any CLIP model in transformers, given as a local folder or a Hub id, or "tiny", which
was not trained on images from the presets' data. The loss is the mean cross entropy over images; a prompt with a
contrastive term adds that term.

Each image passes through the frozen tower once, without augmentation; the site keeps the image features in memory, by
file digest. An encoded example consists of these features.

The data is a table file (Parquet, JSON Lines) or an image folder `<split>/<class>/.../<name>`. The class is in
task.target-column, as a name or as an integer counted from 0; `fedveil.data.class_names` says where the names come
from. In texts, "_" becomes a space. Under a privacy claim, the names must be in task.class-names, because they affect
every loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from fedveil.adapters import prompt_tensors
from fedveil.adapters.prompt import PromptAdapter
from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import DatasetShard, ExamplePrediction, Examples, Task, TaskInfo, class_metrics
from fedveil.data import images
from fedveil.data.batches import LabelledBatch
from fedveil.data.class_names import ClassNumbering
from fedveil.data.image_decoding import decode_image, image_conversions
from fedveil.errors import ConfigError, TaskError
from fedveil.models import bundled, clip, loading
from fedveil.models.clip import EncodedImage
from fedveil.models.loaded_model import LoadedModel
from fedveil.training.adapter_task import AdaptedTask, check_task_config
from fedveil.training.scored_examples import draw_scored

__all__ = ["ClipPrompt"]

INFO = TaskInfo(
    mounts=("texts",),
    columns=lambda task: (task.image_column, task.target_column),
    tiny=lambda: bundled.bundled_folder("clip-prompt"),
    metrics=class_metrics,
    divisible=False,  # encoding the texts of all classes costs the most, and every process would encode all of them
)
_AT_ONCE = 64  # images per pass through the tower
ZERO_SHOT = "a photo of a"


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """Create the task of `config`; the model is loaded on first use. Raises the same errors as text generation."""
    check_task_config(config, adapter, INFO)
    for key, value, wanted in (
        ("train.quantized-base", config.train.quantized_base, "none"),
        ("train.compile", config.train.compile, False),
        ("train.gradient-checkpointing", config.train.gradient_checkpointing, False),
    ):
        if value != wanted:
            raise ConfigError(f'{key}: the task "clip-prompt" supports only {wanted}, found {value}; leave it out')
    # No other kind of adapter precedes the texts.
    return ClipPrompt(config, cast(PromptAdapter, adapter), loading.pick_device(device))


@final
class ClipPrompt(AdaptedTask):
    """A frozen CLIP model and a prompt."""

    adapter: PromptAdapter

    def __init__(self, config: RunConfig, adapter: PromptAdapter, device: torch.device) -> None:
        super().__init__(config, adapter, device)
        self._numbering = ClassNumbering(config.task)
        self._points: dict[bytes, Tensor] = {}

    @override
    def _load(self) -> LoadedModel:
        return clip.load_clip(self.config, self.adapter, self.device, INFO.tiny())

    @property
    def names(self) -> tuple[str, ...]:
        """Return all class names, by number. Before encoding, raises TaskError unless task.class-names is set."""
        if not self._numbering.names:
            raise TaskError(
                "task.class-names: neither this key nor the data names the classes; set it to the names of all "
                "classes, separated by commas"
            )
        return self._numbering.names

    @cached_property
    def _texts(self) -> clip.ClassTexts:
        return clip.ClassTexts(self.base, [name.replace("_", " ") for name in self.names], self.adapter.length)

    @cached_property
    def _placeholder(self) -> Float[Tensor, "classes D"]:
        """Return the class texts with the placeholder as context."""
        with torch.no_grad():
            words = " ".join([clip.PLACEHOLDER] * self.adapter.length)
            return self._texts.features(self._texts.written(words)[None])[0]

    @cached_property
    def _scale(self) -> float:
        """Return exp of the model's logit scale."""
        return float(self.base.model.logit_scale.exp())

    @override
    def examples(self, data: Path, split: str, share: DatasetShard | None = None) -> Examples:
        """Read the examples as `DatasetTable.examples` does.

        For an image folder, the class is in both task.target-column and task.label-column.
        """
        table = images.image_table(data, split, self.config.task)
        self._numbering.note(table.class_names, table.folder)
        return table.examples(split, share, self.config)

    @override
    def require_shared_classes(self) -> None:
        self._numbering.require_shared()

    @override
    def encode(self, examples: Examples) -> list[EncodedImage]:
        """Encode each image. Images that the tower has not yet processed pass through it.

        Raises:
            TaskError: an image cannot be decoded or has no class, with the file and row; or a data set declares class
                names that differ from those of the run or of earlier examples.
        """
        labels = [self._numbering.number(example) for example in examples]
        digests: list[bytes] = []
        waiting: dict[bytes, Any] = {}
        conversions = []
        for example in examples:
            image = images.image_bytes(example, self.config.task.image_column)
            conversions.append(image_conversions(image, example.where, self.config.task.gray_window))
            digests.append(hashlib.sha256(image).digest())
            if digests[-1] not in self._points and digests[-1] not in waiting:
                waiting[digests[-1]] = decode_image(image, example.where, window=self.config.task.gray_window)
            if len(waiting) == _AT_ONCE:
                self._look(waiting)
        self._look(waiting)
        images.note_conversions(conversions)
        return [EncodedImage(self._points[digest], label) for digest, label in zip(digests, labels, strict=True)]

    def _look(self, waiting: dict[bytes, Any]) -> None:
        """Compute the image features with the tower; the images are not kept."""
        if waiting:
            with self._computing():
                points = clip.encode_images(self.base, list(waiting.values()), patches=self.adapter.form == "transport")
            self._points |= dict(zip(waiting, points.unbind(), strict=True))
            waiting.clear()

    @override
    def collate(self, rows: Sequence[EncodedImage]) -> LabelledBatch:
        """Return one batch, on the CPU."""
        return LabelledBatch(torch.stack([row.points for row in rows]), torch.tensor([row.label for row in rows]))

    def texts(self, weights: Weights) -> Float[Tensor, "prompts classes D"]:
        """Return the text features under `weights`, differentiably; see `prompt_tensors.context_vectors`."""
        with self._computing():
            return self._texts.features(prompt_tensors.context_vectors(self.adapter, weights))

    def logits(self, texts: Tensor, points: Tensor) -> Float[Tensor, "rows classes"]:
        """Return the logits of images for texts, differentiably.

        Images are given as points, with shape (rows, points, D), and texts with shape (prompts, classes, D).
        """
        return self._scale * prompt_tensors.class_similarities(self.adapter, points, texts)

    def loss_at(self, weights: Weights, batch: LabelledBatch) -> Tensor:
        """Return the summed loss of a batch on the device, as a pure function of the weights for torch.func.

        Under vmap, an example is a batch of size one; the texts do not depend on the examples and are computed once.
        """
        texts = self.texts(weights)
        loss = torch.nn.functional.cross_entropy(self.logits(texts, batch.inputs), batch.labels, reduction="sum")
        if self.adapter.contrast:
            term = prompt_tensors.contrastive_loss(self._placeholder, texts[1], texts[0], self.adapter.temperature)
            loss = loss + self.adapter.contrast * batch.terms * term
        return loss

    def samples(self, rows: Sequence[EncodedImage]) -> tuple[Tensor, Tensor]:
        """Return the points and classes. Raises TaskError for a prompt whose loss branches on values."""
        if self.adapter.form == "transport":
            raise TaskError(
                'adapter.form: per-example gradients require "one", "sum" or "factored", found "transport", whose '
                "plan is iterated until it converges"
            )
        batch = self.collate(rows).to(self.device)
        return batch.inputs, batch.labels

    def sample_loss(self, weights: Weights, *sample: Tensor) -> Tensor:
        """Return the loss of one image."""
        points, label = sample
        return self.loss_at(weights, LabelledBatch(points[None], label[None]))

    def features(self, weights: Weights) -> Float[Tensor, "classes D"]:
        """Return the text features, with norm 1. Raises TaskError if the loss also uses other features."""
        if self.adapter.form == "transport" or self.adapter.contrast:
            raise TaskError(
                "adapter: gradients with respect to the texts require one text per class and no contrast, found "
                f'form "{self.adapter.form}" and contrast {self.adapter.contrast:g}'
            )
        return self.texts({name: w.to(self.device) for name, w in weights.items()})[0]

    def factors(self, features: Tensor, *samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale (softmax_i - onehot_i) and the image feature; their product is row i's text gradient."""
        points, labels = samples
        probabilities = self.logits(features[None], points).softmax(-1)
        return self._scale * (probabilities - torch.nn.functional.one_hot(labels, probabilities.shape[-1])), points[
            :, 0
        ]

    @override
    def loss_sum(self, batch: LabelledBatch) -> Tensor:
        """Return the summed loss of the images in `batch`, which is on the device."""
        return self.loss_at(self.trained, batch)

    @override
    @torch.no_grad()
    def mean_loss(self, encoded: Sequence[EncodedImage]) -> float:
        """Return the mean loss per image with the last loaded weights, including the contrastive term."""
        return float(self.loss_at(self.trained, self.collate(encoded).to(self.device))) / len(encoded)

    @override
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """ "loss" (cross entropy alone) and "accuracy" over evaluate.eval-examples examples; see `draw_scored`.

        Raises:
            TaskError: there are no examples, the weights do not match the spec, or as in `encode`.
        """
        if not examples:
            raise TaskError("examples: there are none to score; correct task.evaluation")
        logits, labels = self._all(weights, self.encode(draw_scored(examples, self.config)))
        loss = float(torch.nn.functional.cross_entropy(logits, labels))
        return {"loss": loss, "accuracy": float((logits.argmax(-1) == labels).float().mean())}

    @torch.no_grad()
    def zero_shot_logits(self, rows: Sequence[EncodedImage], words: str = ZERO_SHOT) -> Float[Tensor, "rows classes"]:
        """Return the logits of the untrained model with `words` as context, on the CPU."""
        texts = self._texts.features(self._texts.written(words)[None])[0].cpu()
        return self._scale * torch.stack([row.points[0] for row in rows]) @ texts.T

    @torch.no_grad()
    def _all(
        self, weights: Weights, rows: Sequence[EncodedImage]
    ) -> tuple[Float[Tensor, "rows classes"], Int[Tensor, " rows"]]:
        """Return the logits and labels, on the CPU."""
        self.put(weights)
        texts = self.texts(self.trained)
        parts = (self.collate([rows[i] for i in part]) for part in self._parts(len(rows)))
        logits = [self.logits(texts, batch.inputs.to(self.device)).cpu() for batch in parts]
        return torch.cat(logits), torch.tensor([row.label for row in rows])

    @override
    def predict(
        self, weights: Weights, rows: Sequence[EncodedImage], generate: bool = False
    ) -> Iterator[ExamplePrediction]:
        """Yield only the slice "target", with one position, because this task generates no text."""
        if rows:
            logits, labels = self._all(weights, rows)
            for i in range(len(rows)):
                yield ExamplePrediction({"target": logits[i : i + 1]}, labels[i : i + 1])
