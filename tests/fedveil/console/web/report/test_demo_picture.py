"""The README's picture is what the demo's code draws of the figures beside it."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from fedveil.attacks.audit.delong import NormalEstimate, RunDifference
from fedveil.console import demo_settings
from fedveil.console.commands.getting_started import demo
from fedveil.console.web.report import demo_report, tradeoff, tradeoff_plot
from tests.conftest import ROOT

PICTURES = ROOT / "docs" / "pictures"


def arms() -> list[tradeoff.TradeoffRun]:
    """The arms of the committed run."""
    runs = []
    for row in json.loads((PICTURES / "demo.json").read_text()):
        given = row | {
            "sites": [tradeoff.AttackedSite(**site) for site in row["sites"]],
            "mean": NormalEstimate(**row["mean"]) if row["mean"] else None,
            "differences": [RunDifference(d["base"], NormalEstimate(**d["less"])) for d in row["differences"]],
        }
        runs.append(tradeoff.TradeoffRun(**given))
    return runs


def number_paths(svg: str) -> str:
    """The picture with its paths' ids by order: matplotlib derives them from digests that differ by numpy's version."""
    ids = dict.fromkeys(re.findall(r"trade-p[0-9a-f]{10}", svg))
    numbers = {each: f"path-{number}" for number, each in enumerate(ids)}
    return re.sub(r"trade-p[0-9a-f]{10}", lambda found: numbers[found[0]], svg)


def test_the_committed_picture_is_made_by_the_code():
    drawn = demo_report.report_single_run(tradeoff_plot.tradeoff_svg(arms()))
    assert number_paths((PICTURES / "demo.svg").read_text()) == number_paths(drawn)


def test_readme_gives_the_worst_site_of_each_run():
    text = (ROOT / "README.md").read_text().partition("At the worst site, an attacker picks ")[2].partition("\n")[0]
    plain, *others = arms()
    assert f"{plain.words} times in 100 with {plain.name} (a coin: 50)" in text
    for arm in others:
        assert f", {arm.words} with {arm.name}" in text
    assert text.count(" with ") == len(arms())


def test_the_committed_run_has_the_demos_arms_and_settings():
    names = [demo.DemoRun(*name.partition("+")[::2]).name for name in demo_settings.METHODS.split(",")]
    assert [arm.name for arm in arms()] == names
    assert all(arm.is_demo for arm in arms())


def test_a_picture_of_its_own_has_both_schemes_and_no_script():
    text = demo_report.report_single_run(tradeoff_plot.tradeoff_svg(arms()))
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme:dark" in text
    assert "<script" not in text
    assert root.attrib["aria-label"].startswith("What an attacker learns. How often an attacker picks")
