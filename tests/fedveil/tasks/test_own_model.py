# ruff: noqa: E501  # sentences are searched for as they are
"""Own models: the three files of docs/own-model, the ten mistakes with their sentences, and the rules for rows."""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path

import pytest
import torch

from fedveil import paths, rng, strategies, tasks
from fedveil.config import parse
from fedveil.contract.param_spec import movable_names
from fedveil.contract.task import DatasetShard
from fedveil.errors import ConfigError, TaskError
from fedveil.local import LocalFederation
from fedveil.models import own_module
from fedveil.models.own_module import with_own_task
from fedveil.tasks.own_model import OwnModel
from fedveil.training.per_example import per_example_gradients

PAGES = paths.find_folder("docs/own-model")
PLAIN = {"method.name": "fedavg", "run.rounds": 1, "run.deterministic": True, "train.learning-rate": 0.01}
COLUMNS = [
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
    "slope",
    "ca",
    "thal",
    "target",
]
SMALL = """
import torch
from torch import nn
def model():
    return nn.Linear(4, 2)
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
def dataset(folder, split):
    return [(torch.full((4,), i / 8), i % 2) for i in range(16)]
"""


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file, draw = tmp_path_factory.mktemp("hospital") / "rows.csv", random.Random(3)
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(COLUMNS)
        for _ in range(90):
            age, chest = draw.randint(30, 75), draw.randint(1, 4)
            target = int(draw.random() < (age - 25) / 60)
            rows.writerow(
                [age, draw.randint(0, 1), chest, draw.randint(100, 180), "", 0, 0, 150, 0, 1.0, "", "", "", target]
            )
    return file


def own_task(tmp_path: Path, text: str, params: str = 'adapter.kind = "all"', **keys: object) -> OwnModel:
    file = tmp_path / "mine.py"
    file.write_text(text)
    extra = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    return _task({"task.module": str(file), "method.params": params} | extra)


def _task(settings: dict[str, object]) -> OwnModel:
    config = parse(with_own_task(PLAIN | settings))
    method = strategies.create_method(config.method.name, config.method.params)
    task = tasks.load_task(config, method.adapter, "cpu")
    assert isinstance(task, OwnModel)
    return task


def train_once(task: OwnModel, data: Path) -> None:
    rows = task.encode(task.examples(data, "train"))
    task.trainer(rows, rng.RandomStream(bytes(32))).train(task.initial(rng.initial_stream(0, "weights")))


def page(name: str, **keys: object) -> dict[str, object]:
    extra = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    return PLAIN | {"task.module": str(PAGES / f"{name}.py")} | extra


def settings_of_page(name: str) -> dict[str, object]:
    if name != "tags":
        return page(name)
    model = str(paths.find_folder("fedveil/assets/tiny-text-generation"))
    return page(name, task__model=model, task__examples_per_site=32, evaluate__eval_examples=32)


def data_of_page(name: str, hospital: Path, folder: Path) -> Path:
    return {"heart": hospital, "unet": folder, "tags": paths.find_folder("data/e2e")}[name]


@pytest.mark.parametrize(
    ("name", "scores"),
    [("heart", ["accuracy"]), ("unet", ["dice"]), pytest.param("tags", ["accuracy", "f1"], marks=pytest.mark.long)],
)
def test_a_round_in_one_process_equals_a_loop_by_hand(name: str, scores: list[str], hospital: Path, tmp_path: Path):
    data, settings = data_of_page(name, hospital, tmp_path), settings_of_page(name) | {"train.epochs": 2}
    local = LocalFederation.from_config(settings, {"a": data})
    task, secret = local.task, rng.RandomStream(bytes(32))
    assert isinstance(task, OwnModel)
    rows = task.encode(task.examples(data, "train"))
    initial = task.initial(rng.initial_stream(0, "weights"))
    dropouts = [m for m in task.base.model.modules() if isinstance(m, torch.nn.Dropout)]
    for module in dropouts:
        module.p = 0.0  # a site's own draws
    ours = task.trainer(rows, secret).train(initial).weights
    theirs = loop_by_hand(name, data, task, initial, rng.RandomStream(bytes(32)))
    moved = max(float((ours[n] - initial[n]).abs().max()) for n in ours)
    assert moved > 1e-3
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in ours) <= 1e-6
    local.run()
    assert sorted(local.evaluate(data)) == sorted(["loss", *scores])


