"""Reconstruct images from one client's gradients: closed forms, and matching by an adversary that knows the mask.

Every image (or batch of images) is a separate site in an in-process federation. The adversary reads the server's
captured messages, and knows the labels and the model with the broadcast weights. Rows in a result:

| row | meaning |
|---|---|
| mean image | the mean of other images from the same data: the best guess of an adversary that saw no messages |
| <case> | one attack on one method and one model, over all images in all seeds |

PSNR is computed per image on values in [-1, 1]. "recovered" is the share of images above 30 dB. "read" is the share of
seeds with a recovered image: a search succeeds or fails as a whole, so the mean of a few dB values says little (see
`shares`). Each seed draws the model's weights and has its own images; intervals are 95%, over images and seeds
(`resampling`). A case with `seeds` uses only the first seeds; a case with `expect` gets a verdict:

| expect | tests that |
|---|---|
| recovered | PSNR is above 60 dB |
| fails | PSNR is below the mean image's PSNR, image by image |
| read | an image is read in more than `share` of the seeds |
| hidden | an image is read in less than `share` of the seeds |
"""

from __future__ import annotations

import base64
import copy
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from fedveil import rng, strategies
from fedveil.attacks.base import AdversaryView
from fedveil.attacks.reconstruction import gradient_matching, observed_gradients
from fedveil.attacks.reconstruction.april import ImageUpsampling, april_closed_form, replace_first_block
from fedveil.attacks.reconstruction.direct_inversion import direct_inversion
from fedveil.attacks.reconstruction.image_metrics import (
    contact_sheet,
    mean_image,
    peak_signal_to_noise,
    structural_similarity,
)
from fedveil.attacks.reconstruction.observed_gradients import ObservedGradient
from fedveil.config import RunConfig, parse
from fedveil.errors import ConfigError, StateError
from fedveil.federation.exchange import MessageExchange
from fedveil.tasks.image_classification import ImageClassification, ImageExample
from fedveil.wire.capture import MessageCapture
from fedveil.wire.payloads import payload_tensors
from fedveil_bench.common import data, resampling, seeds, shares
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence
from fedveil_bench.random_binary.vit import from_scratch
from fedveil_bench.runner import BenchOptions, BenchOutcome

_LOW, _HIGH = -1.0, 1.0
_RECOVERED = 30.0  # dB: above this, the image is unmistakable
_EXACT = 60.0  # dB: off by less than one of 256 gray levels
_SHOWN = 8  # images in a row of the contact sheet
_ROWS = 6  # names the random draws
_SMALLEST = 11  # minimum number of pixels per side for SSIM's window

Images = Tensor  # (images, channels, height, width)


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirement: only test images."""
    return [data.DataRequirement(settings["data"], ("test",))]


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Run each of `settings["cases"]` not in `settings["skip"]` on every seed's images; add a contact sheet."""
    settings["cases"] = [case for case in settings["cases"] if case["name"] not in settings.get("skip", [])]
    settings["seeds"] = options.seeds or settings["seeds"]  # the mean image excludes the images of all seeds
    answers: list[dict[str, Any]] = seeds.run_seeds(__name__, settings, options)
    rows: list[dict[str, Any]] = []
    figures: dict[str, dict[str, ResampledMetric]] = {}
    for name in answers[0]["rows"]:
        of_seeds = [answer["rows"][name] for answer in answers if name in answer["rows"]]
        figures[name] = {
            m: resampling.over_seeds([resampling.resample_mean(each["values"][m], _ROWS) for each in of_seeds])
            for m in of_seeds[0]["values"]
        }
        metrics = {m: resampling.compute_interval(f) for m, f in figures[name].items()}
        row: dict[str, Any] = {
            "name": name,
            "metrics": metrics | {"read": shares.compute_share_interval(_read(figures[name]))},
        }
        if of_seeds[0]["upload_bytes"]:
            row["upload_bytes"] = round(statistics.fmean(each["upload_bytes"] for each in of_seeds))
            row["seconds"] = round(sum(each["seconds"] for each in of_seeds), 1)
        rows.append(row)
    done = f"this run: {settings['images']} images a seed, {len(answers)} seeds; labels known to the adversary"
    return BenchOutcome(
        rows, list_verdicts(settings["cases"], figures), [done], {"png": base64.b64decode(answers[0]["sheet"])}
    )


def list_verdicts(
    cases: Sequence[Mapping[str, Any]], figures: Mapping[str, Mapping[str, ResampledMetric]]
) -> list[str]:
    """Return a sentence about each case with `expect`, corrected for the number of cases.

    Raises:
        ConfigError: a case has an unknown `expect`.
    """
    found = [_judged(case, figures) for case in cases if "expect" in case]
    return common.list_verdicts(found, max(len(of_case["psnr"].seeds) for of_case in figures.values()))


