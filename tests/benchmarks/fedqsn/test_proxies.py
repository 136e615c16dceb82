"""The runners of FedQSN's presets on a few rows of a data folder made here."""

from __future__ import annotations

import json

import pytest
import torch

from fedveil import strategies
from fedveil.adapters.lora import Lora
from fedveil.benchmarks.common import texts
from fedveil.benchmarks.fedqsn import proxies, proxy_cost, waiting
from fedveil.benchmarks.run import Options, Outcome
from fedveil.config import parse
from fedveil.strategies.fedqsn import FedQSN

FOODS = ("Thai", "French", "Indian", "Italian", "Fast food", "Chinese")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """E2E-like rows, and two of DART."""
    for split in ("train", "validation", "test"):
        lines = [
            {"mr": f"name[{split} {i}], food[{f}]", "ref": f"{split} {i} serves {f}."} for i, f in enumerate(FOODS)
        ]
        (tmp_path / "e2e_nlg").mkdir(exist_ok=True)
        (tmp_path / "e2e_nlg" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "dart").mkdir()
    for part in ("dev", "test"):
        lines = [{"tripleset": [["a", "b", str(i)], ["c", "d", "e"]], "refs": ["one", "two"]} for i in range(8)]
        (tmp_path / "dart" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    return tmp_path


def settings(methods, **more):
    return {
        "data": ["e2e_nlg"], "clients": 2, "clients_scored": 1, "rows": 4, "server_rows": 2, "validation_sources": 2,
        "test_sources": 3, "references": 2, "seeds": 1, "methods": methods,
        "config": {
            "task.model": "tiny", "train.max-steps": 1, "train.batch-size": 2, "run.rounds": 2, "train.learning-rate": 1e-3,
            "evaluate.max-new-tokens": 3,
        }, **more,
    }  # fmt: skip


def test_rows_of_dart_go_to_one_split_each(folder):
    train, validation, test = (texts.rows("dart", s) for s in ("train", "validation", "test"))
    assert train[0] == {"mr": "a | b | 0; c | d | e", "ref": "one"}
    assert len(train) == 16
    assert len(validation) + len(test) == 16
    assert not {r["mr"] for r in validation} & {r["mr"] for r in test}
    assert [r["ref"] for r in texts.chosen(train, 2, 1, 0)] == ["one", "one"]


def test_models_proxies_and_gaps(folder):
    methods = {
        "FedAvg": {"name": "fedavg", "fields": "adapter = {kind = 'all'}", "proxy": False},
        "open": {"name": "fedqsn", "fields": "server_rate = 0.0\nclient_rate = 0.0\nquantiser = 'none'"},
        "FedQSN": {"name": "fedqsn", "fields": "bits = 1"},
        "FedSP": {"name": "fedsp", "fields": "distil_steps = 1\nadapter = {kind = 'prefix', length = 2, cells = 1}"},
        "FedLPP": {"name": "fedlpp"},
    }
    rows = proxies.of_seed(settings(methods, similarity=True), 0, Options(device="cpu"))
    loss = {name: row["figures"]["e2e_nlg loss"][0] for name, row in rows.items() if "e2e_nlg loss" in row["figures"]}
    assert "FedAvg proxy" not in loss
    assert loss["open global"] == pytest.approx(loss["FedAvg global"], rel=1e-6)
    assert loss["FedQSN gap"] == pytest.approx(loss["FedQSN proxy"] - loss["FedQSN global"])
    assert abs(loss["FedQSN gap"]) > 0.01
    assert {"FedSP global", "FedSP tuned gap", "public base", "public base, fine-tuned"} <= set(loss)
    alike = {
        n: {m.removeprefix("e2e_nlg "): f[0] for m, f in r["figures"].items()} for n, r in rows.items() if "simil" in n
    }
    assert alike["open similarity"]["whole"] == pytest.approx(1.0)
    assert alike["FedQSN similarity"]["whole"] < alike["FedQSN similarity"]["visible"] < 0.95
    assert alike["FedLPP similarity"]["whole"] > 0.99
    assert abs(alike["FedQSN similarity"]["whole of the difference to the base"]) < 0.5
    assert rows["FedAvg global"]["download_bytes"] > 3 * rows["FedQSN global"]["download_bytes"]


def test_noise_goes_with_a_method_as_it_is(folder):
    noisy = "dp_sgd = {clip = 1.0, noise = 1.0, learning_rate = 0.001, neighbours = 'add-or-remove-one'}"
    methods = {"it": {"name": "fedqsn", "fields": f"bits = 4\n{noisy}"}}
    rows = proxies.of_seed(settings(methods), 0, Options(device="cpu"))
    assert rows["it tuned"]["figures"]["e2e_nlg loss"][0] > 0
    assert rows["it global"]["figures"]["e2e_nlg epsilon at delta 1e-05 (add-or-remove-one)"][0] == pytest.approx(
        6.573, abs=0.01
    )


def test_merged_weights_are_what_the_model_computes_with(folder):
    task = proxies.task_of(parse({"method.name": "fedlpp"}), Lora(rank=2, alpha=6.0), Options(device="cpu"))
    weights = {n: torch.randn(t.shape, generator=torch.Generator().manual_seed(2)) for n, t in task.spec.items()}
    task.put(weights)
    found = proxies.merged(task, weights)
    name = "transformer.h.1.mlp.c_fc"
    layer = task.base.model.get_submodule(name)
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer(x), x @ found[f"{name}.weight"] + layer.base_layer.bias, rtol=1e-3, atol=1e-3)


