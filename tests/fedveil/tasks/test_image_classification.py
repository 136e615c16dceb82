"""Image classification on small ViTs: the loss compared with transformers', initialization, data formats, bad input."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from safetensors.torch import load_file, save_file

from fedveil import config as run_config
from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.hadamard import HadamardLoraAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.task import DatasetShard, Example, ExampleOrigin
from fedveil.data import images
from fedveil.errors import ConfigError, TaskError
from fedveil.models import bundled, library_logging
from fedveil.tasks import image_classification, load_task
from fedveil.tasks.image_classification import ImageClassification

NAMES = ["bird", "cat", "dog"]


def picture(seed: int, size: tuple[int, int] = (32, 32)) -> bytes:
    """Noise whose brightness says the class, seed modulo 3."""
    from PIL import Image as Pil

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 80, (*size, 3), generator=generator) + 80 * (seed % 3)
    out = io.BytesIO()
    Pil.fromarray(pixels.to(torch.uint8).numpy()).save(out, "PNG")
    return out.getvalue()


def make(adapter=AllWeightsAdapter(), **keys: object) -> ImageClassification:
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    base = {"task.name": "image-classification", "task.target-column": "label", "task.label-column": "label"}
    task = load_task(
        run_config.parse(base | {"task.num-classes": 3, "task.from-scratch": True, "train.batch-size": 4} | flat),
        adapter,
        "cpu",
    )
    assert isinstance(task, ImageClassification)
    return task


def stream(purpose: str = "weights", seed: int = 0) -> rng.RandomStream:
    return rng.initial_stream(seed, purpose)


def save(folder: Path, rows: list[dict], split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    features = Features({"image": Image(), "label": ClassLabel(names=NAMES)})
    Dataset.from_list(rows, features=features).to_parquet(str(folder / f"{split}.parquet"))
    return folder


def vit(folder: Path, weights: bool = True, preprocessor: bool = False, has_head: bool = True, **keys: object) -> Path:
    """A small ViT in a folder; made with another size than the bundled one."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil, ViTModel

    config = ViTConfig(
        **{"image_size": 24, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
           "intermediate_size": 32, "initializer_range": 0.5, "num_labels": 3} | keys
    )  # fmt: skip
    with library_logging.quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(31415)
        model = (ViTForImageClassification if has_head else ViTModel)(config)
        (model if weights else config).save_pretrained(folder)
        if preprocessor:
            size = {"height": 24, "width": 24}
            ViTImageProcessorPil(size=size, image_mean=[0.3, 0.4, 0.5], image_std=[0.2, 0.3, 0.4]).save_pretrained(
                folder
            )
    return folder