def _judged(case: Mapping[str, Any], figures: Mapping[str, Mapping[str, ResampledMetric]]) -> tuple[str, ClaimSentence]:
    mine = figures[case["name"]]["psnr"]
    match case["expect"]:
        case "read" | "hidden" as expect:
            read, share = _read(figures[case["name"]]), case["share"]
            side: Literal["higher", "lower"] = "higher" if expect == "read" else "lower"
            text = f"{case['name']}: read on {sum(read)} of {len(read)} seeds, in a share of "
            interval = resampling.format_interval(shares.compute_share_interval(read), ".2f")
            text += f"{interval}, expected {side} than {share:g}"
            return text, shares.judge_share(read, side, share)
        case "recovered":
            d, claim = resampling.subtract_metrics(mine, resampling.from_constant(_EXACT)), "higher"
            what = f"above {_EXACT:g} dB"
        case "fails":
            d, claim = resampling.subtract_metrics(mine, figures[_baseline(case)]["psnr"]), "lower"
            what = "below the mean image, image by image"
        case other:
            raise ConfigError(
                f"expect: expected recovered, fails, read or hidden, found {other}; correct the case in the preset"
            )
    interval = resampling.format_interval(resampling.compute_interval(mine), ".1f")
    text = f"{case['name']}: PSNR {interval} dB, expected {what}"
    return text, common.judge_claim(d, {"is": claim})


def _read(of_case: Mapping[str, ResampledMetric]) -> list[bool]:
    """Return, for each seed, whether any of its images is recovered."""
    return [share > 0 for share in of_case["recovered"].seeds]


