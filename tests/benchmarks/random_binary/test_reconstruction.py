"""The runners of the random binary presets on pictures of noise: closed forms, matching, accuracy, counts of Eq. 13."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as Pillow

from fedveil.attacks.reconstruction.images import psnr
from fedveil.benchmarks.common import resampling
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.random_binary import accuracy, mask_cost, reconstruction
from fedveil.benchmarks.run import Options

VIT = {"image_size": 8, "patch_size": 2, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Twelve pictures of noise of 8 x 8 in a data folder."""
    rng = np.random.default_rng(57721)
    made = [Pillow.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(12)]
    rows = [{"image": picture, "label": i % 3} for i, picture in enumerate(made)]
    folder = tmp_path / "data" / "noise"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        table = Dataset.from_list(rows, features=Features({"image": Image(), "label": Value("int64")}))
        table.to_parquet(str(folder / f"{split}.parquet"))
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "data"))


def reconstruct(*cases, **more):
    settings = {
        "data": "noise", "classes": 3, "seeds": 1, "images": 2, "mean_of": 6,
        "models": {"vit": VIT, "modified": {**VIT, "modified": True, "initializer_range": 0.2}, "small": {**VIT, "pixels": 4}},
        "matching": {"starts": 2, "iterations": 30, "tolerance": 1e-6, "entries": 3000}, "cases": list(cases), **more,
    }  # fmt: skip
    return reconstruction.of_seed(settings, 0, Options())


def case(attack, model="vit", rate=0.0, **more):
    method = {"name": "random_binary", "fields": f"rate = {rate}"}
    return {"name": "it", "model": model, "attack": attack, "method": method, **more}


def values(answer, name="it"):
    return answer["rows"][name]["values"]["psnr"]


def test_closed_forms_read_the_image_off_what_the_server_saw(pictures):
    assert min(values(reconstruct(case("direct")))) > 60
    assert min(values(reconstruct(case("april", "modified")))) > 60
    assert max(values(reconstruct(case("april")))) < 20
    assert max(values(reconstruct(case("direct", rate=0.5)))) < 20


def test_fixed_position_sends_nothing_for_the_closed_form(pictures):
    found = reconstruct(case("direct") | {"method": {"name": "fixed_position"}})
    assert max(values(found)) < 20
    assert found["rows"]["mean image, vit"]["values"]["psnr"] == pytest.approx(values(found), abs=6)


def test_matching_with_a_known_enlargement_and_two_epochs(pictures):
    found = reconstruct(case("matching", "small", 0.5, rounds=2), images=1)
    assert min(values(found)) > 40
    plain, masked = (reconstruct(case("direct", rate=r), images=1)["rows"]["it"]["upload_bytes"] for r in (0.0, 0.8))
    assert masked < 0.3 * plain


def test_a_sheet_has_a_row_for_each_case(pictures):
    import base64
    import io

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


def federate(methods, **more):
    settings = {
        "data": "noise", "classes": 3, "clients": 2, "epochs": 2, "public": 4, "members": 8, "test_rows": 12, "seeds": 1,
        "bases": ["pre-trained", "scratch"], "fields": "optimiser = 'adam'\nlearning_rate = 1e-2\n", "model": VIT,
        "config": {"train.batch-size": 2, "train.epochs": 2}, "methods": methods, **more,
    }  # fmt: skip
    return accuracy.of_seed(settings, 0, Options())


def test_accuracy_and_counts_of_a_small_federation(pictures):
    random, locked = (
        {"name": "random_binary", "fields": f"rate = 0.8\n{p}", "rate": 0.8} for p in ("", "mask_period = 'never'")
    )
    found = federate({"random": random, "locked": locked, "fixed": {"name": "fixed_position"}})
    assert list(found) == [
        f"{base}, {row}" for base in ("pre-trained", "scratch") for row in ("epoch 0", "random", "locked", "fixed")
    ]
    assert [len(epoch) for epoch in found["scratch, random"]["right"]] == [12, 12, 12]
    assert found["pre-trained, random"]["right"] != found["scratch, random"]["right"]
    for name in ("random", "locked"):
        row = found[f"scratch, {name}"]
        assert row["expected"] == pytest.approx(1 - 0.8**2)
        assert row["entries moved"] == pytest.approx(row["expected"], abs=0.03)
        assert row["count distance"] < 0.03
    assert "expected" not in found["scratch, fixed"]


def test_count_distance_tells_the_two_laws_apart():
    generator = torch.Generator().manual_seed(0)
    often = {"w": torch.rand(4, 20_000, generator=generator).gt(0.3).sum(0).float()}
    assert accuracy._counted(often, 4, 0.3, locked=False)["count distance"] < 0.02
    assert accuracy._counted(often, 4, 0.3, locked=True)["count distance"] > 0.6


def test_pre_training_leaves_no_head():
    trained, other = ({n: torch.full((2,), v) for n in ("classifier.weight", "vit.x")} for v in (1.0, 2.0))
    assert {n: float(w[0]) for n, w in accuracy._new_head(trained, other).items()} == {
        "classifier.weight": 2.0, "vit.x": 1.0,
    }  # fmt: skip


def test_masking_measures_each_step():
    found = mask_cost.of_seed({"entries": 100_000, "rates": [0.5], "repeats": 2}, 0, Options())
    assert set(found) == {"R = 0.5", "copy"}
    assert {len(v) for v in found["R = 0.5"].values()} == {2}
    assert set(found["R = 0.5"]) == {"GB/s", "cpu seconds", "draw seconds", "pack seconds", "unpack seconds"}


@pytest.mark.parametrize("name", ["april", "adaptive"])
def test_cases_of_the_presets_have_a_model_and_a_name_of_their_own(name):
    preset = Path(reconstruction.__file__).parents[1] / "presets" / "random_binary" / f"{name}.toml"
    settings = tomllib.loads(preset.read_text())
    cases = settings["settings"]["cases"]
    assert len({c["name"] for c in cases}) == len(cases)
    assert {c["model"] for c in cases} <= set(settings["settings"]["models"])
    assert set(settings["quick"].get("skip", [])) <= {c["name"] for c in cases}
