"""Tables of broadcasts on pages: all figures agree with the committed result."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.console.provisioning import policy_template
from tests.conftest import ROOT

POLICY, PITFALLS = ROOT / "docs/deploy/site-policy.md", ROOT / "docs/pitfalls.md"


def rows_of(preset: str) -> dict[str, dict[str, float]]:
    """The rows of a committed result: by name, the mean of each metric."""
    result: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / f"{preset}.json").read_text())
    return {row["name"]: {key: of["mean"] for key, of in row["metrics"].items()} for row in result["rows"]}


def table(rows: dict[str, dict[str, float]], form: str, scale: float = 1.0) -> str:
    """The rows as a page shows them."""
    return "".join(
        f"| {name} | {' | '.join(format(scale * value, form) for value in metrics.values())} |\n"
        for name, metrics in rows.items()
    )


@pytest.mark.parametrize(
    ("page", "preset", "form", "scale"),
    [(POLICY, "broadcast_honest", ".2f", 1.0), (PITFALLS, "broadcast_ramp", ".0f", 100.0)],
    ids=["honest", "ramp"],
)
def test_a_page_shows_every_row_of_the_result(page, preset, form, scale):
    assert table(rows_of(preset), form, scale) in page.read_text()


def test_the_defaults_permit_every_method_at_its_measured_rate_but_those_that_the_page_names():
    """Rows with a comma in their names are other rates, noise and lengths than the methods' own."""
    policy = SitePolicy()
    rows = rows_of("broadcast_honest")
    above = {
        name
        for name, of in rows.items()
        if max(of["first"], of["change"]) > policy.max_broadcast_change or of["drift"] > policy.max_broadcast_drift
    }
    assert above == {"FedAvg, learning rate 1e-2"}
    assert f"default {policy.max_broadcast_change:g}" in POLICY.read_text()


def test_the_bound_on_the_drift_stops_what_the_bound_on_a_change_does_not():
    rows = rows_of("broadcast_ramp")
    for n in (4, 8, 16):
        assert rows["change 1"][f"rounds {n}"] == rows["no bound"][f"rounds {n}"] >= 0.7
    assert max(rows["change 1, drift 1"].values()) == 0.0
    kit = tomllib.loads(policy_template.EMPTY_POLICY)
    bounds = f"change {kit['max-broadcast-change']:g}, drift {kit['max-broadcast-drift']:g}"
    assert max(rows[bounds].values()) == 0.0
    default = f"change {SitePolicy().max_broadcast_change:g}, drift {SitePolicy().max_broadcast_drift:g}"
    assert max(rows[default].values()) < 0.5 * max(rows["no bound"].values())
