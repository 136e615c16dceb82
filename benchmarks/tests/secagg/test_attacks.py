"""The preset's runner: attacks that succeed in the clear fail under masks, succeed without masks, and are judged so."""

from __future__ import annotations

import base64
import io
import tomllib

import numpy as np
import pytest
from PIL import Image as Pillow

from benchmarks.tests.random_binary.noise import write
from fedveil_bench import folders
from fedveil_bench.common import resampling, verdicts
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.runner import BenchOptions
from fedveil_bench.secagg import attacks, on_pictures, on_texts
from fedveil_bench.secagg.paired_federations import HIDDEN, SEEN, UNHIDDEN

PRESET = tomllib.loads((folders.presets_folder() / "secure/attacks.toml").read_text())["settings"]
TEXTS = {**PRESET["texts"], "rows": 5, "held_out": 8}
PICTURES = {
    **PRESET["pictures"], "data": "noise", "classes": 3, "mean_of": 6, "most_seeds": 1,
    "model": {**PRESET["pictures"]["model"], "image_size": 4},
    "matching": {**PRESET["pictures"]["matching"], "iterations": 15},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("same_masks")
def test_membership_shows_where_no_mask_is_left_and_nowhere_else():
    found = on_texts.measure_alignment(TEXTS, 0, BenchOptions())
    assert set(found) == {*SEEN, on_texts.WRONG}
    for attack in ("alignment", "calibrated"):
        area = {name: figures[attack].value for name, figures in found.items()}
        assert area["clear"] > 0.9
        assert area["every mask off"] == pytest.approx(area["clear"], abs=0.01)
        assert area["lying server, undefended"] > 0.9
        assert max(area[name] for name in (*HIDDEN, on_texts.WRONG)) < 0.75
        assert 0.5 < area["sum"] <= area["clear"]


@pytest.mark.slow
@pytest.mark.usefixtures("same_masks")
def test_pictures_come_back_where_no_mask_is_left_and_nowhere_else(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    found, shown = on_pictures.measure_psnr(PICTURES, 0, BenchOptions())
    assert set(found) == {*SEEN, on_pictures.MEAN}
    for attack in ("direct inversion", "gradient matching"):
        psnr = {name: np.mean(of_row[attack]) for name, of_row in found.items()}
        assert min(psnr[name] for name in UNHIDDEN) > 60
        assert max(psnr[name] for name in HIDDEN) < psnr[on_pictures.MEAN]
        assert psnr["sum"] < 20 if attack == "direct inversion" else psnr["sum"] > 60  # of 4 x 4 pixels it gives all
    assert len(shown) == 2 + 2 * len(SEEN)
    assert {len(images) for images in shown.values()} == {3}


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.52, 0.7, "won"), (0.45, 0.58, "lost"), (0.3, 0.4, "lost"), (0.45, 0.62, "not decided")],
)
def test_a_figure_is_judged_by_its_interval(low, high, verdict):
    said_ = attacks.judge_attack(between(low, high), resampling.from_constant(0.5), 0.1)
    assert verdicts.decide_words([said_]) == [verdict]


def between(low: float, high: float) -> ResampledMetric:
    """A figure whose interval is that."""
    replicates = np.linspace(low, high, resampling.REPLICATES)
    inner = np.quantile(replicates, (0.025, 0.975))
    scaled = low + (replicates - inner[0]) * (high - low) / (inner[1] - inner[0])
    return ResampledMetric(float(scaled.mean()), scaled, 30)


def said(**changed: ResampledMetric) -> list[str]:
    """The verdicts where all is as it should be but for what is `changed`."""
    won, lost = between(0.9, 0.95), between(0.45, 0.55)
    figures = {name: lost if name in HIDDEN else won for name in SEEN} | {on_texts.WRONG: lost}
    figures |= {name.replace("_", " "): figure for name, figure in changed.items()}
    return attacks.list_verdicts({"alignment": figures}, PRESET)


def test_verdicts_say_what_hides_what_shows_and_what_stays():
    first, *hidden, last = said()
    assert first.endswith(": they stand.")
    assert [text.split(": ")[-1] for text in hidden] == ["at its lost control."] * len(HIDDEN)
    assert last == "alignment, the sum: 0.925 [0.900, 0.950]: won: this stays."
    assert said(as_seen=between(0.55, 0.7))[1].endswith("WON: something shows.")
    assert said(own_mask_off=between(0.4, 0.8))[2].endswith("not decided.")


