"""The forest plot, from findings by hand."""

from __future__ import annotations

import re

from fedveil.console.web.report import forest_plot
from tests.fedveil.console.web.report.made import controlled, found


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_the_strongest_come_first_attack_by_attack_and_unusable_ones_last():
    rows = [found("a", 0.6, "above"), found("b", 0.9, "above"), found("c", 0.95, "above", "loss")]
    rows += [found("d", 0.7, "above", "calibrated")]
    given = [*controlled(*rows), *controlled(attack="calibrated"), *controlled(attack="loss", lost="above")]
    assert [(f.attack, f.model) for f in forest_plot.forest_rows(given)] == [
        ("alignment", "b"), ("alignment", "a"), ("calibrated", "d"), ("loss", "c"),
    ]  # fmt: skip


def test_rows_are_capped_and_the_caption_says_how_many_there_are():
    given = controlled(*(found(f"site-{i}", i / 100, "contains") for i in range(50)))
    assert [f.model for f in forest_plot.forest_rows(given, 3)] == ["site-49", "site-48", "site-47"]
    assert "The plot shows the 3 strongest of 50 findings; the table has all." in forest_plot.forest_caption(given, 3)
    assert "The plot shows" not in forest_plot.forest_caption(given, 50)
    svg_texts = texts(forest_plot.forest_svg(given, "r", 3))
    assert "site-49" in svg_texts
    assert "site-46" not in svg_texts


def test_controls_are_bands_and_no_rows():
    svg = forest_plot.forest_svg(controlled(found("site-0", 0.8, "above")), "r")
    assert "overfitted FedAvg" not in texts(svg)
    # Blue where the attack must lose, orange where it must win: a patch of each.
    assert len(re.findall('fill="#3a8fd9" opacity="0.3"', svg)) == 1
    assert len(re.findall('fill="#d55e00" opacity="0.6"', svg)) == 1


def test_an_attack_whose_control_fails_is_said_to_be_unusable():
    svg = forest_plot.forest_svg(controlled(found("site-0", 0.8, "above"), won="contains"), "r")
    assert "alignment: NOT usable here" in texts(svg)
    assert "Not decided: no attack whose controls hold was tried on the run." in svg


def test_names_of_others_are_text():
    svg = forest_plot.forest_svg(controlled(found('<b onload="x">$\\frac', 0.8, "above")), "r")
    assert "<b " not in svg
    assert "&lt;b onload=" in svg


def test_it_has_a_text_alternative_and_no_colour_of_its_own_for_text():
    svg = forest_plot.forest_svg(controlled(found("site-0", 0.8, "above")), "r")
    assert svg.startswith(
        '<svg role="img" aria-label="Forest plot of AUROC by attack and model. Membership shows in 1 of'
    )
    assert "alignment, site-0: 0.80 [0.75, 0.85]" in svg
    assert "currentColor" in svg


def test_without_a_finding_about_the_run_there_is_no_plot():
    assert forest_plot.forest_svg(controlled(), "r") == ""


def test_four_looks_tell_shown_undecided_not_told_apart_and_void():
    shown, undecided, apart = found("a", 0.8, "above"), found("b", 0.6, "contains"), found("c", 0.5, "contains")
    looks = [forest_plot._look(f, True) for f in (shown, undecided, apart)] + [forest_plot._look(shown, False)]
    assert len(set(looks)) == 4
    assert undecided.auroc[1] > 0.5
    assert looks[1][2] == "none"  # hollow
    caption = forest_plot.forest_caption(controlled(shown, undecided, apart))
    for words in ("hollow dot whose interval is above 0.5 is undecided", "which does not prove safety"):
        assert words in caption


def test_controls_that_overlap_are_named():
    far = controlled(found("a", 0.8, "above"))
    near = [*far[1:], found("overfitted FedAvg", 0.6, "above", half=0.06)]
    assert "bands overlap" not in forest_plot.forest_caption(far)
    assert "Where the bands overlap (alignment)" in forest_plot.forest_caption(near)
