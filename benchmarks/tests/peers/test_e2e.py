"""Peers doing the same work: the table by hand, a peer's inputs, and that its training equals FedVeil's."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedveil import rng, strategies, tasks
from fedveil.config import parse
from fedveil.console.flower import local_deployment
from fedveil.contract.task import DatasetShard
from fedveil.errors import ConfigError, StateError
from fedveil_bench import folders
from fedveil_bench import runner as presets
from fedveil_bench.peers import e2e, shared
from fedveil_bench.runner import BenchOptions

SETTINGS = presets.read_preset("peers/e2e", "quick")["settings"]
FLAT = {
    "method.name": "fedavg",
    "train.max-steps": 1,
    "train.batch-size": 64,
    "train.learning-rate": 1e-2,
    "task.examples-per-site": 12,
}
OURS, RANDOM = SETTINGS["methods"]


def trainer_of_the_peer():
    file = folders.find_folder("peers/stock_flower") / "tuned" / "training.py"
    spec = importlib.util.spec_from_file_location("tuned_training", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(loss, seconds):
    return e2e.PeerRun({"loss": loss, **dict.fromkeys(e2e.COSTS, 5.0), "s a round": seconds}, ["A and B"] * 2)


def done(seeds, apart=0.001, slower=3.0):
    """FedVeil's rounds are 1 s, give or take; Flower's are longer."""
    of_each = [0.01 * i for i in range(seeds)]
    return {
        e2e.BEFORE: [e2e.PeerRun({"loss": 3.0 + x}, []) for x in of_each],
        OURS: [run_of(2.0 + apart + x, 1.0 + x) for x in of_each],
        RANDOM: [replace(run_of(2.0 + x, 1.0 + x), seen=["A alone", "B alone"]) for x in of_each],
        e2e.FLOWER: [run_of(2.0 + 1.01 * x, 1.0 + slower + 1.01 * x) for x in of_each],
    }


def said_of(outcome, *parts):
    (found,) = [text for text in outcome.verdicts if all(part in text for part in parts)]
    return found


@pytest.mark.parametrize(
    ("slower", "who"), [(3.0, "FedVeil is ahead."), (-0.5, "Flower FedAvg is ahead."), (0.0, "not told apart.")]
)
def test_who_needs_less_is_said_of_either_side(slower, who):
    found = e2e.build_outcome(done(5, slower=slower), SETTINGS)
    assert said_of(found, f"s a round: {OURS} 1.02").endswith(who)
    assert said_of(found, f"MB up: {OURS} 5, Flower FedAvg 5").endswith("not told apart.")


@pytest.mark.parametrize(("apart", "word"), [(0.001, "holds here."), (0.1, "does not hold here.")])
def test_equal_losses_are_held_to_the_margin_of_the_preset(apart, word):
    found = e2e.build_outcome(done(5, apart), SETTINGS)
    assert said_of(found, f"loss of {OURS} less that of Flower FedAvg").endswith(f"equal (within 0.02): {word}")


def test_one_seed_decides_nothing_and_the_figures_stand():
    found = e2e.build_outcome(done(1), SETTINGS)
    assert "not decided." in said_of(found, f"loss of {OURS} less")
    assert not [text for text in found.verdicts if "is ahead" in text]
    rows = {row["name"]: row for row in found.rows}
    assert rows[OURS]["metrics"]["loss"]["mean"] == pytest.approx(2.001)
    assert rows[e2e.BEFORE]["metrics"].keys() == {"loss"}


def test_what_the_server_sees_is_counted_over_all_uploads():
    found = e2e.build_outcome(done(2), SETTINGS)
    rows = {row["name"]: row.get("server_sees") for row in found.rows}
    assert rows[e2e.FLOWER] == {"A and B": 4}
    assert rows[RANDOM] == {"A alone": 2, "B alone": 2}
    assert said_of(found, RANDOM, "trained").endswith(
        "trained A alone in 2 of 4 uploads, trained B alone in 2 of 4 uploads."
    )


def test_the_first_round_is_not_timed_and_bytes_become_mb():
    scores = e2e.PeerCosts(9.0, 2_000_000, 3_000_000, 100.0, 200.0).scores(1.5, [50.0, 1.0, 2.0])
    assert scores == {
        "loss": 1.5, "s a round": 1.5, "s": 9.0, "MB up": 2.0, "MB down": 3.0, "server MB": 100.0, "site MB": 200.0,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"run.rounds: expected at least 2"):
        e2e.PeerCosts(9.0, 2, 3, 1.0, 2.0).scores(1.5, [50.0])


def test_factors_are_told_by_fedveil_s_names_and_by_peft_s():
    names = ["h.0.attn.lora_A", "h.0.attn.lora_B"]
    assert shared.to_peft(names[0]) == "base_model.model.h.0.attn.lora_A.weight"
    assert [shared.from_peft(shared.to_peft(name)) for name in names] == names
    for form in (str, shared.to_peft):
        assert shared.describe_factors(map(form, names)) == "A and B"
        assert shared.describe_factors([form(names[1])]) == "B alone"
    assert shared.describe_factors(["head.weight"]) == "no factor"
    with pytest.raises(StateError, match=r"expected names base_model"):
        shared.from_peft("h.0.attn.lora_A")


def test_a_peer_is_told_every_setting_of_the_training():
    found = shared.of_peers(parse(FLAT | {"run.seed": 7, "method.params": "adapter = {rank = 4, alpha = 8}"}))
    assert (found["steps"], found["batch_size"], found["learning_rate"], found["seed"]) == (1, 64, 1e-2, 7)
    assert found["weight_decay"] == parse(FLAT).train.weight_decay
    assert (found["lora"]["r"], found["lora"]["lora_alpha"]) == (4, 8)
    assert found["lora"]["target_modules"] == "all-linear"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train.gradient-accumulation-steps": 2},
            r"train.gradient-accumulation-steps: expected 1, as the peers have, found 2",
        ),
        ({"train.lr-schedule": "cosine"}, r"train.lr-schedule: expected 'constant'"),
        ({"train.max-steps": 0}, r"train.max-steps: expected at least 1"),
        ({"method.params": "adapter = {kind = 'all'}"}, r"method.params: expected a LoRA adapter"),
    ],
)
def test_what_a_peer_has_not_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        shared.of_peers(parse(FLAT | changes))


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated"
)  # PEFT asks transformers by the old name
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # PEFT finds it out by itself
def test_a_peer_s_step_from_the_same_factors_on_the_same_rows_is_fedveil_s(tmp_path):
    """All rows in one batch: their order does not count, so both sides end at the same weights."""
    settings = {"data": "e2e", "sites": 2, "config": FLAT}
    task_files = shared.SharedInputs(settings, 3, BenchOptions(device="cpu"))
    task_files.write(tmp_path / "task")
    config = parse(FLAT | {"run.seed": 3})
    task = tasks.load_task(config, strategies.create_method("fedavg", "").adapter, "cpu")
    initial = task.initial(rng.initial_stream(3, "weights"))
    for site in range(2):
        peer = trainer_of_the_peer().Site(tmp_path / "task", site)
        begin = load_file(tmp_path / "task" / "initial.safetensors")
        peer.trained(7, {name: tensor + 0.1 for name, tensor in begin.items()})  # leaves nothing behind for the next
        theirs, loss = peer.trained(1, begin)
        save_file(theirs, tmp_path / "weights.safetensors")
        read = task_files.read(tmp_path / "weights.safetensors")
        encoded = task.encode(task.examples(task_files.data, "train", DatasetShard(site, 2)))
        ours = task.trainer(encoded, rng.initial_stream(3, "batches")).train(initial)
        assert peer.rows == len(encoded) == 12
        assert loss == pytest.approx(ours.report["loss_trained"], abs=1e-5)
        moved = [name for name in read if not torch.equal(read[name], initial[name])]
        assert moved
        for name, weight in ours.weights.items():
            torch.testing.assert_close(read[name], weight, atol=2e-4, rtol=0, msg=name)


def test_weights_of_another_adapter_are_refused(tmp_path):
    task_files = shared.SharedInputs({"data": "e2e", "sites": 2, "config": FLAT}, 3, BenchOptions(device="cpu"))
    save_file({shared.to_peft("h.0.lora_A"): torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(StateError, match=r"factors of the task, found 1 tensors"):
        task_files.read(tmp_path / "weights.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_smallest_form_runs_on_both_sides(tmp_path):
    config = SETTINGS["config"] | {"run.rounds": 2, "train.max-steps": 2, "task.examples-per-site": 16}
    config |= {"evaluate.eval-examples": 4}
    found = e2e.run_benchmark(
        SETTINGS | {"data": "e2e", "config": config}, BenchOptions(launch=local_deployment, device="cpu")
    )
    rows = {row["name"]: row for row in found.rows}
    assert list(rows) == [e2e.BEFORE, OURS, RANDOM, e2e.FLOWER]
    losses = {name: row["metrics"]["loss"]["mean"] for name, row in rows.items()}
    assert losses[e2e.FLOWER] == pytest.approx(losses[OURS], abs=0.05)
    assert losses[e2e.FLOWER] < losses[e2e.BEFORE]
    assert rows[OURS]["server_sees"] == rows[e2e.FLOWER]["server_sees"] == {"A and B": 4}
    assert sum(rows[RANDOM]["server_sees"].values()) == 4
    assert all(row["metrics"][cost]["mean"] > 0 for row in list(rows.values())[1:] for cost in e2e.COSTS)
    json.dumps(found.rows)