@pytest.fixture(scope="module")
def task() -> ImageClassification:
    return make()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Twelve images of three classes."""
    rows = [{"image": {"bytes": picture(i), "path": None}, "label": i % 3} for i in range(12)]
    return save(tmp_path_factory.mktemp("data") / "images", rows)


@pytest.fixture(scope="module")
def rows(task, data):
    return task.encode(task.examples(data, "train"))


def randomised(task: ImageClassification) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(577215)
    return {n: 0.2 * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}


@pytest.mark.parametrize("preprocessor", [False, True])
def test_loss_equals_that_of_the_original_model(tmp_path, preprocessor):
    """transformers' own model, image processor and loss; without a processor the bilinear resize is Pillow's."""
    import numpy as np
    from PIL import Image as Pil
    from transformers import ViTForImageClassification, ViTImageProcessorPil

    folder = vit(tmp_path / "vit", preprocessor=preprocessor)
    task = make(task__model=str(folder), task__num_classes=7)  # the model's own number counts
    assert task.classes == 3
    encoded = [picture(i, (40 + i, 60)) for i in range(5)]
    opened = [Pil.open(io.BytesIO(image)).convert("RGB") for image in encoded]
    with library_logging.quiet_libraries():
        plain = ViTForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
        if preprocessor:
            pixels = ViTImageProcessorPil.from_pretrained(folder)(images=opened, return_tensors="pt")["pixel_values"]
        else:
            small = [np.array(image.resize((24, 24), Pil.Resampling.BILINEAR)) for image in opened]
            pixels = (torch.tensor(np.stack(small)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    labels = torch.tensor([0, 1, 2, 0, 1])
    prepared = task.encode(
        Example.from_columns({"image": i, "label": int(c)} for i, c in zip(encoded, labels, strict=True))
    )
    ours = task.collate(prepared)
    assert ours.inputs.dtype == torch.float32
    atol = 1e-6 if preprocessor else 1.01 / 127.5  # Pillow rounds to 256 values, twice
    assert torch.allclose(ours.inputs, pixels, atol=atol)
    theirs = float(plain(pixel_values=ours.inputs, labels=labels).loss.detach())
    task.put(task.initial(stream()))
    mine = task.mean_loss(prepared)
    assert mine == pytest.approx(theirs, rel=1e-5)
    other = float(plain(pixel_values=ours.inputs.flip(0), labels=labels).loss.detach())
    assert mine != pytest.approx(other, rel=1e-2)


def test_an_image_of_the_models_size_is_not_resampled(task):
    import numpy as np
    from PIL import Image as Pil

    (row,) = task.encode(Example.from_columns([{"image": picture(5), "label": 0}]))
    values = torch.tensor(np.array(Pil.open(io.BytesIO(picture(5))))).permute(2, 0, 1)
    assert torch.allclose(row.pixels(), values / 127.5 - 1, atol=1e-6)


def test_grey_images_and_models_of_one_channel(tmp_path):
    task = make(task__model=str(vit(tmp_path / "grey", weights=False, num_channels=1)))
    (row,) = task.encode(Example.from_columns([{"image": picture(2), "label": 0}]))
    assert row.pixels().shape == (1, 24, 24)
    other = make(task__model=str(vit(tmp_path / "four", weights=False, num_channels=4)))
    with pytest.raises(
        TaskError, match="only models for images with 1 or 3 channels are supported, but ViTFor.* takes 4"
    ):
        other.encode(Example.from_columns([{"image": picture(2), "label": 0}]))


def test_the_company_in_a_batch_changes_nothing(task, rows):
    task.put(randomised(task))
    together = task.mean_loss(rows[:5])
    assert together == pytest.approx(sum(task.mean_loss([row]) for row in rows[:5]) / 5, rel=1e-5)
    batch = task.collate(rows[:5])
    assert (batch.terms, batch.tokens, batch.inputs.shape) == (5, 0, (5, 3, 32, 32))
    assert float(task.loss_sum(batch).detach()) == pytest.approx(5 * together, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [{}, {"train__bucketing": True, "train__gradient_accumulation_steps": 2, "train__gradient_checkpointing": True}],
)
def test_training_learns_the_images(data, keys):
    task = make(train__epochs=20, train__learning_rate=2e-3, **keys)
    examples = task.examples(data, "train")
    start = task.initial(stream())
    trained = task.trainer(task.encode(examples), stream("batches")).train(start)
    before, after = task.evaluate(start, examples, True), task.evaluate(trained.weights, examples, True)
    assert set(after) == {"loss", "accuracy"}
    assert after["loss"] < before["loss"] / 3
    assert after["accuracy"] == 1.0 > before["accuracy"]
    assert trained.report["tokens"] == 0
    assert trained.report["steps"] == 20 * (2 if keys else 3)
    assert trained.report["loss_received"] == pytest.approx(before["loss"], rel=1e-5)


def test_scores_by_hand(task, data):
    """A classifier with zero weights says the class of the largest bias, whatever it sees."""
    bias = torch.tensor([0.3, 1.7, -0.4])
    weights = {n: torch.zeros(s.shape) for n, s in task.spec.items()} | {"classifier.bias": bias}
    examples = [*task.examples(data, "train"), Example({"image": picture(1), "label": 1})]  # 4, 5 and 4 of the classes
    scores = task.evaluate(weights, examples, generate=False)
    logs = torch.log_softmax(bias, 0)
    assert scores["accuracy"] == pytest.approx(5 / 13)
    assert scores["loss"] == pytest.approx(float(-(4 * logs[0] + 5 * logs[1] + 4 * logs[2]) / 13), rel=1e-5)


def test_scored_examples_are_spread_over_the_split():
    """The first three of nine sorted examples would be of one class."""
    task = make(evaluate__eval_examples=3)
    weights = {n: torch.zeros(s.shape) for n, s in task.spec.items()} | {
        "classifier.bias": torch.tensor([2.0, 0.0, 0.0])
    }
    examples = Example.from_columns({"image": picture(0), "label": i // 3} for i in range(9))
    assert task.evaluate(weights, examples, False)["accuracy"] == pytest.approx(1 / 3)
    with pytest.raises(TaskError, match="there are none to score"):
        task.evaluate(weights, [], False)


def test_tasks_of_one_seed_start_alike(tmp_path):
    one, two = (make().initial(stream()) for _ in range(2))
    assert list(one) == list(make().spec)
    assert all(torch.equal(one[n], two[n]) for n in one)
    other = make().initial(stream(seed=1))
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    assert one["vit.layers.0.mlp.fc1.weight"].std() > 0.01
    task = make()
    first = task.initial(stream())
    task.put(randomised(task))
    first["classifier.bias"] += 1
    again = task.initial(stream())
    assert all(torch.equal(one[n], again[n]) for n in one)  # changes to the inserted or returned tensors have no effect


def test_a_draw_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    task = make()
    task.initial(stream())
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_folder_without_weights_starts_from_scratch(tmp_path):
    folder = vit(tmp_path / "vit", weights=False, num_labels=9)
    task = make(task__model=str(folder), task__num_classes=5)
    assert task.classes == 5
    assert task.spec["classifier.weight"].shape == (5, 16)
    one, two = (
        task.initial(stream()),
        make(task__model=str(folder), task__num_classes=5).initial(stream()),
    )
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not torch.equal(one["classifier.weight"], task.initial(stream(seed=1))["classifier.weight"])


def test_a_folder_with_weights_starts_from_those(tmp_path):
    task = make(task__model=str(vit(tmp_path / "vit")))
    one, two = task.initial(stream()), task.initial(stream(seed=1))
    assert all(torch.equal(one[n], two[n]) for n in one)
    (tmp_path / "vit" / "model.safetensors").rename(tmp_path / "vit" / "gone")
    with pytest.raises(TaskError, match=r"task\.model: there are no weights .* task\.from-scratch"):
        make(task__model=str(tmp_path / "vit"), task__from_scratch=False).initial(stream())
    other = make(task__model=str(tmp_path / "vit")).initial(stream())
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])


@pytest.mark.parametrize("adapter", [LoraAdapter(rank=2), HadamardLoraAdapter(rank=2)], ids=["lora", "hadamard"])
def test_an_adapter_on_a_base_that_every_site_has(adapter, data):
    task = make(adapter, train__epochs=2)
    assert "vit.layers.2.mlp.fc2.lora_B" in task.spec
    assert "classifier.lora_A" in task.spec  # otherwise classes that were never trained could not be learned
    assert not any("projection" in name for name in task.spec)
    frozen = {n: p for n, p in task.base.model.named_parameters() if not p.requires_grad}
    same = dict(make(adapter).base.model.named_parameters())
    other = dict(make(adapter, run__seed=1).base.model.named_parameters())
    assert all(torch.equal(p, same[n]) for n, p in frozen.items())
    assert not all(torch.equal(p, other[n]) for n, p in frozen.items())
    start = task.initial(stream())
    examples = task.examples(data, "train")
    trained = task.trainer(task.encode(examples), stream("batches")).train(start)
    assert task.evaluate(trained.weights, examples, False)["loss"] < task.evaluate(start, examples, False)["loss"]
    assert all(torch.equal(p, same[n]) for n, p in frozen.items())


def test_predictions_are_the_rows_own(task, rows):
    weights = randomised(task)
    predictions = list(task.predict(weights, rows, generate=True))
    assert len(predictions) == len(rows)
    for row, each in zip(rows, predictions, strict=True):
        assert set(each.logits) == {"target"}
        assert each.logits["target"].shape == (1, 3)
        assert each.wanted.tolist() == [row.label]
        loss = torch.nn.functional.cross_entropy(each.logits["target"], each.wanted)
        assert float(loss) == pytest.approx(task.mean_loss([row]), rel=1e-4)


def test_images_beyond_the_memory_bound_are_decoded_again(task, data, rows, monkeypatch):
    monkeypatch.setattr(image_classification, "_KEPT_BYTES", rows[0].pixels().nbytes * 2)
    bounded = task.encode(task.examples(data, "train"))
    assert bounded[1].pixels() is bounded[1].pixels()  # kept, as the first two are that are asked for
    assert bounded[0].pixels() is bounded[0].pixels()
    assert bounded[2].pixels() is not bounded[2].pixels()
    assert all(torch.equal(a.pixels(), b.pixels()) for a, b in zip(rows, bounded, strict=True))


def test_a_batch_of_kept_and_of_other_images_is_in_its_order_and_kept_ones_need_no_thread(
    task, data, rows, monkeypatch
):
    monkeypatch.setattr(image_classification, "_KEPT_BYTES", rows[0].pixels().nbytes * 2)
    bounded = task.encode(task.examples(data, "train"))
    asked, together = [], images.decode_parallel
    monkeypatch.setattr(images, "decode_parallel", lambda works: asked.append(len(works)) or together(works))
    for chosen in ([2, 0, 1, 0], [3, 0, 2, 1], [0, 1]):  # two of the first three are kept
        batch = task.collate([bounded[i] for i in chosen])
        assert torch.equal(batch.inputs, torch.stack([rows[i].pixels() for i in chosen]))
        assert batch.labels.tolist() == [rows[i].label for i in chosen]
    assert asked[0] == 4
    assert asked[1:] == [4 - len({3, 0, 2, 1} & set(bounded._kept)), 2 - len({0, 1} & set(bounded._kept))]


def image_folder(folder: Path, numbers: range = range(12)) -> Path:
    for name in NAMES:
        (folder / "train" / name).mkdir(parents=True)
    for i in numbers:
        (folder / "train" / NAMES[i % 3] / f"{i:02d}.png").write_bytes(picture(i))
    (folder / "train" / "cat" / "notes.txt").write_text("no image")
    return folder


def test_an_image_folder_and_a_file_read_alike(tmp_path, task, rows):
    folder = image_folder(tmp_path / "folder")
    examples = task.examples(folder, "train")
    assert [e.where for e in examples[:2]] == [str(folder / "train" / "bird" / f"{n}.png") for n in ("00", "03")]
    prepared = task.encode(examples)
    expected = sorted(range(12), key=lambda i: (i % 3, i))
    assert [row.label for row in prepared] == [rows[i].label for i in expected] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(torch.equal(row.pixels(), rows[i].pixels()) for row, i in zip(prepared, expected, strict=True))
    text = tmp_path / "train.jsonl"
    text.write_text(
        "".join(
            json.dumps({"image": f"folder/train/{NAMES[i % 3]}/{i:02d}.png", "label": NAMES[i % 3]}) + "\n"
            for i in range(12)
        )
    )
    for row, same in zip(task.encode(task.examples(tmp_path, "train")), rows, strict=True):
        assert row.label == same.label
        assert torch.equal(row.pixels(), same.pixels())


def test_a_class_without_images_keeps_its_number(tmp_path):
    task = make()
    folder = image_folder(tmp_path / "folder", range(2, 12, 3))  # dogs only
    assert {row.label for row in task.encode(task.examples(folder, "train"))} == {2}
    (folder / "train" / "bird").rmdir()
    assert {row.label for row in task.encode(task.examples(folder, "train"))} == {2}
    with pytest.raises(TaskError, match=r"the model has 3 classes, but .*train\" names 2 \(cat, dog\); set"):
        make().encode(make().examples(folder, "train"))


def test_the_names_of_the_run_number_the_classes_of_every_site(tmp_path):
    """Folders, ClassLabel and texts of three sites, each of which would number the classes in another way."""
    given = make(task__class_names="dog,bird,cat", task__num_classes=10)
    assert given.classes == 3
    assert given.base.model.config.id2label == {0: "dog", 1: "bird", 2: "cat"}
    folder = image_folder(tmp_path / "folder")
    assert [row.label for row in given.encode(given.examples(folder, "train"))] == [1] * 4 + [2] * 4 + [0] * 4
    image = {"bytes": picture(0), "path": None}
    table = save(tmp_path / "table", [{"image": image, "label": i} for i in range(3)])
    assert [row.label for row in given.encode(given.examples(table, "train"))] == [1, 2, 0]
    features = Features({"image": Image(), "label": ClassLabel(names=["cat", "dog"])})
    (tmp_path / "named").mkdir()
    Dataset.from_list([{"image": image, "label": i} for i in range(2)], features=features).to_parquet(
        str(tmp_path / "named" / "train.parquet")
    )
    assert [row.label for row in given.encode(given.examples(tmp_path / "named", "train"))] == [2, 0]
    given.require_shared_classes()
    (folder / "train" / "Dog").mkdir()
    with pytest.raises(TaskError, match=r"of the run \(dog, bird, cat\), found 4 \(Dog, bird, cat, dog\)"):
        given.encode(given.examples(folder, "train"))
    (folder / "train" / "Dog").rmdir()
    alone = make()
    alone.encode(alone.examples(folder, "train"))
    with pytest.raises(TaskError, match='add this line to the run config: task.class-names = "bird,cat,dog"'):
        alone.require_shared_classes()


def test_folders_that_are_numbers_are_numbers(tmp_path):
    """Sorted as names, "10" would be class 2 and "2" class 3."""
    for number in (0, 1, 2, 10):
        (tmp_path / "train" / str(number)).mkdir(parents=True)
        (tmp_path / "train" / str(number) / "0.png").write_bytes(picture(number))
    plain = make(task__num_classes=11)
    assert [row.label for row in plain.encode(plain.examples(tmp_path, "train"))] == [0, 1, 10, 2]
    plain.require_shared_classes()


def test_names_must_fit_the_model(tmp_path):
    with pytest.raises(ConfigError, match="task.num-classes: 7 contradicts task.class-names, which has 2 names"):
        make(task__class_names="a,b", task__num_classes=7)
    names = {0: "dog", 1: "fish"}
    named = str(vit(tmp_path / "vit", num_labels=2, id2label=names, label2id={name: i for i, name in names.items()}))
    with pytest.raises(
        TaskError, match="class names in the order of .*, found a different order; set task.class-names = .dog,fish"
    ):
        make(task__model=named, task__class_names="fish,dog", task__num_classes=10).base  # noqa: B018
    assert make(task__model=named, task__class_names="dog,fish", task__num_classes=10).classes == 2


HEADS = {
    "its own": (["bird", "cat", "dog"], True, True),
    "unnamed": ([], True, True),
    "other names": (["a", "b", "c"], True, False),
    "more classes": (["bird", "cat", "dog", "fish"], True, False),
    "none": ([], False, False),
}


@pytest.mark.parametrize(
    "case,adapter",
    [
        *((case, LoraAdapter(rank=2)) for case in HEADS),
        ("other names", LoraAdapter(rank=2, targets=r".*\.(query|q_proj)")),
        ("none", AllWeightsAdapter()),
    ],
)
def test_a_pre_trained_model_has_a_head_for_the_runs_classes(tmp_path, caplog, case, adapter):
    """Only a head for other classes is drawn, from run.seed and the same at each site; all else is the base's."""
    from transformers import AutoModel

    own, has_head, is_kept = HEADS[case]
    names = {"id2label": dict(enumerate(own)), "label2id": {n: i for i, n in enumerate(own)}, "num_labels": len(own)}
    folder = vit(tmp_path / "vit", has_head=has_head, **(names if own else {}))
    keys = {"task__model": str(folder), "task__class_names": ",".join(NAMES), "task__num_classes": 10}
    one, same, other = (make(adapter, **keys, run__seed=seed).base for seed in (0, 0, 1))
    with library_logging.quiet_libraries():
        plain = dict(AutoModel.from_pretrained(folder, add_pooling_layer=False).named_parameters())
    each = [{n.replace(".base_layer.", "."): p for n, p in b.model.named_parameters()} for b in (one, same, other)]
    for name, weight in plain.items():
        assert torch.equal(each[0][f"vit.{name}"], weight), name
    heads = [parameters["classifier.weight"] for parameters in each]
    assert heads[0].shape == (3, 16)
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[0], heads[2]) == is_kept
    if is_kept:
        assert torch.equal(heads[0], load_file(folder / "model.safetensors")["classifier.weight"])
    assert one.heads == (() if is_kept else ("classifier",))
    assert any(name.startswith("classifier") for name in one.trained) == (
        adapter.trains_base or not is_kept or adapter.targets == "all-linear"
    )
    assert one.model.config.id2label == dict(enumerate(NAMES))
    assert ("its head is replaced by a new one" in caplog.text) == (case in ("other names", "more classes"))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of PEFT, as it reads it
