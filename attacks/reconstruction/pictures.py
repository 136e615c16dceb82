"""Pictures that an adversary reads off a run's gradients: `fedveil audit` tries it, the report shows it.

The closed form of attacks/direct_inversion.py on each site's first gradients, as the server saw them. It is exact for a
gradient of one image that is sent whole; beside each result stands the nearest of the site's own images, and what the mean of
all images would have been worth.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.console.report.page import Html

if TYPE_CHECKING:
    from fedveil.attacks.audit import Sample
    from fedveil.attacks.base import View
    from fedveil.config import RunConfig
    from fedveil.contract.task import Task

FILE = "reconstructed.png"
_A_SITE = 2  # gradients of each site that are tried
_SITES = 4
_RECOVERED = 30.0  # dB


def reconstructed(
    view: View, task: Task, config: RunConfig, members: Mapping[str, Sample]
) -> tuple[bytes, list[str]] | None:
    """A sheet of attempts and what they say; None for a run that sends no gradients of images with a position embedding."""
    import torch

    from fedveil.attacks.reconstruction import gradients
    from fedveil.attacks.reconstruction.april import PATCH_WEIGHT, POSITION
    from fedveil.attacks.reconstruction.direct_inversion import direct_inversion
    from fedveil.attacks.reconstruction.images import contact_sheet, mean_image, psnr
    from fedveil.tasks.image_classification import ImageClassification

    if view.exchange.method.sends != "gradients" or not isinstance(task, ImageClassification):
        return None
    model = task.base.model
    shapes = {n: p.shape for n, p in model.named_parameters()}
    if not all(any(n.endswith(part) for n in shapes) for part in (_plain(POSITION), _plain(PATCH_WEIGHT))):
        return None
    sheet: list[tuple[Any, str]] = []
    near: list[float] = []
    baselines: list[float] = []
    low, high = -1.0, 1.0
    for site in list(members)[:_SITES]:
        own = torch.stack([row.pixels() for row in members[site].rows]).double()
        low, high = min(low, float(own.min())), max(high, float(own.max()))
        for upload, _ in zip(view.uploads(site), range(_A_SITE), strict=False):
            shown = gradients.observed(view.exchange.method, upload.payload, task.spec)
            values = {
                n: torch.where(shown.seen[n], shown.values[n], 0.0) if n in shown.values else torch.zeros(shape)
                for n, shape in shapes.items()
            }
            image = direct_inversion(values, model, low, high)
            scores = [psnr(image, one, high - low) for one in own]
            best = max(range(len(scores)), key=scores.__getitem__)
            near.append(scores[best])
            guess = mean_image(own, without=best) if len(own) > 1 else torch.zeros_like(image)
            baselines.append(psnr(guess, own[best], high - low))
            sheet += [(image, f"{site}, round {upload.round}"), (own[best], f"nearest, {scores[best]:.0f} dB")]
    if not sheet:
        return None
    recovered = sum(score > _RECOVERED for score in near)
    batch = config.train.batch_size
    said = (
        f"Pictures read off the sites' gradients by the closed form: {recovered} of {len(near)} recovered (above "
        f"{_RECOVERED:g} dB of an image of the site; the best {max(near):.0f} dB, the mean image {max(baselines):.0f} dB at best). "
        f"Gradients were of {batch} image{'s' if batch > 1 else ''}."
    )
    images, labels = zip(*sheet, strict=True)
    notes = [said]
    if recovered < len(near):
        notes.append(
            "Where the closed form fails, pictures are NOT shown to be safe: it takes withheld entries for zeros and needs a "
            "gradient of one image. An adversary who matches the entries that were sent does better (`fedveil bench "
            "random_binary/adaptive`)."
        )
    return contact_sheet(images, labels, low, high, 2 * _A_SITE), notes


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "")


def html(run: Path) -> Html | None:
    """The sheet inside a page; None where there is none."""
    file = run / FILE
    if not file.is_file():
        return None
    source = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    caption = "What the server can read off single gradients; on the right the nearest image of the site."
    return Html(f'<figure><img alt="" src="{source}"><figcaption>{escape(caption)}</figcaption></figure>')