def test_waiting_shows_more_and_training_helps(folder):
    methods = {"it": {"name": "fedqsn", "fields": "bits = 4\nserver_rate = 0.2\nclient_rate = 0.3"}}
    rows = waiting.of_seed(settings(methods, data="e2e_nlg"), 0, Options(device="cpu"))
    seen = {n: rows[f"it, {n}"]["visible"] for n in ("received", "averaged", "colluding")}
    assert seen["received"] < seen["averaged"] < seen["colluding"] <= 0.9
    assert len(rows["it, received"]["loss"]) == len(rows["public base"]["loss"]) == 2
    last = {n: row["loss"][-1][0] for n, row in rows.items()}
    for name in ("it, received, filled", "it, averaged, filled", "it, colluding, filled", "public base"):
        assert last[f"{name}, fine-tuned"] < last[name], name
    assert last["it, averaged, filled"] != last["it, averaged"]


def test_speed_and_exact_bytes(monkeypatch):
    """The packed message beside the count by hand, for a GPT-2 whose layers are wide enough that headers do not matter."""
    asked = {
        "threads": [1], "now": 1, "repeats": 2, "fields": "bits = 2",
        "model": {"n_layer": 2, "n_embd": 256, "n_head": 2, "vocab_size": 3000, "n_positions": 16},
    }  # fmt: skip
    found = proxy_cost.of_seed(asked, 0, Options(device="cpu"))
    assert set(found["rows"]) == {"1 threads", "1 threads, clone"}
    sizes = found["bytes"]
    assert sizes["download_bytes"] == pytest.approx(sizes["counted_bytes"], rel=0.02)
    spec = proxy_cost.spec_of_gpt2(asked["model"])
    assert sizes["fedavg_bytes"] == 4 * sum(torch.Size(t.shape).numel() for t in spec.values())
    method = strategies.create("fedqsn", "bits = 2")
    assert isinstance(method, FedQSN)
    everything = proxy_cost.counted(method, spec, {})
    assert everything > sizes["counted_bytes"]
    monkeypatch.setattr(proxy_cost.seeds, "run", lambda *_: [found])
    outcome: Outcome = proxy_cost.run(asked, Options())
    assert "within 2 %: held" in outcome.verdicts[-1]
