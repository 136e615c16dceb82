"""docs/deploy/monitoring.md: it lists what the code exports, and nothing else."""

from __future__ import annotations

import re

from fedveil.console.web.metrics import METRICS
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "deploy" / "monitoring.md"
_ROW = re.compile(r"^\| `(fedveil_\w+)` \| (.*) \| (.*) \|$", re.MULTILINE)


def test_the_page_lists_each_metric_once_with_its_labels_and_meaning():
    rows = _ROW.findall(PAGE.read_text())
    assert len({name for name, *_ in rows}) == len(rows)
    listed = {name: (tuple(re.findall(r"`(\w+)`", labels)), help_text) for name, labels, help_text in rows}
    assert listed == {name: (about.labels, about.help) for name, about in METRICS.items()}


def test_the_page_names_no_metric_that_does_not_exist():
    assert set(re.findall(r"fedveil_\w+", PAGE.read_text())) <= set(METRICS)
