"""Presets: their runners can be imported, and what they name is there."""

from __future__ import annotations

import importlib
import tomllib

import pytest

from fedveil import places, strategies
from fedveil.benchmarks import run


def preset(name: str) -> dict:
    return tomllib.loads((places.folder("benchmarks/presets") / f"{name}.toml").read_text())


@pytest.mark.parametrize("name", run.names())
def test_a_preset_s_runner_can_be_imported_and_run(name):
    """A runner that asks a process for each seed has what the process calls."""
    runner = importlib.import_module(f"fedveil.benchmarks.{preset(name)['runner']}")
    assert callable(runner.run)
    if hasattr(runner, "seeds"):
        assert callable(runner.of_seed)


@pytest.mark.parametrize("name", [n for n in run.names() if n.startswith("dp_fpl/")])
def test_methods_and_claims_of_dp_fpl_exist(name):
    found = preset(name)
    rows = found["settings"].get("rows", {})
    for changes in ({}, found["quick"].get("rows", {})):
        assert set(changes) <= set(rows)
        for label, row in rows.items():
            strategies.create(row["name"], {**row, **changes.get(label, {})}.get("fields", ""))
    for claim in found["settings"].get("claims", []):
        assert {claim["row"], claim["than"]} <= set(rows)
    assert set(found.get("paper", {})) <= set(rows)


@pytest.mark.parametrize("name", ["april", "adaptive"])
def test_cases_of_the_presets_have_a_model_and_a_name_of_their_own(name):
    settings = preset(f"random_binary/{name}")
    cases = settings["settings"]["cases"]
    assert len({c["name"] for c in cases}) == len(cases)
    assert {c["model"] for c in cases} <= set(settings["settings"]["models"])
    assert set(settings["quick"].get("skip", [])) <= {c["name"] for c in cases}


def test_quick_settings_replace_values_and_add_to_tables_also_to_one_that_is_not_there():
    changed = run._merged(
        {"a": 1, "config": {"x": 1, "y": 1}}, {"a": 2, "config": {"y": 2}, "called": {"cat": "animal"}}
    )
    assert changed == {"a": 2, "config": {"x": 1, "y": 2}, "called": {"cat": "animal"}}
