"""Images rebuilt from gradients: closed forms, matching, and how a case is judged."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from fedveil.attacks.reconstruction.images import psnr
from fedveil.benchmarks.common import resampling
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.random_binary import reconstruction
from fedveil.benchmarks.run import Options
from tests.benchmarks.random_binary.noise import VIT


def reconstruct(*cases, **more):
    settings = {
        "data": "noise", "classes": 3, "seeds": 1, "images": 2, "mean_of": 6,
        "models": {"vit": VIT, "modified": {**VIT, "modified": True, "initializer_range": 0.2},
                   "small": {**VIT, "pixels": 4}},
        "matching": {"starts": 2, "iterations": 30, "tolerance": 1e-6, "entries": 3000}, "cases": list(cases), **more,
    }  # fmt: skip
    return reconstruction.of_seed(settings, 0, Options())


def case(attack, model="vit", rate=0.0, **more):
    method = {"name": "random_binary", "fields": f"rate = {rate}"}
    return {"name": "it", "model": model, "attack": attack, "method": method, **more}


def values(answer, name="it"):
    return answer["rows"][name]["values"]["psnr"]


def test_closed_forms_read_the_image_off_what_the_server_saw():
    assert min(values(reconstruct(case("direct")))) > 60
    assert min(values(reconstruct(case("april", "modified")))) > 60
    assert max(values(reconstruct(case("april")))) < 20
    assert max(values(reconstruct(case("direct", rate=0.5)))) < 20


def test_fixed_position_sends_nothing_for_the_closed_form():
    found = reconstruct(case("direct") | {"method": {"name": "fixed_position"}})
    assert max(values(found)) < 20
    assert found["rows"]["mean image, vit"]["values"]["psnr"] == pytest.approx(values(found), abs=6)


@pytest.mark.slow
def test_matching_with_a_known_enlargement_and_two_epochs():
    found = reconstruct(case("matching", "small", 0.5, rounds=2), images=1)
    assert min(values(found)) > 40
    plain, masked = (reconstruct(case("direct", rate=r), images=1)["rows"]["it"]["upload_bytes"] for r in (0.0, 0.8))
    assert masked < 0.3 * plain


def test_a_sheet_has_a_row_for_each_case():
    sheet = Pillow.open(io.BytesIO(base64.b64decode(reconstruct(case("direct"))["sheet"])))
    assert sheet.size == (204, 232)  # 2 images by 2 rows of 96 pixels with their labels


def test_images_of_a_batch_are_put_in_the_order_that_fits():
    true = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    found = reconstruction._in_order(true[[2, 0, 1]], true)
    assert [psnr(f, t, 2) for f, t in zip(found, true, strict=True)] == [float("inf")] * 3


@pytest.mark.parametrize(
    ("expect", "value", "held"),
    [("recovered", 61.0, True), ("recovered", 59.0, False), ("fails", 9.0, True), ("fails", 12.0, False)],
)
def test_a_case_is_judged_by_its_interval(expect, value, held):
    figures = {
        "it": {"psnr": Figure(value, np.full(resampling.REPLICATES, value), 3)},
        "mean image, vit": {"psnr": Figure(11.0, np.full(resampling.REPLICATES, 11.0), 3)},
    }
    said = reconstruction._verdict({"name": "it", "model": "vit", "expect": expect}, figures)
    assert said.endswith(": held." if held else "NOT HELD.")