def _baseline(case: Mapping[str, Any]) -> str:
    return f"mean image, {case['model']}"


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    rows: dict[str, Any] = {}
    sheet: list[tuple[Tensor, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in settings["cases"]:
            if seed - settings.get("first_seed", 0) >= case.get("seeds", settings["seeds"]):
                continue
            target = _Target(settings, case, seed, Path(folder), options)
            if _baseline(case) not in rows:
                guess = mean_image(target.others)
                rows[_baseline(case)] = _scores(target.images, [guess] * len(target.images))
                sheet += _labelled(target.shown(target.images), f"{case['model']}: the images themselves")
            started = time.perf_counter()
            found, upload_bytes, notes = target.attacked()
            scores = rows[case["name"]] = _scores(target.images, found, upload_bytes, time.perf_counter() - started)
            sheet += _labelled(target.shown(found), case["name"])
            options.say(
                f"seed {seed}: {case['name']}: PSNR {' '.join(f'{v:.0f}' for v in scores['values']['psnr'])} {notes}"
                f"in {scores['seconds']:.0f} s"
            )
    images, labels = zip(*sheet, strict=True)
    png = base64.b64encode(contact_sheet(images, labels, _LOW, _HIGH, target.width))
    return {"rows": rows, "sheet": png.decode()}


def _labelled(images: Sequence[Tensor], label: str) -> list[tuple[Tensor, str]]:
    """Return a row of the contact sheet, with a label on its first image only."""
    return [(image, "" if i else label) for i, image in enumerate(images)]


def _scores(
    true: Sequence[Tensor], found: Sequence[Tensor], upload_bytes: int = 0, seconds: float = 0.0
) -> dict[str, Any]:
    pairs = list(zip(found, true, strict=True))
    values = {"psnr": [min(peak_signal_to_noise(f, t, _HIGH - _LOW), 999.0) for f, t in pairs]}
    if min(true[0].shape[1:]) >= _SMALLEST:
        values["ssim"] = [structural_similarity(f, t, _HIGH - _LOW, _LOW) for f, t in pairs]
    values["recovered"] = [float(value > _RECOVERED) for value in values["psnr"]]
    return {"values": values, "upload_bytes": upload_bytes, "seconds": seconds}


class _Target:
    """The images for one case, with each batch at a separate site, and the model that the sites train."""

    def __init__(
        self, settings: Mapping[str, Any], case: Mapping[str, Any], seed: int, folder: Path, options: BenchOptions
    ) -> None:
        self.case, self.seed = case, seed
        self._matching = {**settings.get("matching", {}), **case.get("matching", {})}
        model = dict(settings["models"][case["model"]])
        self._modified, self._pixels = model.pop("modified", False), model.pop("pixels", 0)
        flat = {
            **from_scratch(model, settings["classes"], folder / case["model"]),
            "method.name": case["method"]["name"],
            "method.params": case["method"].get("fields", ""),
            "train.batch-size": case.get("batch", 1),
            "run.rounds": case.get("rounds", 1),
            "run.seed": seed,
            "run.deterministic": True,
        }
        self.config: RunConfig = parse(flat)
        self.method = strategies.create_method(self.config.method.name, self.config.method.params)
        self.task = task = task_of(ImageClassification, self.config, options, self.method.adapter)
        if self._modified:
            replace_first_block(task.base.model)
        examples = task.examples(data.find_data_folder(settings["data"]), "test")
        self._batch = self.config.train.batch_size
        count = max(min(case.get("images", settings["images"]), settings["images"]), self._batch)
        most = max(settings["images"], *(each.get("batch", 1) for each in settings["cases"]))
        self.width, start = min(_SHOWN, most), seed * most  # images of a sheet's row; the first of the seed's
        self._pictures = [self._at_size(p) for p in task.encode(examples[start : start + count])]
        last = (settings.get("first_seed", 0) + settings["seeds"]) * most  # the mean uses no image of any seed
        self.others = self._stacked(
            [self._at_size(p) for p in task.encode(examples[last : last + settings["mean_of"]])]
        )
        self.images = list(self._stacked(self._pictures))

    def _at_size(self, picture: ImageExample) -> ImageExample:
        """Return the image as the client has it; if `pixels` is set, enlarged from that many pixels per side."""
        if not self._pixels:
            return picture
        small = self._shrunk(picture.pixels()[None])
        return ImageExample(lambda: self._enlarged(small)[0], picture.label)

    def _shrunk(self, images: Tensor) -> Tensor:
        return functional.interpolate(images, self._pixels, mode="bilinear", antialias=True, align_corners=False)

    def _enlarged(self, images: Tensor) -> Tensor:
        size = self.task.base.model.config.image_size
        return functional.interpolate(images, size, mode="bilinear", align_corners=False)

    def _stacked(self, pictures: Sequence[ImageExample]) -> Images:
        return torch.stack([picture.pixels() for picture in pictures]).double()

    def shown(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Return the images for a row of the contact sheet, padded with blank images."""
        blank = torch.full_like(images[0], _HIGH)
        return [*images, *[blank] * self.width][: self.width]

    def attacked(self) -> tuple[list[Tensor], int, str]:
        """Return a reconstruction of every image, the mean bytes per upload, and the attack's own notes."""
        sites = {
            f"site-{i:03d}": self._pictures[i : i + self._batch] for i in range(0, len(self._pictures), self._batch)
        }
        exchange = MessageExchange(self.method, self.config.method.name, self.task.spec)
        initial = self.task.initial(rng.initial_stream(self.seed, "weights"))
        with tempfile.TemporaryDirectory() as folder:
            tap = MessageCapture(Path(folder))
            done = create_federation(exchange, self.config, self.task, sites, initial, tap)
            done.run()
            view = AdversaryView.server(tap, exchange)
            found = [self._reconstructed(view, site, sites[site]) for site in sites]
        sent = done.upload_bytes // (len(sites) * self.config.run.rounds)
        images = [image for batch, _ in found for image in batch]
        return images, sent, "; ".join(note for _, note in found if note) + " "

    def _reconstructed(
        self, view: AdversaryView, site: str, pictures: Sequence[ImageExample]
    ) -> tuple[list[Tensor], str]:
        model = copy.deepcopy(self.task.base.model).double().cpu().eval()
        observed = []
        for upload in view.uploads(site):
            answered = view.answered(upload)
            if answered is None:
                raise StateError(
                    f"captured messages: expected the broadcast that {site}'s upload answers, found none; capture "
                    "all messages"
                )
            weights = {n: t.double() for n, t in payload_tensors(answered.payload).items()}
            seen = observed_gradients.observe_upload(self.method, upload.payload, self.task.spec)
            observed.append(ObservedGradient(seen.values, seen.seen, weights))
        if self.case["attack"] in ("april", "direct"):
            model.load_state_dict({n: t for n, t in weights.items() if n in model.state_dict()}, strict=False)
            values = {n: observed[0].values.get(n, torch.zeros_like(t)) for n, t in model.named_parameters()}
            if self.case["attack"] == "direct":
                return [direct_inversion(values, model, _LOW, _HIGH)], ""
            shape = (model.config.num_channels, self._pixels, self._pixels)
            known = ImageUpsampling(self._enlarged, shape) if self._pixels else None
            return [april_closed_form(values, model, _LOW, _HIGH, known)], ""
        labels = torch.tensor([picture.label for picture in pictures])
        return self._matched(model, observed, labels, self._stacked(pictures))

    def _matched(
        self, model: Any, observed: Sequence[ObservedGradient], labels: Tensor, true: Images
    ) -> tuple[list[Tensor], str]:
        """Reconstruct by gradient matching. `true` is used only to order the images in a batch."""
        options = dict(self._matching)
        most, zeros_as_data = options.pop("entries", 0), options.pop("zeros_as_data", False)
        generator = rng.initial_stream(self.seed, "attack").torch_generator()
        if zeros_as_data:
            observed = [
                ObservedGradient(o.values, observed_gradients.observe_all_entries(o.values).seen, o.weights)
                for o in observed
            ]
        if most:
            observed = [observed_gradients.subsample_entries(o, most, generator) for o in observed]
        upsample = self._enlarged if self._pixels else None
        side = self._pixels or true.shape[-1]
        match = gradient_matching.levenberg_marquardt(
            model, observed, labels, (*true.shape[:2], side, side),
            generator=generator, upsample=upsample, low=_LOW, high=_HIGH, **options,
        )  # fmt: skip
        images = upsample(match.image) if upsample else match.image
        return _in_order(images, true), f"{match.residual:.0e}/{match.iterations}"


def _in_order(images: Images, true: Images) -> list[Tensor]:
    """Put the images in a batch in the order that best matches the true images, because a sum has no order."""
    apart = (images[:, None] - true[None]).square().flatten(2).sum(-1)  # found x true
    found, fits = linear_sum_assignment(apart.cpu().numpy())
    return [images[i] for i in found[np.argsort(fits)]]