@pytest.mark.parametrize("has_head", [True, False])
def test_peft_loads_a_new_head(tmp_path, rows, has_head):
    """The files have the whole head, and its logits in PEFT's model are the same."""
    from peft import PeftModel
    from transformers import ViTForImageClassification

    folder = vit(tmp_path / "vit", has_head=has_head, num_labels=7, image_size=32)
    task = make(LoraAdapter(rank=2), task__model=str(folder), task__class_names=",".join(NAMES), task__num_classes=10)
    weights = randomised(task)
    task.show(weights)
    with torch.no_grad():
        wanted = task._logits(task.collate(rows[:3]))
    (tmp_path / "final").mkdir()
    task.save(weights, tmp_path / "final")
    with library_logging.quiet_libraries():
        plain = ViTForImageClassification.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True)
        theirs = PeftModel.from_pretrained(plain, tmp_path / "final").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(pixel_values=task.collate(rows[:3]).inputs).logits, wanted, rtol=1e-4, atol=1e-4
        )


def test_a_base_that_lacks_more_than_its_head_is_refused(tmp_path):
    folder = vit(tmp_path / "vit", has_head=False)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {n: w for n, w in tensors.items() if not n.startswith("layernorm")},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(TaskError, match=r"all weights of the model apart from its head, but .* lacks vit.layernorm"):
        make(task__model=str(folder), task__class_names=",".join(NAMES), task__num_classes=10).base  # noqa: B018


