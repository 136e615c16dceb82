"""The README's picture is what the demo's code draws of the figures beside it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fedveil.attacks.findings import Finding
from fedveil.attacks.paired import Across
from fedveil.console.report import gained, trade, trade_picture
from tests.conftest import ROOT

PICTURES = ROOT / "docs" / "pictures"


def tuples(row: dict) -> dict:
    """Lists as the tuples that they were before they were JSON."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def arms() -> list[trade.Arm]:
    """The arms of the committed run."""
    found = []
    for row in json.loads((PICTURES / "demo.json").read_text()):
        told = tuples(row["told"]) if row["told"] else None
        across = [Across(**tuples(a)) for a in row["across"]]
        given = row | {"told": told and Finding(**told), "lost": tuple(row["lost"]), "won": tuple(row["won"])}
        given |= {"across": across}
        found.append(trade.Arm(**given))
    return found


def test_the_committed_picture_is_made_by_the_code():
    assert (PICTURES / "demo.svg").read_text() == gained.alone(trade_picture.svg(arms()))


def test_the_readme_tells_its_figures_to_who_cannot_see_it():
    readme = (ROOT / "README.md").read_text()
    for arm in arms():
        assert arm.told is not None
        assert f"{arm.name} {arm.words} at a test loss of {arm.after:.2f}" in readme


def test_a_picture_of_its_own_has_both_schemes_and_no_script():
    text = gained.alone(trade_picture.svg(arms()))
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme:dark" in text
    assert "<script" not in text
    assert root.attrib["aria-label"].startswith("What was gained. fedavg: test loss")


@pytest.mark.long
def test_an_orange_point_within_the_band_of_the_untrained_is_open_and_said():
    base, other, *_ = arms()
    assert base.told is not None
    assert other.told is not None
    told = replace(other.told, auroc=(0.55, 0.51, 0.59), verdict="above")
    inside = replace(other, told=told, across=(), lost=(0.42, 0.58), name="weak one")
    outside = replace(
        base, told=replace(base.told, verdict="above", auroc=(0.8, 0.7, 0.9)), across=(), lost=(0.42, 0.58)
    )
    said, plain = trade_picture.caption([outside, inside]), trade_picture.caption([outside, outside])
    assert "The mean of an open one (weak one) lies within the blue band: as much is found where there" in said
    assert "an open one" not in plain
    blue = replace(inside, told=replace(told, verdict="contains"))
    assert "an open one" not in trade_picture.caption([outside, blue])
    drawn, without = (trade_picture.svg([outside, a]) for a in (inside, blue))
    assert drawn.count("stroke-dasharray") == without.count("stroke-dasharray") + 2  # its bar, and the legend's
    assert "told, within the band" in re.sub("<[^>]*>", "", drawn)
    assert "told, within the band" not in re.sub("<[^>]*>", "", without)