def loop_by_hand(name, data, task, initial, secret):
    """Train by a plain loop over the file's own functions, in the order of rows that FedVeil draws."""
    functions, base = task.module.functions, task.config.task.model
    model = functions["model"](base) if name == "tags" else functions["model"]()
    model.float()  # the small base is stored in half precision
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for key, value in initial.items():
            tensors[key].copy_(value)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-6, fused=True)
    rows = functions["dataset"](data, "train")
    if most := task.config.task.examples_per_site:
        rows = [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), most))]
    collate = functions.get("collate")
    generator = secret.torch_generator()
    for _ in range(2):
        order = torch.randperm(len(rows), generator=generator).tolist()
        for i in range(0, len(order), 16):
            chosen = [rows[j] for j in order[i : i + 16]]
            batch = collate(chosen, base) if collate else torch.utils.data.default_collate(chosen)
            optimiser.zero_grad()
            functions["loss"](model, batch).backward()
            optimiser.step()
    return {key: tensors[key].detach() for key in initial}


def test_float_buffers_are_sent_and_others_start_anew(tmp_path: Path):
    task = _task(page("unet"))
    assert task.spec["high.1.running_mean"].fixed
    assert "high.1.num_batches_tracked" not in task.spec
    initial = task.initial(rng.initial_stream(0, "weights"))
    rows = task.encode(task.examples(tmp_path, "train"))
    after = task.trainer(rows, rng.RandomStream(bytes(32))).train(initial).weights
    assert not torch.equal(after["high.1.running_mean"], initial["high.1.running_mean"])
    assert int(task.base.model.high[1].num_batches_tracked) == 0
    with pytest.raises(TaskError, match="the method sends gradients, but averaged buffers have none"):
        task.trainer(rows, rng.RandomStream(bytes(32))).gradient(initial)


def test_initial_buffers_stay_those_of_the_file(tmp_path: Path):
    task = _task(page("unet", task__buffers="initial"))
    assert not any(tensor.fixed for tensor in task.spec.values())
    rows = task.encode(task.examples(tmp_path, "train"))
    initial = task.initial(rng.initial_stream(0, "weights"))
    trainer = task.trainer(rows, rng.RandomStream(bytes(32)))
    trainer.train(initial)
    assert torch.equal(task.base.model.high[1].running_mean, torch.zeros(8))
    assert trainer.gradient(initial).report["steps"] == 1


@pytest.mark.parametrize("name", ["heart", "tags"])
def test_lora_pairs_attach_also_to_a_single_layer(name: str, hospital: Path, tmp_path: Path):
    settings = settings_of_page(name) | {"method.params": "adapter.rank = 2"}
    local = LocalFederation.from_config(settings, {"a": data_of_page(name, hospital, tmp_path)})
    expected = {"model.lora_A", "model.lora_B"} if name == "heart" else {"classifier.lora_A", "classifier.lora_B"}
    assert expected <= set(local.task.spec)
    before = local.evaluate(data_of_page(name, hospital, tmp_path))["loss"]
    local.run()
    assert local.evaluate(data_of_page(name, hospital, tmp_path))["loss"] < before


@pytest.mark.parametrize("name", ["heart", "tags"])
def test_the_mean_of_row_gradients_is_the_gradient_of_the_batch(name: str, hospital: Path, tmp_path: Path, caplog):
    caplog.set_level("INFO", "fedveil")
    task = _task(settings_of_page(name))
    rows = task.encode(task.examples(data_of_page(name, hospital, tmp_path), "train"))[:6]
    initial = task.initial(rng.initial_stream(0, "weights"))
    found = per_example_gradients(task, task.spec, rows, initial)
    task.put(initial)
    for i, row in enumerate(rows):
        task.base.model.zero_grad()
        loss = task.loss_sum(task.collate([row]))
        loss.backward()
        assert float(found.losses[i]) == pytest.approx(float(loss.detach()), abs=1e-6)
        for key in movable_names(task.spec):
            own = task.trained[key].grad
            assert torch.allclose(
                found.gradients[key][i], torch.zeros_like(found.gradients[key][i]) if own is None else own, atol=1e-5
            )
    assert ("row by row" in caplog.text) == (name == "tags")


def test_noisy_steps_train_the_file_and_need_its_word(hospital: Path, tmp_path: Path):
    noisy = {"dp.clip-norm": 1.0, "dp.noise-multiplier": 0.5, "train.batch-size": 8}
    task = _task(page("heart") | noisy)
    assert task.module.independent_rows
    with pytest.raises(TaskError, match="dp.. requires independent_rows = True"):
        own_task(tmp_path, SMALL, dp__clip_norm=1.0, dp__noise_multiplier=0.5)
    with pytest.raises(TaskError, match=r"under dp\.\*, .* in the batch normalization high.1; use nn.GroupNorm"):
        _task(page("unet") | noisy)
    assert _task(page("unet", task__buffers="initial") | noisy).spec