def test_names_of_the_model_decide_where_it_has_them(tmp_path):
    names = {0: "dog", 1: "fish", 2: "bird", 3: "cat"}
    task = make(
        task__model=str(vit(tmp_path / "vit", num_labels=4, id2label=names, label2id={n: i for i, n in names.items()}))
    )
    prepared = task.encode(task.examples(image_folder(tmp_path / "folder"), "train"))
    assert [row.label for row in prepared] == [2] * 4 + [3] * 4 + [0] * 4
    task.require_shared_classes()


@pytest.mark.parametrize("form", ["file", "folder"])
def test_shares_cut_by_label(tmp_path, form, data):
    folder = data if form == "file" else image_folder(tmp_path / "folder")
    task = make(task__partition="pathological", task__classes_per_site=1)
    parts = [task.encode(task.examples(folder, "train", DatasetShard(i, 3))) for i in range(3)]
    assert [{row.label for row in part} for part in parts] == [{0}, {1}, {2}]
    assert [len(part) for part in parts] == [4, 4, 4]
    few = make(task__examples_per_site=5)
    assert len(few.examples(folder, "train")) == 5


def test_bad_rows_are_named_by_file_and_row(tmp_path, task):
    whole = {"image": {"bytes": picture(0), "path": None}, "label": 0}
    cases = {
        "image": ({"image": {"bytes": b"none", "path": None}, "label": 1}, "cannot decode the image in row 2 of"),
        "cut": ({"image": {"bytes": picture(1)[:200], "path": None}, "label": 1}, "decode the image in row 2 of"),
        "none": ({"image": None, "label": 1}, r'expected an image in column "image".* row 2 of .*train.parquet'),
        "unlabelled": ({"image": whole["image"], "label": -1}, r'"label", found an integer in row 2 of'),
        "absent": ({"image": whole["image"], "label": None}, "a class from 0 to 2, .* found no value .* row 2 of"),
    }  # fmt: skip
    for name, (bad, pattern) in cases.items():
        folder = save(tmp_path / name, [whole, bad])
        with pytest.raises(TaskError, match=pattern) as error:
            task.collate(list(task.encode(task.examples(folder, "train"))))  # "cut" is whole at its head
        assert "\n" not in str(error.value)
    for value, found in ((3, "an integer"), (True, "true or false"), (1.0, "a number with a fraction")):
        with pytest.raises(TaskError, match=f"expected a class from 0 to 2, .* found {found} in row 8 of f"):
            task.encode([Example({"image": picture(0), "label": value}, ExampleOrigin("f", 8))])
    folder = image_folder(tmp_path / "folder")
    (folder / "train" / "dog" / "05.png").write_bytes(b"no image")
    with pytest.raises(TaskError, match="cannot decode the image in .*train/dog/05.png"):
        task.encode(task.examples(folder, "train"))


