"""The tables of docs/deploy.md are what the planning says."""

from __future__ import annotations

import pytest

from fedveil import strategies
from fedveil.adapters.all_weights import AllWeights
from fedveil.adapters.lora import Lora
from fedveil.config import parse
from fedveil.federation.exchange import Exchange
from fedveil.models.planning import base, memory, work
from tests.conftest import ROOT
from tests.fedveil.models.planning.test_base import EIGHT, SEVENTY

TEXT = (ROOT / "docs" / "deploy.md").read_text().partition("### Before there is a machine")[2]
CONFIG = parse({"train.quantized-base": "4bit", "train.precision": "bf16", "train.checkpointing": True,
                "train.batch-size": 4, "task.max-tokens": 512})  # fmt: skip


def row(name: str) -> list[str]:
    line = next(line for line in TEXT.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(("column", "settings"), [(0, EIGHT), (1, SEVENTY)])
def test_memory_by_part_and_seconds(column, settings):
    plan = memory.plan(settings, CONFIG, Lora(), on_gpu=True)
    parts = {part.name: part.nbytes / 1e9 for part in plan.phases["training"]}
    assert row("parameters")[column] == f"{base.of(settings).parameters:,}"
    trained = ("adapter, fp32", "gradients of what is trained", "states of adamw")
    for name, wanted in {
        "base in 4 bits": ["base, NF4, the rest bf16"],
        "adapter, its": trained,
        "kept for": ["kept for the backward pass", "gradients of one layer's"],
        "logits": ["logits"],
        "working": ["working space", "CUDA and its libraries (assumed)"],
        "together while": list(parts),
    }.items():
        assert row(name)[column] == f"{sum(parts[part] for part in wanted):.3f}", name
    assert row("while it scores")[column] == f"{plan.needs('scoring') / 1e9:.3f}"
    four = memory.plan(settings, CONFIG, Lora(), on_gpu=True, ranks=memory.Ranks(4))
    assert row("4 GPUs, the base on each")[column] == f"{four.needed / 1e9:.3f}"
    whole = parse({**CONFIG.flat(), "train.quantized-base": "none"})
    split = memory.plan(settings, whole, Lora(), on_gpu=True, ranks=memory.Ranks(4, is_split=True))
    assert row("4 GPUs, the base in bf16")[column] == f"{split.needed / 1e9:.3f}"
    done = work.of(settings, CONFIG, Lora(), 1000)
    assert f"{(done.training + done.scoring) / 1e12:,.0f}" in TEXT
    for gpus in (1, 4):
        assert f"{done.seconds(300e12, gpus):.0f}" in TEXT.partition("A round of 1,000 rows")[2][:400]


@pytest.mark.parametrize(("column", "settings"), [(0, EIGHT), (2, SEVENTY)])
def test_bytes_of_messages(column, settings):
    def sizes(name: str, adapter: object = None) -> tuple[dict[str, int], dict[str, int]]:
        fields = "adapter = {kind = 'all'}" if adapter else ""
        method = strategies.create(name, fields)
        found = Exchange(method, name, base.spec(settings, method.adapter))
        return found.sizes("down"), found.sizes("up")

    for words, name, adapter, variants in (
        ("FedAvg, LoRA", "fedavg", None, [""]), ("FedAvg, LoRA", "fedpara", None, [""]),
        ("FedRand", "fedrand", None, ["A", "B"]), ("FedPer", "fedper", None, ["top"]),
        ("FedLPP", "fedlpp", None, [""]), ("FedAvg, all", "fedavg", AllWeights(), [""]),
        ("FedAvg, all", "fixed_position", None, [""]), ("FedQSN", "fedqsn", None, [""]),
        ("Random Binary", "random_binary", None, [""]),
    ):  # fmt: skip
        down, up = sizes(name, adapter)
        said = row(words)[column : column + 2]
        assert said[0] == f"{down[variants[-1]] if variants[-1] in down else max(down.values()):,}", name
        assert said[1] == " or ".join(f"{up[v]:,}" for v in variants), name
