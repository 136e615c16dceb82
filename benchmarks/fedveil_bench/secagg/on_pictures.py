"""Reconstruct images from one site's gradient on a single image, by the closed form and by gradient matching.

Each site has one image, and the server knows its label. PSNR is computed on values in [-1, 1]. For the sum, matching
searches for all sites' images at once and puts them in the best-fitting order, because a sum has no order.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil import rng
from fedveil.attacks.base import AdversaryView
from fedveil.attacks.reconstruction import gradient_matching, observed_gradients
from fedveil.attacks.reconstruction.direct_inversion import direct_inversion
from fedveil.attacks.reconstruction.image_metrics import mean_image, peak_signal_to_noise
from fedveil.attacks.reconstruction.observed_gradients import ObservedGradient
from fedveil.config import parse
from fedveil.errors import StateError
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.random_binary import RandomBinary
from fedveil.tasks.image_classification import ImageClassification
from fedveil.wire.payloads import payload_tensors
from fedveil_bench.common import data
from fedveil_bench.common.federations import method_of, task_of
from fedveil_bench.random_binary.vit import from_scratch
from fedveil_bench.runner import BenchOptions
from fedveil_bench.secagg.paired_federations import Seen, run_pair

MEAN = "mean of other pictures"
_LOW, _HIGH = -1.0, 1.0
_MOST = 999.0  # dB, for an exact image
Values = dict[str, dict[str, list[float]]]  # by view, then attack: PSNR of each image
Shown = dict[str, list[Tensor]]  # images, by view and attack


def measure_psnr(settings: Mapping[str, Any], seed: int, options: BenchOptions) -> tuple[Values, Shown]:
    """Measure the PSNR of each image by "direct inversion" and "gradient matching".

    Returns:
        PSNR by view and attack, with MEAN for the mean image; and the images.
    """
    with tempfile.TemporaryDirectory() as folder:
        flat = from_scratch(settings["model"], settings["classes"], Path(folder) / "model")
        flat |= settings["config"] | {"run.seed": seed, "run.deterministic": True}
        config = parse(flat)
        task, method = task_of(ImageClassification, config, options), method_of(RandomBinary, config)
        examples = task.examples(data.find_data_folder(settings["data"]), "test")
        sites = settings["sites"]
        pictures = task.encode(examples[seed * sites : (seed + 1) * sites])
        last = settings["most_seeds"] * sites  # the mean excludes the images of all seeds
        others = task.encode(examples[last : last + settings["mean_of"]])
        rows = {f"site-{i}": [picture] for i, picture in enumerate(pictures)}
        exchange = MessageExchange(method, config.method.name, task.spec)
        guesses = {f"site-{i}": [replace(others[0], label=picture.label)] for i, picture in enumerate(pictures)}
        initial = task.initial(rng.initial_stream(seed, "weights"))
        views = run_pair(exchange, config, task, rows, initial, Path(folder), guesses)
        true = _stacked(pictures)
        guess = mean_image(_stacked(others))
        adversary = _Adversary(task, settings["matching"], true, torch.tensor([p.label for p in pictures]), seed)
        shown: Shown = {"the pictures": list(true), MEAN: [guess] * sites}
        found: Values = {MEAN: dict.fromkeys(("direct inversion", "gradient matching"), _psnr([guess] * sites, true))}
        for name, view in views.items():
            for attack, images in adversary.attacked(name, view).items():
                shown[f"{name}, {attack}"] = images
                found.setdefault(name, {})[attack] = _psnr(images, true)
    return found, shown


def _stacked(pictures: Any) -> Tensor:
    return torch.stack([picture.pixels() for picture in pictures]).double()


def _psnr(found: list[Tensor], true: Tensor) -> list[float]:
    return [min(peak_signal_to_noise(f, t, _HIGH - _LOW), _MOST) for f, t in zip(found, true, strict=True)]


class _Adversary:
    """An adversary that knows the broadcast model and the labels. `true` is used only to order the images."""

    def __init__(
        self, task: ImageClassification, matching: Mapping[str, Any], true: Tensor, labels: Tensor, seed: int
    ) -> None:
        self._task, self._matching, self._true, self._labels, self._seed = task, dict(matching), true, labels, seed

    def attacked(self, name: Seen, view: AdversaryView) -> dict[str, list[Tensor]]:
        """Return each site's image as reconstructed by each attack."""
        direct, each = [], []
        for upload in view.uploads():
            answered = view.answered(upload)
            if answered is None:
                raise StateError(
                    f"captured messages: expected the broadcast that {upload.site} answered, found none; capture "
                    "all messages"
                )
            weights = {n: t.double() for n, t in payload_tensors(answered.payload).items()}
            seen = observed_gradients.observe_upload(view.exchange.method, upload.payload, self._task.spec)
            each.append(ObservedGradient(seen.values, seen.seen, weights))
            direct.append(direct_inversion(seen.values, self._model(weights), _LOW, _HIGH))
        matched = [self._matched(one, self._labels[i : i + 1])[0] for i, one in enumerate(each) if name != "sum"]
        if name == "sum":  # the sum stands in for every upload
            matched = _in_order(self._matched(each[0], self._labels), self._true)
        return {"direct inversion": direct, "gradient matching": matched}

    def _model(self, weights: Mapping[str, Tensor]) -> Any:
        model = copy.deepcopy(self._task.base.model).double().cpu().eval()
        model.load_state_dict({n: t for n, t in weights.items() if n in model.state_dict()}, strict=False)
        return model

    def _matched(self, seen: ObservedGradient, labels: Tensor) -> Tensor:
        generator = rng.initial_stream(self._seed, "attack").torch_generator()
        options = dict(self._matching)
        most = options.pop("entries")
        return gradient_matching.levenberg_marquardt(
            self._model(seen.weights or {}), [observed_gradients.subsample_entries(seen, most, generator)], labels,
            (len(labels), *self._true.shape[1:]), generator=generator, low=_LOW, high=_HIGH, **options,
        ).image  # fmt: skip


def _in_order(images: Tensor, true: Tensor) -> list[Tensor]:
    orders = itertools.permutations(range(len(images)))
    best = min(orders, key=lambda order: float((images[list(order)] - true).square().sum()))
    return list(images[list(best)])
