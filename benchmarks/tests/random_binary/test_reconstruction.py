"""Images reconstructed from gradients: closed forms, matching, and the verdict on a case."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from benchmarks.tests.random_binary.noise import VIT
from fedveil.attacks.reconstruction.image_metrics import peak_signal_to_noise
from fedveil.errors import ConfigError
from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.random_binary import reconstruction
from fedveil_bench.runner import BenchOptions


def reconstruct(*cases, **more):
    settings = {
        "data": "noise", "classes": 3, "seeds": 1, "images": 2, "mean_of": 6,
        "models": {"vit": VIT, "modified": {**VIT, "modified": True, "initializer_range": 0.2},
                   "small": {**VIT, "pixels": 4}},
        "matching": {"starts": 2, "iterations": 30, "tolerance": 1e-6, "entries": 3000}, "cases": list(cases), **more,
    }  # fmt: skip
    return reconstruction.of_seed(settings, 0, BenchOptions())


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
    assert [peak_signal_to_noise(f, t, 2) for f, t in zip(found, true, strict=True)] == [float("inf")] * 3


def judged(expect: str, values: Sequence[float], means: Sequence[float] = (11.0, 11.5, 10.5)) -> list[str]:
    def figure(each: Sequence[float]) -> ResampledMetric:
        return resampling.over_seeds([ResampledMetric(v, np.full(resampling.REPLICATES, v), 3) for v in each])

    figures = {"it": {"psnr": figure(values)}, "mean image, vit": {"psnr": figure(means)}}
    return reconstruction.list_verdicts([{"name": "it", "model": "vit", "expect": expect}], figures)


@pytest.mark.parametrize(
    ("expect", "value", "word"),
    [
        ("recovered", 65.0, "holds here."), ("recovered", 55.0, "does not hold here."),
        ("recovered", 61.0, "not decided."),
        ("fails", 5.0, "holds here."), ("fails", 17.0, "does not hold here."), ("fails", 10.8, "not decided."),
    ],
)  # fmt: skip
def test_a_case_is_judged_over_its_seeds(expect, value, word):
    said, how = judged(expect, (value - 1, value + 1, value))
    assert said.endswith(f": {word}")
    assert how.endswith("verdicts are corrected for 1 comparisons (Holm).")


def test_two_seeds_judge_no_case():
    said, how = judged("recovered", (100.0, 101.0), (11.0, 11.5))
    assert said.endswith("not decided.")
    assert "2 seeds are too few to decide" in how


@pytest.mark.parametrize(
    ("expect", "read", "word"),
    [
        ("read", 12, "holds here."), ("read", 1, "does not hold here."), ("read", 8, "not decided."),
        ("hidden", 0, "holds here."), ("hidden", 11, "does not hold here."), ("hidden", 4, "not decided."),
    ],
)  # fmt: skip
def test_a_search_succeeds_or_fails_as_a_whole(expect, read, word):
    """On a seed where one image of the batch is read, some of it is: half of them here, and of dB nothing is asked."""
    recovered = [0.5] * read + [0.0] * (12 - read)
    of_case = {
        metric: resampling.over_seeds([resampling.from_constant(v) for v in values])
        for metric, values in {"recovered": recovered, "psnr": [math.nan] * 12}.items()
    }
    cases = [{"name": "it", "model": "vit", "expect": expect, "share": 0.5}]
    said, _ = reconstruction.list_verdicts(cases, {"it": of_case})
    assert said.endswith(f": {word}")
    assert f"read on {read} of 12 seeds, in a share of {read / 12:.2f} [" in said


def test_another_expectation_is_refused():
    with pytest.raises(ConfigError, match="expect: expected recovered, fails, read or hidden, found lost"):
        judged("lost", (1.0, 2.0, 3.0))


def test_the_mean_image_leaves_out_the_images_of_every_seed(monkeypatch):
    """Also of those that the command line asks for beyond the preset's."""
    asked = {}

    def answered(module, settings, options):
        asked.update(settings)
        raise ConfigError("enough")

    monkeypatch.setattr(reconstruction.seeds, "run_seeds", answered)
    with pytest.raises(ConfigError, match="enough"):
        reconstruction.run_benchmark({"cases": [], "seeds": 2}, BenchOptions(seeds=5))
    assert asked["seeds"] == 5


def test_a_batch_has_its_images_where_a_seed_has_fewer(tmp_path):
    batch = case("matching", batch=2)
    settings = {
        "data": "noise", "classes": 3, "seeds": 2, "images": 1, "mean_of": 6, "models": {"vit": VIT}, "cases": [batch],
    }  # fmt: skip
    first, second = (reconstruction._Target(settings, batch, seed, tmp_path, BenchOptions()) for seed in (0, 1))
    assert (len(first.images), len(second.images), first.width) == (2, 2, 2)
    assert not any(torch.equal(mine, theirs) for mine in first.images for theirs in second.images)


def test_the_mean_image_leaves_out_the_images_of_seeds_that_are_counted_from_another(tmp_path):
    settings = {
        "data": "noise", "classes": 3, "seeds": 1, "first_seed": 1, "images": 2, "mean_of": 6, "models": {"vit": VIT},
        "cases": [case("matching")],
    }  # fmt: skip
    target = reconstruction._Target(settings, case("matching"), 1, tmp_path, BenchOptions())
    assert (len(target.images), len(target.others)) == (2, 6)
    assert not any(torch.equal(mine, other) for mine in target.images for other in target.others)


def test_a_case_with_seeds_has_the_first_so_many(monkeypatch, tmp_path):
    costly = {**case("direct"), "name": "costly", "seeds": 1}
    settings = {
        "data": "noise", "classes": 3, "seeds": 2, "first_seed": 1, "images": 1, "mean_of": 6, "models": {"vit": VIT},
        "cases": [case("direct"), costly],
    }  # fmt: skip
    monkeypatch.setattr(
        reconstruction.seeds,
        "run_seeds",
        lambda _, given, how: [reconstruction.of_seed(given, seed, how) for seed in (1, 2)],
    )
    rows = {row["name"]: row for row in reconstruction.run_benchmark(settings, BenchOptions()).rows}
    assert {name: len(row["metrics"]["read"]["seeds"]) for name, row in rows.items()} == {
        "mean image, vit": 2, case("direct")["name"]: 2, "costly": 1,
    }  # fmt: skip