def test_missing_data_is_named(tmp_path, task, data):
    with pytest.raises(TaskError, match='expected a file of the split "test"'):
        task.examples(data, "test")
    with pytest.raises(TaskError, match='expected column "species" in'):
        make(task__target_column="species").examples(data, "train")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(
        TaskError,
        match=r"expected images at <class>/<name> in .* found none in cat; add",
    ):
        task.examples(tmp_path, "train")


def test_a_model_of_another_kind_is_refused(tmp_path):
    from transformers import ResNetConfig, ViTConfig, ViTModel

    with pytest.raises(TaskError, match="cannot load .* as an image classification model"):
        make(task__model=str(bundled.bundled_folder("text-generation"))).base  # noqa: B018
    with library_logging.quiet_libraries():
        ViTModel(
            ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
        ).save_pretrained(tmp_path / "headless")
        ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]).save_pretrained(tmp_path / "resnet")
    with pytest.raises(TaskError, match="lacks the weights classifier.bias, classif"):
        make(task__model=str(tmp_path / "headless")).base  # noqa: B018
    with pytest.raises(TaskError, match="ResNet.* has batch normalization, so it cannot start from scratch"):
        make(task__model=str(tmp_path / "resnet")).base  # noqa: B018
    with pytest.raises(TaskError, match="there is no folder with a model at"):
        make(task__model=str(tmp_path / "nowhere"))


