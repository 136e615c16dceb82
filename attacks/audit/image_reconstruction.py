"""Reconstruct images from a run's gradients and compare them with the sites' own images.

The audit applies the closed form of `direct_inversion` to each site's first gradients, as the server saw
them. The closed form is exact for the complete gradient of a single image. Each result is shown next to the
nearest of the site's own images, with the score that the mean of all images would reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedveil.attacks.base import AdversaryView
from fedveil.attacks.reconstruction import observed_gradients
from fedveil.attacks.reconstruction.april import PATCH_WEIGHT, POSITION
from fedveil.attacks.reconstruction.direct_inversion import direct_inversion
from fedveil.attacks.reconstruction.image_metrics import Image, contact_sheet, mean_image, peak_signal_to_noise
from fedveil.attacks.samples import AuditSample
from fedveil.config import RunConfig
from fedveil.contract.task import Task
from fedveil.tasks.image_classification import ImageClassification

_A_SITE = 2  # number of gradients to try per site
_SITES = 4
_RECOVERED = 30.0  # dB


@dataclass(frozen=True)
class ContactSheet:
    """Reconstruction attempts as an image for people to inspect.

    Attributes:
        png: each attempt next to the nearest of the site's own images.
        notes: sentences that interpret the attempts.
    """

    png: bytes
    notes: Sequence[str]


@dataclass(frozen=True)
class _Attempt:
    """Result for one gradient: the reconstructed image, the nearest own image, and the PSNR of both guesses.

    Attributes:
        score, baseline: PSNR of the reconstruction, and of the mean image.
    """

    label: str
    image: Image
    nearest: Image
    score: float
    baseline: float


def reconstruct_images(
    view: AdversaryView, task: Task, config: RunConfig, members: Mapping[str, AuditSample]
) -> ContactSheet | None:
    """Reconstruct images from the sites' gradients by the closed form.

    Returns None if the method sends no gradients, the task has no images, or the model has no position
    embedding.
    """
    if view.exchange.method.upload_kind != "gradients" or not isinstance(task, ImageClassification):
        return None
    names = [name for name, _ in task.base.model.named_parameters()]
    if not all(any(name.endswith(_plain(part)) for name in names) for part in (POSITION, PATCH_WEIGHT)):
        return None
    attempts: list[_Attempt] = []
    low, high = -1.0, 1.0
    for site in list(members)[:_SITES]:
        own = torch.stack([row.pixels() for row in members[site].rows]).double()
        low, high = min(low, float(own.min())), max(high, float(own.max()))
        attempts += _of_site(view, task, site, own, low, high)
    if not attempts:
        return None
    images = [image for attempt in attempts for image in (attempt.image, attempt.nearest)]
    labels = [text for attempt in attempts for text in (attempt.label, f"nearest, {attempt.score:.0f} dB")]
    return ContactSheet(
        contact_sheet(images, labels, low, high, 2 * _A_SITE), _notes(attempts, config.train.batch_size)
    )


def _of_site(
    view: AdversaryView, task: ImageClassification, site: str, own: torch.Tensor, low: float, high: float
) -> list[_Attempt]:
    """Attack the first gradients of one site; `own` has its images, shape (images, channels, height, width)."""
    model, attempts = task.base.model, []
    for upload, _ in zip(view.uploads(site), range(_A_SITE), strict=False):
        observation = observed_gradients.observe_upload(view.exchange.method, upload.payload, task.spec)
        values = {
            n: torch.where(observation.seen[n], observation.values[n], 0.0)
            if n in observation.values
            else torch.zeros(p.shape)
            for n, p in model.named_parameters()
        }
        image = direct_inversion(values, model, low, high)
        scores = [peak_signal_to_noise(image, one, high - low) for one in own]
        best = max(range(len(scores)), key=scores.__getitem__)
        guess = mean_image(own, without=best) if len(own) > 1 else torch.zeros_like(image)
        baseline = peak_signal_to_noise(guess, own[best], high - low)
        attempts.append(_Attempt(f"{site}, round {upload.round}", image, own[best], scores[best], baseline))
    return attempts


def _notes(attempts: Sequence[_Attempt], batch: int) -> list[str]:
    recovered = sum(attempt.score > _RECOVERED for attempt in attempts)
    best, baseline = max(a.score for a in attempts), max(a.baseline for a in attempts)
    notes = [
        f"Pictures reconstructed from the sites' gradients by the closed form: {recovered} of {len(attempts)} "
        f"recovered (above {_RECOVERED:g} dB of an image of the site; the best {best:.0f} dB, the mean image "
        f"{baseline:.0f} dB at best). Each gradient covers {batch} image{'s' if batch > 1 else ''}."
    ]
    if recovered < len(attempts):
        notes.append(
            "Where the closed form fails, pictures are NOT shown to be safe: it treats withheld entries as zeros and "
            "needs the gradient of one image. An adversary that matches the sent entries does better "
            "(`fedveil bench random_binary/adaptive`)."
        )
    return notes


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "")
