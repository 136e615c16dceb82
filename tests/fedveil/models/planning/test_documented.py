"""The tables in docs/sizing.md agree with the planning code."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fedveil import strategies
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.flatten import VectorLayout
from fedveil.models.planning import flops, memory, meta_model
from fedveil.models.planning.model_config import ModelConfig
from tests.conftest import ROOT
from tests.fedveil.models.planning.test_meta_model import EIGHT, SEVENTY

TEXT = (ROOT / "docs" / "sizing.md").read_text().partition("## Plan before there is a machine")[2]
CONFIG = parse({"train.quantized-base": "4bit", "train.precision": "bf16", "train.gradient-checkpointing": True,
                "train.batch-size": 4, "task.max-tokens": 512})  # fmt: skip


def row(name: str, text: str = TEXT) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.long
@pytest.mark.parametrize(("column", "settings"), [(0, EIGHT), (1, SEVENTY)])
def test_memory_by_part_and_seconds(column, settings):
    plan = memory.plan_memory(settings, CONFIG, LoraAdapter(), on_gpu=True)
    parts = {part.name: part.nbytes / 1e9 for part in plan.phases["training"]}
    assert row("parameters")[column] == f"{meta_model.build_meta_model(settings).parameters:,}"
    trained = ("adapter, fp32", "gradients beyond the freed activations", "states of adamw")
    for name, wanted in {
        "base in 4 bits": ["base, NF4, the rest bf16"],
        "adapter, AdamW": trained,
        "kept for": ["kept for the backward pass", "gradients of one layer's activations"],
        "logits": ["logits"],
        "working": ["working space", "CUDA and its libraries (assumed)"],
        "together while": list(parts),
    }.items():
        assert row(name)[column] == f"{sum(parts[part] for part in wanted):.3f}", name
    assert row("while it scores")[column] == f"{plan.needs('scoring') / 1e9:.3f}"
    four = memory.plan_memory(settings, CONFIG, LoraAdapter(), on_gpu=True, ranks=memory.RankLayout(4))
    assert row("4 GPUs, the base on each")[column] == f"{four.needed / 1e9:.3f}"
    whole = parse({**CONFIG.flat(), "train.quantized-base": "none"})
    split = memory.plan_memory(settings, whole, LoraAdapter(), on_gpu=True, ranks=memory.RankLayout(4, is_split=True))
    assert row("4 GPUs, the base in bf16")[column] == f"{split.needed / 1e9:.3f}"
    done = flops.training_flops(settings, CONFIG, LoraAdapter(), 1000)
    assert f"{(done.training + done.scoring) / 1e12:,.0f}" in TEXT
    for gpus in (1, 4):
        assert f"{done.seconds(300e12, gpus):.0f}" in TEXT.partition("A round of 1,000 examples")[2][:400]


EIGHT_BITS = "upload_bits = 8"
# The line's first words, the method, its fields, and which variants of the download and of the upload it has.
MESSAGES = [
    ("FedAvg, LoRA;", "fedavg", "", "", [""]), ("FedAvg, LoRA;", "fedpara", "", "", [""]),
    ("FedAvg, LoRA;", "fedprox", "", "", [""]), ("FedAvg, LoRA;", "la_lora", "", "", [""]),
    ("FedAvg, LoRA;", "hetlora", "", "", [""]), ("FedAvg, LoRA, `wire", "fedavg", "wire_dtype = 'bfloat16'", "", [""]),
    ("FedAvg, LoRA, `up", "fedavg", EIGHT_BITS, "", [""]),
    ("HetLoRA, a site", "hetlora", "adapter = {rank = 4}", "", [""]), ("SCAFFOLD", "scaffold", "", "", [""]),
    ("FedRand, as", "fedrand", "", "both", ["A", "B"]), ("FedRand, as", "rolora", "", "", ["A", "B"]),
    ("FedRand, RoLoRA", "fedrand", EIGHT_BITS, "both", ["A", "B"]),
    ("FedRand, RoLoRA", "rolora", EIGHT_BITS, "", ["A", "B"]),
    ("FFA-LoRA |", "ffa_lora", "", "", [""]), ("FFA-LoRA, `", "ffa_lora", EIGHT_BITS, "", [""]),
    ("FedSA-LoRA", "fedsa_lora", "", "", [""]), ("FedEx-LoRA, any", "fedex_lora", "", "whole", [""]),
    ("FLoRA, any", "flora", "", "whole", [""]), ("FedPer", "fedper", "", "top", ["top"]),
    ("FedLPP", "fedlpp", "", "", [""]), ("FedSP, after", "fedsp", "", "prefix", [""]),
    ("FedSP, round", "fedsp", "", "proxy", [""]), ("FedAvg, all", "fedavg", "adapter = {kind = 'all'}", "", [""]),
    ("FedAvg, all", "fixed_position", "", "", [""]), ("FedQSN", "fedqsn", "", "", [""]),
    ("Random Binary", "random_binary", "", "", [""]),
]  # fmt: skip


def exchange(name: str, fields: str, settings: ModelConfig) -> MessageExchange:
    method = strategies.create_method(name, fields)
    return MessageExchange(method, name, meta_model.param_specs(settings, method.adapter))


@pytest.mark.long
@pytest.mark.parametrize(("column", "settings"), [(0, EIGHT), (2, SEVENTY)])
def test_bytes_of_messages(column, settings):
    for words, name, fields, downloaded, variants in MESSAGES:
        message_exchange = exchange(name, fields, settings)
        down, up = message_exchange.sizes("down"), message_exchange.sizes("up")
        table_cells = row(words)[column : column + 2]
        assert table_cells == [f"{down[downloaded]:,}", " or ".join(f"{up[v]:,}" for v in variants)], (name, fields)
    pairs, three = (exchange("fedavg", f"adapter = {{rank = {r}}}", settings).largest("down") for r in (8, 3 * 8))
    for words, name in (("FedEx-LoRA, a", "fedex_lora"), ("FLoRA, a", "flora")):
        sizes = exchange(name, "", settings).sizes("down")
        assert sizes["start"] + three < sizes["step"]  # what the layout bounds is any rank
        assert row(words)[column : column + 2] == [f"{sizes['start'] + three:,}", f"{pairs:,}"], name


@pytest.mark.long
@pytest.mark.parametrize(("column", "settings"), [(0, EIGHT), (1, SEVENTY)])
def test_bytes_of_masked_uploads(column, settings):
    section = TEXT.partition("| method, secure |")[2]

    def shown(name: str) -> str:
        lengths = (VectorLayout.from_exchange(exchange(name, "", settings), round_).length for round_ in (1, 2))
        return " or ".join(dict.fromkeys(f"{4 * length:,}" for length in sorted(lengths)))

    for words, names in {
        "FedAvg, FedRand": ("fedavg", "fedrand", "fedlpp", "hetlora"),
        "FFA-LoRA": ("ffa_lora",), "FedSA-LoRA": ("fedsa_lora",), "RoLoRA": ("rolora",), "FedPer": ("fedper",),
        "FedEx-LoRA": ("fedex_lora",), "FLoRA": ("flora",),
    }.items():  # fmt: skip
        assert {shown(name) for name in names} == {row(words, section)[column]}, words


def test_the_methods_whose_uploads_may_be_codes():
    line = next(line for line in TEXT.splitlines() if line.startswith("`upload_bits` is a field of"))
    of = {
        name: {field.name for field in dataclasses.fields(strategies.load_method(name))}
        for name in strategies.list_methods()
    }
    codes = [name for name, fields in of.items() if "upload_bits" in fields]
    assert codes
    named = line.partition("field of ")[2].partition(", not")[0].replace(" and ", ", ").split(", ")
    assert {re.sub(r"[-_]", "", name).lower() for name in named} == {name.replace("_", "") for name in codes}