def test_a_quantised_base_without_weights_is_refused():
    with pytest.raises(ConfigError, match="train.quantized-base: a model without weights cannot be quantized"):
        make(LoraAdapter(rank=2), train__quantized_base="8bit").base  # noqa: B018


def test_converted_images_are_counted_in_the_log_and_by_doctor(tmp_path, task, caplog):
    """A 16-bit PNG beside its 8-bit form has the same pixels; a file of a table counts as one of a folder does."""
    import numpy as np
    from PIL import Image as Pil

    from fedveil.console.doctor import data_checks

    values = np.arange(1024, dtype=np.uint16).reshape(32, 32) // 4
    images_ = {"8.png": values.astype(np.uint8), "16.png": values * 257}
    for name in NAMES:
        (tmp_path / "train" / name).mkdir(parents=True)
        for file, pixels in images_.items():
            Pil.fromarray(pixels).save(tmp_path / "train" / name / file)
    rows = task.encode(task.examples(tmp_path, "train"))
    said = "grey from 0 to 65535 scaled to 8 bits (3)"
    assert f"task.data: 3 of 6 images are converted: {said}" in caplog.text
    assert torch.equal(rows[0].pixels(), rows[1].pixels())
    table = tmp_path / "table"
    files = sorted((tmp_path / "train").rglob("*.png"))
    save(table, [{"image": {"bytes": file.read_bytes(), "path": None}, "label": 0} for file in files])
    lines = tmp_path / "lines"
    lines.mkdir()
    shutil.copytree(tmp_path / "train", lines / "train")
    names = [str(file.relative_to(tmp_path)) for file in files]
    (lines / "train.jsonl").write_text("".join(json.dumps({"image": n, "label": 0}) + "\n" for n in names))
    for folder in (tmp_path, table, lines):
        config = run_config.parse({"task.name": "image-classification", "task.target-column": "label",
                                   "task.label-column": "label", "task.data": str(folder)})  # fmt: skip
        (check,) = data_checks.check_run_data(config.task, [])
        assert check.verdict == "ok"
        assert f"; 3 of the first 6 images are converted: {said}" in check.text