def test_outputs_need_a_function_for_them(hospital: Path, tmp_path: Path):
    task = _task(page("heart"))
    rows = task.encode(task.examples(hospital, "test"))
    weights = task.initial(rng.initial_stream(0, "weights"))
    outputs = list(task.predict(weights, rows))
    assert len(outputs) == len(rows) == 30
    assert outputs[0].logits["target"].shape == (1, 2)
    other = own_task(tmp_path, SMALL)
    with pytest.raises(TaskError, match=r"mine.py has no function predict\(model, batch\)"):
        list(other.predict(other.initial(rng.initial_stream(0, "weights")), []))


def test_sites_of_one_folder_divide_its_rows(tmp_path: Path):
    task = own_task(tmp_path, SMALL, task__examples_per_site=6)
    parts = [task.examples(tmp_path, "train", DatasetShard(i, 2)) for i in range(2)]
    rows = [{int(example.values["row"]) for example in part} for part in parts]
    assert [len(part) for part in rows] == [6, 6]
    assert not rows[0] & rows[1]
    assert str(parts[0][0].origin).endswith("/train")


@pytest.mark.parametrize("name", ["heart", "unet"])
def test_final_files_load_without_fedveil(name: str, hospital: Path, tmp_path: Path):
    from safetensors.torch import load_file

    task = _task(settings_of_page(name))
    weights = task.initial(rng.initial_stream(0, "weights"))
    task.save(weights, tmp_path)
    assert (tmp_path / f"{name}.py").read_text() == (PAGES / f"{name}.py").read_text()
    assert own_module.module_digest((PAGES / f"{name}.py").read_bytes()) in (tmp_path / "module.json").read_text()
    saved = load_file(tmp_path / "model.safetensors")
    network = task.module.functions["model"]()
    network.load_state_dict(saved)
    assert all(torch.equal(saved[key], weights[key]) for key in weights)


def changed(old: str, new: str) -> str:
    assert old in SMALL
    return SMALL.replace(old, new)


