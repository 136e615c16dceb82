"""The report of three runs on a phone, in a real browser: `pytest -m browser`, as in test_browser.py."""

from __future__ import annotations

import json

import pytest

from fedveil.console.runs import sample_texts
from fedveil.console.runs.run_reader import load_run
from fedveil.console.web.report import run_page
from tests.fedveil.console.web.report.test_tradeoff import made_arms  # noqa: F401  # a fixture
from tests.fedveil.console.web.test_browser import chromium, page  # noqa: F401  # fixtures

pytestmark = pytest.mark.browser
OPEN_DETAILS = "[...document.querySelectorAll('details')].forEach((one) => { one.open = true; })"
HEIGHT = "document.documentElement.scrollHeight"


def test_three_runs_are_at_most_6000_pixels_high_on_a_phone_and_nothing_is_lost(page, made_arms, tmp_path):  # noqa: F811
    made_arms()
    folders = [tmp_path / "demo-0" / name for name in ("fedavg", "fedavg-secure", "fedavg-dp")]
    for folder in folders:
        texts = [dict.fromkeys(("prompt", "before", "after", "wanted"), "a word " * 40)] * 8
        (folder / sample_texts.FILE).write_text(json.dumps(texts))
    file = tmp_path / "report.html"
    file.write_text(run_page.run_page_html([load_run(folder) for folder in folders]))
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(file.as_uri())
    assert page.evaluate(HEIGHT) <= 6000
    for link in page.locator(".contents a").all():
        link.click()
        assert page.evaluate("document.querySelector(location.hash).getBoundingClientRect().top") < 844
    page.evaluate(OPEN_DETAILS)
    assert page.evaluate(HEIGHT) > 10_000
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