def test_files_of_any_ending_and_depth_are_read_and_the_others_are_counted(tmp_path, task, caplog):
    """Images of other kinds, of capital endings and below a class; what an operating system makes is no class."""
    from PIL import Image as Pil

    from fedveil.console.doctor import data_checks

    folder = tmp_path / "train"
    endings = ("png", "jpg", "jpeg", "tif", "tiff", "bmp", "webp", "gif", "JPG", "PNG")
    for name in NAMES:
        for number, ending in enumerate(endings):
            file = folder / name / f"patient {number % 2}" / f"{number}.{ending}"
            file.parent.mkdir(parents=True, exist_ok=True)
            Pil.new("RGB", (32, 32), (80 * NAMES.index(name), 0, 0)).save(file)
    for made in ("__MACOSX/bird/._0.png", ".DS_Store", "Thumbs.db", "cat/Thumbs.db", "cat/.DS_Store", "@eaDir/0.png"):
        (folder / made).parent.mkdir(exist_ok=True, parents=True)
        (folder / made).write_bytes(b"")
    examples = task.examples(tmp_path, "train")
    assert [(Path(str(e.origin)).parent.parent.name, e.values["label"]) for e in examples] == [
        (name, name) for name in NAMES for _ in endings
    ]
    assert examples[0].class_names == tuple(NAMES)
    assert [row.label for row in task.encode(examples)] == [0] * 10 + [1] * 10 + [2] * 10
    assert "not read" not in caplog.text
    for other in ("cat/a.heic", "cat/deep/b.heic", "c.png", "dog/notes"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"")
    task.examples(tmp_path, "train")
    said = "4 files were not read: .heic (2), .png (1), no ending (1)"
    assert f'task.data: "{folder}": {said}' in caplog.text
    config = run_config.parse({"task.name": "image-classification", "task.target-column": "label",
                               "task.label-column": "label", "task.data": str(tmp_path)})  # fmt: skip
    (check,) = data_checks.check_run_data(config.task, [])
    assert f"30 images in the folders of {folder}; {said}" in check.text