@pytest.mark.parametrize("name", ["clear", "every_mask_off", "lying_server,_undefended"])
@pytest.mark.parametrize(
    ("low", "high", "stand"), [(0.45, 0.55, "NOT HELD"), (0.55, 0.65, "not decided"), (0.7, 0.8, "they stand")]
)
def test_an_attack_says_something_where_it_wins_beyond_the_margin(name, low, high, stand):
    assert f": {stand}" in said(**{name: between(low, high)})[0]


@pytest.mark.parametrize(
    ("low", "high", "stand"), [(0.65, 0.7, "NOT HELD"), (0.45, 0.62, "not decided"), (0.3, 0.4, "they stand")]
)
def test_a_wrong_site_that_is_won_is_no_lost_control(low, high, stand):
    figures = {name: between(0.9, 0.95) for name in SEEN} | {on_texts.WRONG: between(low, high)}
    assert f": {stand}" in attacks.list_verdicts({"alignment": figures}, PRESET)[0]


def test_pictures_are_won_beside_the_mean_picture():
    mean = between(11.0, 12.0)
    for clear, stand in ((between(60.0, 70.0), "they stand"), (between(11.0, 12.0), "NOT HELD")):
        figures = {name: between(60.0, 70.0) for name in SEEN} | {"clear": clear, on_pictures.MEAN: mean}
        assert f"mean picture 11.5 [11.0, 12.0] dB: {stand}" in attacks.list_verdicts({"direct": figures}, PRESET)[0]


def test_controls_of_all_attacks_are_corrected_together():
    """Each attack's alone stand."""
    near = {name: between(0.63, 0.77) for name in SEEN} | {on_texts.WRONG: between(0.43, 0.57)}
    assert "they stand" in attacks.list_verdicts({"a": near}, PRESET)[0]
    together = attacks.list_verdicts({f"a{i}": near for i in range(9)}, PRESET)
    assert all("not decided" in each for each in together if "controls" in each)


def test_a_result_has_a_row_for_each_view_and_a_sheet(monkeypatch):
    lost = resampling.from_constant(0.5, 9)
    texts = {name: {"alignment": lost.to_json()} for name in (*SEEN, on_texts.WRONG)}
    pictures = {name: {"direct inversion": [9.0, 12.0]} for name in (*SEEN, on_pictures.MEAN)}
    answer = {"texts": texts, "pictures": pictures, "sheet": base64.b64encode(b"png").decode()}
    monkeypatch.setattr(attacks.seeds, "run_seeds", lambda *_: [answer, answer])
    settings = {**PRESET, "pictures": dict(PRESET["pictures"])}
    outcome = attacks.run_benchmark(settings, BenchOptions(seeds=2))
    assert settings["pictures"]["most_seeds"] == 2
    assert [row["name"] for row in outcome.rows] == [*SEEN, on_texts.WRONG, on_pictures.MEAN]
    assert outcome.rows[0]["metrics"]["direct inversion"]["n"] == 4
    assert set(outcome.rows[-1]["metrics"]) == {"direct inversion"}
    assert set(outcome.rows[-2]["metrics"]) == {"alignment"}
    assert len(outcome.verdicts) == 2 * (1 + len(HIDDEN) + 1)
    assert outcome.files == {"png": b"png"}


@pytest.mark.long
def test_a_seed_answers_with_a_sheet_to_look_at(monkeypatch, tmp_path):
    write(tmp_path)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    figures = {"clear": {"alignment": resampling.from_constant(0.5)}}
    monkeypatch.setattr(attacks.on_texts, "measure_alignment", lambda *_: figures)
    quick = {**PICTURES, "matching": {**PICTURES["matching"], "iterations": 1}}
    answer = attacks.of_seed({"texts": {}, "pictures": quick}, 0, BenchOptions())
    sheet = Pillow.open(io.BytesIO(base64.b64decode(answer["sheet"])))
    assert sheet.size == (304, 4 + 114 * (2 + 2 * len(SEEN)))