LOSS = "return nn.functional.cross_entropy(model(batch[0]), batch[1])"
ROWS = "return [(torch.full((4,), i / 8), i % 2) for i in range(16)]"
MISTAKES = {
    "not a scalar": (changed(LOSS, "return (model(batch[0])).sum(1)"), r"as one number \(a scalar tensor\), but returned a tensor of shape \(16,\) and type torch.float32; end it with .mean"),
    "item": (changed(LOSS, LOSS + ".item()"), r"as one number \(a scalar tensor\), but returned float; end it"),
    "detached": (changed(LOSS, LOSS + ".detach()"), r"depend on the trained weights; leave out .detach"),
    "dicts as pairs": (
        changed(LOSS, "x, y = batch['x'], batch['z']").replace("(torch.full((4,), i / 8), i % 2)", "{'x': torch.ones(4), 'y': i % 2}"),
        r"cannot unpack a batch from dataset\(\) and collate\(\), which is \{x: float32\[16, 4\], y: int64\[16\]\} \(KeyError in mine.py, line 7\); unpack",
    ),
    "model on another device": (changed("return nn.Linear(4, 2)", "return nn.Linear(4, 2, device='meta')"), r"leave the model on the CPU, but put it on meta; FedVeil moves"),
    "tensor on another device": (changed(LOSS, LOSS + " + torch.ones((), device='meta') * model(torch.ones(2, 4, device='meta')).sum()"), r"mixes tensors on several devices, but model and batch are on cpu; create"),
    "no length": (changed(ROWS, "return (i for i in range(3))"), r"rows that support len\(\) and indexing, but returned generator; a list"),
    "labels of another type": (changed("i % 2)", "float(i % 2))"), r"the type that the loss takes .*: \[float32\[16, 4\], float64\[16\]\] \(RuntimeError\); convert them in dataset"),
    "not repeatable": (changed("return nn.Linear(4, 2)", "torch.seed(); return nn.Linear(4, 2)"), r"a second call of model\(\) gave a different weight; draw from"),
    "one row in a batch": (
        changed("return nn.Linear(4, 2)", "return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))").replace("range(16)", "range(17)"),
        r"batch normalization needs at least two rows in every batch",
    ),
    "not finite": (changed("i / 8", "float('nan')"), r"step 1 with 0.01 did not give a finite loss, but nan"),
    "too large": (changed("return nn.Linear(4, 2)", "return nn.Linear(2**22, 2**22)"), r"does not fit in this machine's memory; make it smaller"),
    "unequal rows": (changed("(4,)", "(3 + i % 2,)"), r"without a collate\(\) in mine.py, all rows must have the same shape, found .*write a collate"),
    "no loss": (changed("def loss", "def lost"), r"mine.py has no function loss\(model, batch\); add it"),
    "other parameters": (changed("def loss(model, batch)", "def loss(batch)"), r"mine.py must define loss\(model, batch\), but defines loss\(batch\)"),
    "error in dataset": (changed(ROWS, "return [float('secret')]"), r"dataset\(\) failed with ValueError in mine.py, line 9; correct it"),
    "not a network": (changed("return nn.Linear(4, 2)", "return 3"), r"return a torch.nn.Module, but returned int"),
    "no score named": (SMALL + "def metrics(model, batches):\n    return {}\n", r'mine.py has metrics\(\) but not better = \{"score": "higher"\}'),
    "not Python": (SMALL + "def", r"mine.py is not valid Python \(SyntaxError on line 10\)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_a_sentence(mistake: str, tmp_path: Path):
    text, sentence = MISTAKES[mistake]
    with pytest.raises(TaskError, match=sentence) as found:
        train_once(own_task(tmp_path, text), tmp_path)
    assert "secret" not in str(found.value)
    assert str(found.value).startswith("task.module: " if mistake != "not finite" else "train.learning-rate: ")


def test_a_lambda_and_a_batch_of_dicts_work(tmp_path: Path):
    text = changed("return nn.Linear(4, 2)", "m = nn.Linear(4, 2); m.scale = lambda x: 2 * x; return m")
    text = text.replace("model(batch[0]), batch[1]", "model.scale(model(batch['x'])), batch['y']")
    task = own_task(
        tmp_path, text.replace("(torch.full((4,), i / 8), i % 2)", "{'x': torch.full((4,), i / 8), 'y': i % 2}")
    )
    train_once(task, tmp_path)
    weights = task.initial(rng.initial_stream(0, "weights"))
    assert task.evaluate(weights, task.examples(tmp_path, "test"), False)["loss"] > 0


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import os", "an import of os"), ("from . import x", r"an import of \."), ("import torch.hub", "an import of torch.hub"),
        ("from torch import load", "an import of torch.load"), ("eval('1')", "eval"), ("exec('1')", "exec"),
        ("compile('1', '', 'eval')", "compile"), ("__import__('os')", "__import__"), ("open('x', 'w')", "open for writing"),
        ("open('x', mode=torch)", "open for writing"), ("p = torch.load('x')", "torch.load"),
        ("torch.save(1, 'x')", "torch.save"), ("x = ().__class__", r"\.__class__"), ("dict(trust_remote_code=True)", "trust_remote_code"),
    ],
)  # fmt: skip
def test_a_barred_statement_is_named_with_its_line(line: str, found: str, tmp_path: Path):
    with pytest.raises(TaskError, match=rf"mine.py must not contain {found} \(line 10\); remove it"):
        own_task(tmp_path, SMALL + line + "\n")


def test_a_file_may_read_and_compile_patterns(tmp_path: Path):
    text = SMALL + "import re\nP = re.compile('a')\ndef read(p):\n    return [p.open(), open(p), open(p, 'rb')]\n"
    assert own_task(tmp_path, text + "if __name__ == '__main__':\n    read('x')\n").module.name == "mine"


def test_keys_of_other_tasks_are_refused(tmp_path: Path):
    refused = {
        "task.source-column": "x", "train.compile": True, "task.partition": "natural", "dp.unit-column": "patient",
    }  # fmt: skip
    for key, value in refused.items():
        with pytest.raises(ConfigError, match=rf'{re.escape(key)}: the task "own-model" supports only '):
            own_task(tmp_path, SMALL, **{key.replace(".", "__").replace("-", "_"): value})
    with pytest.raises(ConfigError, match='task.name = "own-model" requires a file'):
        _task({"task.name": "own-model"})
    with pytest.raises(ConfigError, match=r"task\.module: .*found '\.\./x'"):
        parse({"task.module": "../x"})
    with pytest.raises(ConfigError, match="set it to the folder or Hub id that model.base. in tags.py loads"):
        _task(page("tags"))
