"""Some method accepts every adapter in docs/lora.md, and the adapter has the meaning that the page gives."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fedveil import strategies, tasks
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "lora.md").read_text()
SHOWN = sorted(
    {*re.findall(r"^    (adapter = .*)$", PAGE, re.M), *re.findall(r"method\.params=(adapter = .*)'$", PAGE, re.M)}
)
FOR_GPT2 = [fields for fields in SHOWN if "q_proj" not in fields]


def layers(fields: str) -> set[str]:
    adapter = strategies.create_method("fedavg", fields).adapter
    return {name.rpartition(".lora_")[0] for name in tasks.load_task(parse({}), adapter, "cpu").spec}


def test_the_page_shows_some():
    assert len(SHOWN) == 6


def test_the_ranks_by_site_of_the_page_are_some_that_flora_takes():
    (fields,) = re.findall(r"^    (ranks = .*\n    adapter = .*)$", PAGE, re.M)
    method = strategies.create_method("flora", fields)
    assert method.ranks == {"north": 4, "south": 2}
    assert method.adapter.rank == 16


@pytest.mark.parametrize("fields", FOR_GPT2)
def test_each_adapter_of_the_page_finds_layers_of_the_tiny_base(fields):
    layer_names = layers(fields)
    assert layer_names
    assert all(name.endswith("c_attn") for name in layer_names) == ("attn" in fields and "c_fc" not in fields)


def test_peft_s_list_takes_last_parts_of_names():
    layer_names = layers('adapter = {targets = ["c_attn", "mlp.c_fc"]}')
    assert {name.rpartition("h.")[2].partition(".")[2] for name in layer_names} == {"attn.c_attn", "mlp.c_fc"}
    assert {name.rpartition(".")[2] for name in layers('adapter = {targets = ["c_proj"]}')} == {"c_proj"}


def test_the_fields_of_the_page_are_the_adapters_with_their_defaults():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.partition("## Which layers")[0], re.M))
    fields = {field.name: field.default for field in dataclasses.fields(LoraAdapter)}
    assert set(rows) == set(fields)
    page_defaults = {name: text.strip().strip("`").strip('"') for name, text in rows.items()}
    defaults = {"alpha": "none", "rslora": "false", "dropout": "0"}
    assert page_defaults == {name: defaults.get(name, str(default)) for name, default in fields.items()}
    assert (fields["alpha"], fields["rslora"], fields["dropout"]) == (None, False, 0.0)
