"""One federation: its curve, its counts by Eq. 13, and the starting point of its bases."""

from __future__ import annotations

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.tests.random_binary.noise import VIT
from benchmarks.tests.random_binary.small import METHODS, section, settings
from fedveil.errors import ConfigError
from fedveil_bench.random_binary import accuracy, federation
from fedveil_bench.runner import BenchOptions

BASES = {
    "scratch": {"seeds": 1, "members": 8},
    "pre-trained": {"seeds": 1, "members": 8, "public": 4},
    "position": {"seeds": 1, "members": 8, "marked": True},
}


@pytest.fixture
def begun():
    of, vit = settings(bases=BASES), section()
    return {base: federation.prepare_start(of, vit, base, 0, BenchOptions(device="cpu")) for base in BASES}, of, vit


def test_bases_differ_as_they_say(begun):
    starts, _, _ = begun
    scratch, trained, blind = (starts[base].weights for base in BASES)
    assert all(len(start.clients) == 2 and len(start.test) == 12 for start in starts.values())
    assert {len(rows) for start in starts.values() for rows in start.clients.values()} == {4}
    same = {n for n in scratch if torch.equal(scratch[n], blind[n])}
    assert set(scratch) - same == {n for n in scratch if "position_embeddings" in n}
    assert not any(w.any() for n, w in blind.items() if n not in same)
    assert not any(torch.equal(scratch[n], trained[n]) for n in scratch if "weight" in n)
    assert [row.label for row in starts["position"].test] != [row.label for row in starts["scratch"].test]


def test_pre_training_leaves_no_head():
    trained, other = ({n: torch.full((2,), v) for n in ("classifier.weight", "vit.x")} for v in (1.0, 2.0))
    assert {n: float(w[0]) for n, w in federation._new_head(trained, other).items()} == {
        "classifier.weight": 2.0, "vit.x": 1.0,
    }  # fmt: skip


def saved(at, **more):
    """A folder with a ViT and its weights; returns them."""
    torch.manual_seed(5)
    model = ViTForImageClassification(ViTConfig(**VIT | more, num_labels=7))
    model.save_pretrained(at)
    return dict(model.named_parameters())


def test_a_base_may_start_from_a_folder_of_weights_under_a_head_of_its_own(tmp_path):
    """That model has seven classes, and the table three."""
    trained = saved(tmp_path / "trained-vit")
    named = {"seeds": 1, "members": 8, "methods": ["random"], "task.model": "trained-vit"}
    of = settings(bases={"named": named, "scratch": {"seeds": 1, "members": 8, "methods": ["random"]}})
    assert [need.name for need in accuracy.list_requirements(of)] == ["noise", "trained-vit"]
    found, scratch = (
        federation.prepare_start(of, section(), base, 0, BenchOptions(device="cpu")).weights for base in of["bases"]
    )
    assert found.keys() == scratch.keys() == trained.keys()
    for name, w in found.items():
        assert torch.equal(w, (scratch if name.startswith("classifier.") else trained)[name]), name
    row = federation.run_row(
        of,
        section(),
        METHODS["random"],
        federation.prepare_start(of, section(), "named", 0, BenchOptions()),
        0,
        BenchOptions(),
    )
    assert len(row["curve"]) == 3


def test_a_folder_with_another_model_is_refused(tmp_path):
    saved(tmp_path / "trained-vit", num_hidden_layers=3)
    of = settings(bases={"named": {"seeds": 1, "members": 8, "methods": [], "task.model": "trained-vit"}})
    with pytest.raises(
        ConfigError, match=r"task.model trained-vit: expected the model of the preset, vit\..+ found \("
    ):
        federation.prepare_start(of, section(), "named", 0, BenchOptions(device="cpu"))


@pytest.mark.long
def test_a_row_has_a_point_an_epoch_and_counts_by_the_law(begun):
    starts, of, vit = begun
    for name, others in {"random": "locked", "locked": "random"}.items():
        found = federation.run_row(of, vit, METHODS[name], starts["scratch"], 0, BenchOptions(device="cpu"))
        assert len(found["curve"]) == 3
        right = federation.unpack_correct(found["right"], 12)
        assert sum(right) / 12 == pytest.approx(found["curve"][-1], abs=1e-3)
        assert sum(found["counts"]) == pytest.approx(1)
        assert accuracy._distance(found["counts"], accuracy._law(of, name)) < 0.03
        assert accuracy._distance(found["counts"], accuracy._law(of, others)) > 0.2


def test_of_a_fixed_position_nothing_moves(begun):
    starts, of, vit = begun
    found = federation.run_row(of, vit, METHODS["fixed"], starts["scratch"], 0, BenchOptions(device="cpu"))
    tensors = starts["scratch"].weights
    hidden = sum(w.numel() for n, w in tensors.items() if "position_embeddings" in n)
    assert found["counts"][0] == pytest.approx(hidden / sum(w.numel() for w in tensors.values()), abs=1e-4)


def test_bits_come_back_in_order():
    import base64

    import numpy as np

    right = [True, False, False, True, True, False, True, False, True, False]
    packed = base64.b64encode(np.packbits(right).tobytes()).decode()
    assert federation.unpack_correct(packed, 10) == [100.0 * bit for bit in right]


def test_too_few_pictures_are_named():
    asked = settings(bases={"scratch": {"seeds": 1, "members": 13}})
    with pytest.raises(ConfigError, match="expected 13 rows, found 12"):
        federation.prepare_start(asked, section(), "scratch", 0, BenchOptions(device="cpu"))
