"""docs/from-other-configs.md names keys that exist, and its configs are configs."""

from __future__ import annotations

import re
import tomllib

import pytest

from fedveil import strategies
from fedveil.config import RunConfig, parse
from fedveil.console.run_config_args import flatten_config
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "from-other-configs.md").read_text()
KEYS = RunConfig().flat().keys()


def rows(section: str) -> list[list[str]]:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


@pytest.mark.parametrize(("section", "least"), [("FlowerTune", 24), ("Axolotl", 25), ("NVFlare's llm_hf", 15)])
def test_every_counterpart_is_a_key(section, least):
    table = rows(section)
    assert len(table) >= least
    for theirs, ours, _ in table:
        assert ours == "-" or all(key in KEYS for key in re.findall(r"`([^`]+)`", ours)), (theirs, ours)
        assert ours == "-" or "`" in ours, theirs


def test_the_count_is_that_of_the_table():
    table = rows("FlowerTune")
    said = re.search(r"(\d+) of the (\d+) keys", PAGE)
    assert said is not None
    assert (int(said[1]), int(said[2])) == (sum(ours != "-" for _, ours, _ in table), len(table))


def test_every_key_named_in_the_text_exists():
    named = set(re.findall(r"`((?:task|train|run|method|evaluate|cohort|sinks|secure)\.[a-z-]+)`", PAGE))
    theirs = {key for row in rows("FlowerTune") for key in re.findall(r"`([^`]+)`", row[0])}
    assert named - theirs - {"train.save-every-round"} <= KEYS


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_a_config_of_the_page_is_one(text):
    config = parse(flatten_config(tomllib.loads(text)))
    method = strategies.create_method(config.method.name, config.method.params)
    assert type(method) is strategies.load_method(config.method.name)
