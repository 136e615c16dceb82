"""Image classification: an image model learns the classes of images.

| `task.model` | initial weights | classes | images |
|---|---|---|---|
| a folder or Hub id with weights | its own; a new head for other classes | task.class-names, or the model's own | by
  its preprocessor_config.json; if the folder has none, as below |
| a folder with config.json, without weights | random | task.num-classes | as in the row above |
| "tiny" | random | task.num-classes | 32 x 32, with values from -1 to 1 |

Random weights come from the public stream that `initial` receives, so all sites in a run start with equal weights. With
an adapter, the frozen weights come from a public stream seeded with run.seed.

The data is a table file (Parquet, JSON Lines) or an image folder `<split>/<class>/.../<name>`. Without
preprocessor_config.json, an image is resized to the model's image_size (224 if the model has none) with bilinear
interpolation and antialiasing, without rounding, so the pixels are a linear function of the original pixels.

With task.multi-label, task.target-column contains the labels in a format from `fedveil.data.class_labels`, such as
"edema|mass". Otherwise it contains the class, as a name or as an integer counted from 0; `fedveil.data.class_names`
says how the names are numbered. With task.class-names, a model without weights has one class per name, and an exported
model has these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from fedveil.config import RunConfig, TaskConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import DatasetShard, Example, ExamplePrediction, Examples, Task, TaskInfo, class_metrics
from fedveil.data import class_labels, images
from fedveil.data.batches import LabelledBatch
from fedveil.data.class_names import ClassNumbering
from fedveil.data.image_decoding import decode_image, image_conversions
from fedveil.errors import ConfigError, TaskError
from fedveil.models import image_classifier, library_logging, loading
from fedveil.models.loaded_model import LoadedModel
from fedveil.training import class_scores
from fedveil.training.adapter_task import AdaptedTask, check_task_config
from fedveil.training.scored_examples import draw_scored

__all__ = ["ImageClassification", "ImageExample"]

INFO = TaskInfo(
    mounts=("layers",),
    columns=lambda task: (task.image_column, task.target_column),
    tiny=lambda: None,
    metrics=lambda task: class_scores.metrics_of(task) if task.multi_label else class_metrics(task),
    labels=True,
)
TINY_VIT = {  # the tiny base, defined in code
    "image_size": 32, "patch_size": 4, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 384,
}  # fmt: skip
MEAN = STD = 0.5
_KEPT_BYTES = images.KEPT_BYTES
_MODES = {1: "L", 3: "RGB"}  # PIL's mode for images with that many channels

Pixels = Float[Tensor, "channels height width"]


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """Create the task of `config`; the model is loaded on first use. Raises the same errors as text generation."""
    check_task_config(config, adapter, INFO)
    if config.task.multi_label:
        class_labels.require_class_names(config.task)
    names, number = len(config.task.class_list), config.task.num_classes
    if names and number not in (names, TaskConfig().num_classes):
        raise ConfigError(
            f"task.num-classes: {number} contradicts task.class-names, which has {names} names; leave it out"
        )
    return ImageClassification(config, adapter, loading.pick_device(device))


@dataclass(frozen=True)
class ImageExample:
    """One image in the model's input format, with its class or with 1.0 or 0.0 for each class.

    `kept` returns the pixels if they do not need decoding.
    """

    pixels: Callable[[], Pixels]
    label: int | tuple[float, ...]
    kept: Callable[[], Pixels | None] = lambda: None

    @property
    def length(self) -> int:
        """Return 1, because all images have the same size."""
        return 1


@final
class ImageExamples(Sequence[ImageExample]):
    """The images of the examples, each read and decoded when its pixels are needed.

    Decoded images are cached while there is room. Slicing returns a list.

    Args:
        examples: the examples with the images.
        labels: the class of each example, or a row with 1.0 or 0.0 for each class.
        decoded: returns an example's decoded image.
    """

    def __init__(self, examples: Examples, labels: Sequence[Any], decoded: Callable[[Example], Pixels]) -> None:
        self._examples, self._decoded = examples, decoded
        self._labels = np.array(labels, np.float32 if labels and isinstance(labels[0], tuple) else np.int64)
        self._room, self._kept = images.DecodeMemoryLimit(_KEPT_BYTES), dict[int, Pixels]()

    @override
    def __len__(self) -> int:
        return len(self._labels)

    @overload
    def __getitem__(self, index: int) -> ImageExample: ...
    @overload
    def __getitem__(self, index: slice) -> list[ImageExample]: ...
    @override
    def __getitem__(self, index: int | slice) -> ImageExample | list[ImageExample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        label = int(self._labels[at]) if self._labels.ndim == 1 else tuple(self._labels[at].tolist())
        return ImageExample(lambda: self._pixels(at), label, lambda: self._kept.get(at))

    def _pixels(self, at: int) -> Pixels:
        if (cached_pixels := self._kept.get(at)) is not None:
            return cached_pixels
        pixels = self._decoded(self._examples[at])
        if self._room.holds(pixels.nbytes):
            self._kept[at] = pixels
        return pixels


@final
class ImageClassification(AdaptedTask):
    """A model that classifies images.

    The loss is the mean cross entropy over images or, with task.multi-label, the mean binary cross entropy over labels.
    """

    def __init__(self, config: RunConfig, adapter: Adapter, device: torch.device) -> None:
        super().__init__(config, adapter, device)
        self._numbering = ClassNumbering(config.task, lambda: self._model_names, lambda: self.classes)
        self._model_names: tuple[str, ...] = ()

    @override
    def _load(self) -> LoadedModel:
        """Load the base, with the classes in task.class-names if the run config gives any."""
        loaded = image_classifier.load_image_classifier(self.config, self.adapter, self.device, TINY_VIT)
        self._model_names = _names_of(loaded.model.config)
        return loaded

    @property
    def classes(self) -> int:
        """Return the model's number of classes."""
        return int(self.base.model.config.num_labels)

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
    def encode(self, examples: Examples) -> ImageExamples:
        """Return one example per image; an image is decoded when a batch contains it.

        Raises TaskError, with the file and row, for an example without an image or class. If an image is damaged after
        its header, building the batch raises the error.
        """
        self._mode  # noqa: B018  # raises an error if the model does not take images
        labels: list[int | tuple[float, ...]] = []
        conversions, task, column = [], self.config.task, self.config.task.image_column
        for example in examples:
            if task.multi_label:
                labels.append(class_labels.read_labels(example, self._numbering, task))
            else:
                labels.append(self._numbering.number(example))
            image = images.image_bytes(example, column)
            conversions.append(image_conversions(image, example.where, task.gray_window))
        images.note_conversions(conversions)
        return ImageExamples(examples, labels, self._decoded)

    @override
    def collate(self, rows: Sequence[ImageExample]) -> LabelledBatch:
        """Return one batch, on the CPU."""
        # Starting a thread for a cached image would cost more than it saves.
        cached_pixels = [row.kept() for row in rows]
        undone = iter(
            images.decode_parallel([row.pixels for row, k in zip(rows, cached_pixels, strict=True) if k is None])
        )
        pixels = [next(undone) if k is None else k for k in cached_pixels]
        return LabelledBatch(torch.stack(pixels), torch.tensor([row.label for row in rows]))

    def _logits(self, batch: LabelledBatch) -> Float[Tensor, "rows classes"]:
        return self._forward({"pixel_values": batch.inputs}).float()

    def samples(self, rows: Sequence[ImageExample]) -> tuple[Tensor, Tensor]:
        """Return the pixels and classes; see per_example.PerExampleLoss."""
        batch = self.collate(rows).to(self.device)
        return batch.inputs, batch.labels

    def sample_loss(self, weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        """Return the loss of one image."""
        pixels, label = sample
        logits = self._logits_at(weights, {"pixel_values": pixels[None]}).float()
        return class_scores.loss_sum(logits, label[None])

    @override
    def loss_sum(self, batch: LabelledBatch) -> Tensor:
        """Return the summed loss of the images in `batch`, which is on the device.

        Raises:
            ConfigError: train.compile is set on a machine that does not support it.
        """
        return class_scores.loss_sum(self._logits(batch), batch.labels)

    @override
    def mean_loss(self, encoded: Sequence[ImageExample]) -> float:
        """Return the mean loss per image with the last loaded weights."""
        if self.config.task.multi_label:
            logits, labels = self._all(encoded)
            return float(class_scores.loss_sum(logits, labels)) / len(encoded)
        return self._scores(encoded)["loss"]

    @override
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """ "loss" and "accuracy", or with task.multi-label all scores of `class_scores`, over evaluate.eval-examples
        examples; see `draw_scored`.

        Raises:
            TaskError: there are no examples, the weights do not match the spec, or as in `encode`.
        """
        if not examples:
            raise TaskError("examples: there are none to score; correct task.evaluation")
        self.show(weights)
        encoded = self.encode(draw_scored(examples, self.config))
        if not self.config.task.multi_label:
            return self._scores(encoded)
        return class_scores.score_examples(*self._all(encoded), self.config.evaluate.metric)

    @torch.no_grad()
    def _all(self, encoded: Sequence[ImageExample]) -> tuple[Tensor, Tensor]:
        """Return the logits and labels of all images, on the CPU."""
        batches = (self.collate([encoded[i] for i in part]) for part in self._parts(len(encoded)))
        each = [(self._logits(batch.to(self.device)).cpu(), batch.labels) for batch in batches]
        return torch.cat([logits for logits, _ in each]), torch.cat([labels for _, labels in each])

    @torch.no_grad()
    def _scores(self, encoded: Sequence[ImageExample]) -> dict[str, float]:
        loss = right = 0.0
        for part in self._parts(len(encoded)):
            batch = self.collate([encoded[i] for i in part]).to(self.device)
            logits = self._logits(batch)
            loss += float(torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum"))
            right += float((logits.argmax(-1) == batch.labels).sum())
        return {"loss": loss / len(encoded), "accuracy": right / len(encoded)}

    @override
    @torch.no_grad()
    def predict(
        self, weights: Weights, rows: Sequence[ImageExample], generate: bool = False
    ) -> Iterator[ExamplePrediction]:
        """Yield only the slice "target", with one position or, with several labels, a two-class position per label."""
        self.show(weights)
        for part in self._parts(len(rows)):
            chosen = [rows[i] for i in part]
            batch = self.collate(chosen)
            logits = self._logits(batch.to(self.device)).cpu()
            for row, label in zip(logits, batch.labels, strict=True):
                yield ExamplePrediction({"target": class_scores.positions_of(row, label)}, label.reshape(-1).long())

    def _decoded(self, example: Example) -> Pixels:
        return self._pixels(images.image_bytes(example, self.config.task.image_column), example.where)

    def _pixels(self, image: bytes, where: str) -> Pixels:
        """Return an image in the model's input format."""
        config, processor = self.base.model.config, self.base.processor
        picture = decode_image(image, where, self._mode, self.config.task.gray_window)
        if processor is not None:
            with library_logging.quiet_libraries():
                pixels: Tensor = processor(images=[picture], return_tensors="pt")["pixel_values"][0]
            return pixels.float()
        values = torch.from_numpy(np.array(picture, dtype=np.float32)).reshape(*picture.size[::-1], -1).permute(2, 0, 1)
        size = getattr(config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        if values.shape[1:] != (height, width):
            values = torch.nn.functional.interpolate(
                values[None], (height, width), mode="bilinear", antialias=True, align_corners=False
            )[0]
        return ((values / 255 - MEAN) / STD).contiguous()

    @property
    def _mode(self) -> str:
        """Return PIL's mode for the model's images."""
        channels = getattr(self.base.model.config, "num_channels", 3)
        if self.base.model.main_input_name != "pixel_values" or channels not in _MODES:
            raise TaskError(
                "task.model: only models for images with 1 or 3 channels are supported, but "
                f'{type(self.base.model).__name__} in "{self.config.task.model}" takes {channels}; {loading.NEXT}'
            )
        return _MODES[channels]


def _names_of(model_config: Any) -> tuple[str, ...]:
    """Return a model's class names, by number; () if it has only the placeholder names of transformers."""
    names = tuple(str(name) for _, name in sorted(model_config.id2label.items()))
    is_plain = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    return () if is_plain or len(set(names)) < len(names) else names
