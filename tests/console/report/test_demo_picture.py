"""The README's picture is what the demo's code draws of the figures beside it."""

from __future__ import annotations

import json
from xml.etree import ElementTree

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
