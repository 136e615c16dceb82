"""The README's picture is what the demo's code draws of the figures beside it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fedveil.attacks.audit.delong import SiteAveragedAuroc
from fedveil.attacks.audit.findings import AttackFinding
from fedveil.console.web.report import demo_report, tradeoff, tradeoff_plot
from tests.conftest import ROOT

PICTURES = ROOT / "docs" / "pictures"


def tuples(row: dict) -> dict:
    """Lists as the tuples that they were before they were JSON."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def arms() -> list[tradeoff.TradeoffRun]:
    """The arms of the committed run."""
    runs = []
    for row in json.loads((PICTURES / "demo.json").read_text()):
        finding = tuples(row["told"]) if row["told"] else None
        across = [SiteAveragedAuroc(**tuples(a)) for a in row["across"]]
        given = row | {
            "told": finding and AttackFinding(**finding),
            "lost": tuple(row["lost"]),
            "won": tuple(row["won"]),
        }
        given |= {"across": across}
        runs.append(tradeoff.TradeoffRun(**given))
    return runs


def test_the_committed_picture_is_made_by_the_code():
    assert (PICTURES / "demo.svg").read_text() == demo_report.report_single_run(tradeoff_plot.tradeoff_svg(arms()))


def test_readme_gives_the_figures_of_the_picture_and_names_the_worst_site_of_each_run():
    readme = (ROOT / "README.md").read_text()
    for arm in arms():
        assert arm.told is not None
        assert f"{arm.name} {arm.words} at a test loss of {arm.after:.2f}" in readme
        site = arm.told.model.removesuffix(", the sum")
        assert f"{arm.name} {site} {100 * arm.told.auroc[0]:.0f} %" in readme


def test_a_picture_of_its_own_has_both_schemes_and_no_script():
    text = demo_report.report_single_run(tradeoff_plot.tradeoff_svg(arms()))
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme:dark" in text
    assert "<script" not in text
    assert root.attrib["aria-label"].startswith("Benefit and cost of withholding. fedavg: test loss")


@pytest.mark.long
def test_an_orange_point_within_the_band_of_the_untrained_is_open_and_said():
    base, other, *_ = arms()
    assert base.told is not None
    assert other.told is not None
    finding = replace(other.told, auroc=(0.55, 0.51, 0.59), verdict="above")
    inside = replace(other, told=finding, across=(), lost=(0.42, 0.58), name="weak one")
    outside = replace(
        base, told=replace(base.told, verdict="above", auroc=(0.8, 0.7, 0.9)), across=(), lost=(0.42, 0.58)
    )
    caption, plain = (
        tradeoff_plot.tradeoff_caption([outside, inside]),
        tradeoff_plot.tradeoff_caption([outside, outside]),
    )
    assert "An open point's mean (weak one) is within the blue band: the attack scores as high on models" in caption
    assert "An open point" not in plain
    blue = replace(inside, told=replace(finding, verdict="contains"))
    assert "An open point" not in tradeoff_plot.tradeoff_caption([outside, blue])
    drawn, without = (tradeoff_plot.tradeoff_svg([outside, a]) for a in (inside, blue))
    assert drawn.count("stroke-dasharray") == without.count("stroke-dasharray") + 2  # its bar, and the legend's
    assert "above, within the band" in re.sub("<[^>]*>", "", drawn)
    assert "above, within the band" not in re.sub("<[^>]*>", "", without)
