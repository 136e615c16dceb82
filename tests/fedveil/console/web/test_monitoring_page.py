"""docs/deploy/monitoring.md, its Grafana dashboard and its alert rules: they name what the code exports alone."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from fedveil.console.web import server_metrics, site_metrics
from fedveil.console.web.metrics import METRICS
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "deploy" / "monitoring.md"
FOLDER = ROOT / "docs" / "deploy" / "monitoring"
_ROW = re.compile(r"^\| `(fedveil_\w+)` \| (.*) \| (.*) \|$", re.MULTILINE)


def test_the_page_lists_each_metric_once_with_its_labels_and_meaning():
    rows = _ROW.findall(PAGE.read_text())
    assert len({name for name, *_ in rows}) == len(rows)
    listed = {name: (tuple(re.findall(r"`(\w+)`", labels)), help_text) for name, labels, help_text in rows}
    assert listed == {name: (about.labels, about.help) for name, about in METRICS.items()}


def test_the_page_names_no_metric_that_does_not_exist():
    assert set(re.findall(r"fedveil_\w+", PAGE.read_text())) <= set(METRICS)


def queried(expression: str) -> list[tuple[str, set[str]]]:
    """The metrics of a PromQL expression, each with the labels that it selects by."""
    found = re.findall(r"\b([a-z_]{4,})(?:\{([^}]*)\})?(?![\w(])", re.sub(r'"[^"]*"', '""', expression))
    return [(name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected))) for name, selected in found]


def require_exported(expression: str, shown: str) -> set[str]:
    """Hold each metric of an expression, and each label that it or its text names, against what the code exports."""
    names = set()
    for name, labels in queried(expression):
        assert name in METRICS, expression
        assert labels <= set(METRICS[name].labels), expression
        names.add(name)
    assert len(names) == 1, expression
    labels = {label for name in names for label in METRICS[name].labels} | {"instance"}
    assert set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", shown)) <= labels, shown
    return names


def test_the_grafana_dashboard_queries_what_the_code_exports():
    board = json.loads((FOLDER / "grafana.json").read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    shown = {name for target in targets for name in require_exported(target["expr"], target["legendFormat"])}
    assert len(shown) >= 15
    (variable,) = (one for one in board["templating"]["list"] if one["type"] == "query")
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
    assert label in METRICS[name].labels
    places = [tuple(panel["gridPos"].values())[:2] for panel in board["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_alert_rules_query_what_the_code_exports():
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 14
    for rule in rules:
        summary = rule["annotations"]["summary"]
        if rule["alert"] == "FedVeilNoMetrics":
            assert rule["expr"] == 'up{job="fedveil"} == 0'  # Prometheus's own metric
            continue
        require_exported(rule["expr"], summary)
        # All are gauges: increase() would take each fall of a number for a restart of a counter.
        assert not re.search(r"\b(increase|i?rate)\(", rule["expr"])
    page = PAGE.read_text()
    assert all(f"`{rule['alert']}`" in page for rule in rules)
    states = re.findall(r'state=~"([^"]*)"', str(groups))
    assert {word for text in states for word in text.split("|")} <= set(server_metrics.STATES)
    events = re.findall(r'event=~"([^"]*)"', str(groups))
    assert {word for text in events for word in text.split("|")} <= set(site_metrics.EVENTS)


@pytest.mark.parametrize(
    "expression,shown",
    [("fedveil_other == 0", ""), ("fedveil_site_heard{run='x'} == 0", ""), ("fedveil_site_heard == 0", "{{run}}"),
     ("1", "")],
)  # fmt: skip
def test_a_wrong_name_would_be_seen(expression, shown):
    with pytest.raises(AssertionError):
        require_exported(expression, shown)