@pytest.mark.parametrize("path", ["../outside.png", "in/../../outside.png", "ABSOLUTE", "/dev/zero", "pipe", "train"])
def test_a_path_of_a_row_stays_in_the_folder_and_names_a_file(tmp_path, task, path):
    """Nothing of it is opened: an open of the pipe, which nobody writes to, would not return."""
    data = tmp_path / "data"
    (data / "train").mkdir(parents=True)
    (tmp_path / "outside.png").write_bytes(picture(0))
    os.mkfifo(data / "pipe")
    given = str(tmp_path / "outside.png") if path == "ABSOLUTE" else path
    (data / "train.jsonl").write_text(json.dumps({"image": given, "label": 0}))
    reason = "it does not lead to a file" if path in ("pipe", "train") else "the path leads outside the data folder"
    with pytest.raises(TaskError, match=f"names in row 1 of .*train.jsonl: {reason}; correct the path"):
        task.encode(task.examples(data, "train"))
    inside = data / "train" / "0.png"
    inside.symlink_to(tmp_path / "outside.png")  # the site made the link
    for allowed in ("train/0.png", str(inside), "./train/0.png"):
        (data / "train.jsonl").write_text(json.dumps({"image": allowed, "label": 0}))
        assert len(task.encode(task.examples(data, "train"))) == 1
