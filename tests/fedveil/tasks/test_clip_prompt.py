"""A frozen CLIP with a prompt: texts and images compared with transformers', the pure loss, data, bad input."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image

from fedveil import config as run_config
from fedveil import rng
from fedveil.adapters import prompt_tensors
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.task import DatasetShard, Example
from fedveil.contract.trainer import BatchIndices
from fedveil.data.batches import LabelledBatch
from fedveil.errors import ConfigError, TaskError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.models import bundled, clip, library_logging
from fedveil.strategies.dp_fpl import DPFPL
from fedveil.tasks import load_task
from fedveil.tasks.clip_prompt import ClipPrompt
from tools.tiny import clip_prompt as tiny_clip_prompt
from tools.tiny.vision_language import is_public, pictures

NAMES = ["cat", "sea_horse", "very old dog", "ox"]
FORMS = {
    "one": PromptAdapter(3), "sum": PromptAdapter(3, form="sum"), "factored": PromptAdapter(3, form="factored", rank=2),
    "contrast": PromptAdapter(3, form="factored", rank=2, contrast=0.7),
    "transport": PromptAdapter(3, form="transport"),
}  # fmt: skip


def picture(seed: int) -> bytes:
    """Noise whose colour says the class, seed modulo 4."""
    from PIL import Image as Pil

    pixels = torch.randint(0, 80, (20, 14, 3), generator=torch.Generator().manual_seed(seed))
    pixels[..., seed % 3] += 60 * (seed % 4)
    out = io.BytesIO()
    Pil.fromarray(pixels.clamp(max=255).to(torch.uint8).numpy()).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small CLIP whose towers and common space have unequal widths, saved as any other."""
    from transformers import CLIPConfig, CLIPModel

    at = tmp_path_factory.mktemp("clip")
    with library_logging.quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(27182)
        processor = tiny_clip_prompt._processor([f"a photo of a {n}." for n in NAMES] * 3)
        shared = {"num_hidden_layers": 2, "num_attention_heads": 4}
        text = shared | {
            "hidden_size": 24, "intermediate_size": 32, "vocab_size": len(processor.tokenizer), "bos_token_id": 0,
            "max_position_embeddings": 40, "eos_token_id": processor.tokenizer.eos_token_id,
        }  # fmt: skip
        vision = shared | {"hidden_size": 16, "intermediate_size": 32, "image_size": 48, "patch_size": 16}
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12, initializer_factor=1.0))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
        model.logit_scale.data.fill_(1.7)
        model.save_pretrained(at)
        processor.save_pretrained(at)
    return at


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    at = tmp_path_factory.mktemp("data")
    features = Features({"image": Image(), "label": ClassLabel(names=NAMES)})
    for split, count in (("train", 16), ("test", 9)):
        table = [{"image": {"bytes": picture(100 * count + i), "path": None}, "label": i % 4} for i in range(count)]
        Dataset.from_list(table, features=features).to_parquet(str(at / f"{split}.parquet"))
    return at


def make(folder, adapter=PromptAdapter(3), **keys: object) -> ClipPrompt:
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    base = {"task.name": "clip-prompt", "task.model": str(folder), "task.target-column": "label",
            "task.label-column": "label", "train.batch-size": 4}  # fmt: skip
    task = load_task(run_config.parse(base | flat), adapter, "cpu")
    assert isinstance(task, ClipPrompt)
    return task


def stream(purpose: str = "weights", seed: int = 0) -> rng.RandomStream:
    return rng.initial_stream(seed, purpose)


def ready(folder, data, adapter=PromptAdapter(3), **keys):
    task = make(folder, adapter, **keys)
    return task, task.encode(task.examples(data, "train"))


# --- against transformers


def theirs(task, words):
    """Text features by transformers itself, of whole sentences, padded."""
    inputs = task.base.tokenizer([f"{words} {n.replace('_', ' ')}." for n in NAMES], padding=True, return_tensors="pt")
    with torch.no_grad():
        features = task.base.model.get_text_features(input_ids=inputs["input_ids"]).pooler_output
    return torch.nn.functional.normalize(features, dim=-1)


@pytest.mark.parametrize("words", ["a photo of a", "dog"])
def test_texts_are_those_of_transformers(folder, words):
    task = make(folder, task__class_names=",".join(NAMES))
    features = task._texts.features(task._texts.written(words)[None])[0]
    torch.testing.assert_close(features, theirs(task, words), rtol=1e-4, atol=1e-5)


def test_several_contexts_at_once_are_each_alone(folder):
    task = make(folder, task__class_names=",".join(NAMES))
    contexts = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))
    whole = task._texts.features(contexts)
    assert whole.shape == (3, 4, 12)
    for i in range(3):
        torch.testing.assert_close(whole[i], task._texts.features(contexts[i : i + 1])[0], rtol=1e-4, atol=1e-5)


def test_images_and_logits_are_those_of_transformers(folder, data):
    task, seen = ready(folder, data)
    from PIL import Image as Pil

    pictures = [Pil.open(io.BytesIO(e.values["image"]["bytes"])).convert("RGB") for e in task.examples(data, "train")]
    pixels = task.base.processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
    inputs = task.base.tokenizer(
        [f"a photo of a {n.replace('_', ' ')}." for n in NAMES], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = task.base.model(input_ids=inputs["input_ids"], pixel_values=pixels).logits_per_image
    points = torch.stack([row.points for row in seen])
    texts = task._texts.features(task._texts.written("a photo of a")[None])
    torch.testing.assert_close(task.logits(texts, points), logits, rtol=1e-4, atol=1e-4)


def test_patches_are_projected_as_the_whole_is(folder, data):
    _, seen = ready(folder, data, FORMS["transport"])
    _, alone = ready(folder, data)
    assert seen[0].points.shape == (10, 12)
    assert alone[0].points.shape == (1, 12)
    torch.testing.assert_close(seen[3].points[:1], alone[3].points)
    torch.testing.assert_close(seen[3].points.norm(dim=-1), torch.ones(10))
    assert not torch.allclose(seen[3].points[1], seen[3].points[2])


# --- the loss


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_cross_entropy_and_the_contrast(folder, data, form):
    task, seen = ready(folder, data, FORMS[form])
    weights = {n: 50 * w for n, w in task.initial(stream()).items()}
    batch = task.collate(seen[:5])
    texts = task.texts(weights)
    logits = float(torch.tensor(1.7).exp()) * prompt_tensors.class_similarities(task.adapter, batch.inputs, texts)
    expected = -logits.log_softmax(-1)[torch.arange(5), batch.labels].sum()
    if form == "contrast":
        placeholder = task._texts.features(task._texts.written("X X X")[None])[0]
        expected = expected + 5 * 0.7 * prompt_tensors.contrastive_loss(placeholder, texts[1], texts[0], 0.5)
    task.put(weights)
    for loss in (task.loss_at(weights, batch), task.loss_sum(batch)):
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert task.mean_loss(seen[:5]) == pytest.approx(float(expected.detach()) / 5, rel=1e-4)
    grown = torch.autograd.grad(task.loss_sum(batch), list(task.trained.values()))
    assert all(float(g.abs().max()) > 0 for g in grown)


@pytest.mark.long
@pytest.mark.parametrize("form", ["one", "sum", "factored", "contrast"])
def test_per_sample_gradients_by_torch_func(folder, data, form):
    """vmap over rows, each a batch of one, against one backward a row; the whole batch's gradient is their sum."""
    task, seen = ready(folder, data, FORMS[form])
    weights, batch = task.initial(stream()), task.collate(seen[:6])

    def one(w, points, label):
        return task.loss_at(w, LabelledBatch(points[None], label[None]))

    gradients = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(weights, batch.inputs, batch.labels)
    task.put(weights)
    for i in range(6):
        row = task.collate(seen[i : i + 1])
        expected = torch.autograd.grad(task.loss_sum(row), list(task.trained.values()))
        for name, g in zip(weights, expected, strict=True):
            torch.testing.assert_close(gradients[name][i], g, rtol=1e-3, atol=1e-4)
    whole = torch.autograd.grad(task.loss_sum(batch), list(task.trained.values()))
    for name, g in zip(weights, whole, strict=True):
        torch.testing.assert_close(gradients[name].sum(0), g, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["one", "sum", "factored", "contrast"])
def test_a_client_has_the_gradient_of_each_row(folder, data, form):
    """One backward a row, and where the texts are all that rows meet, the same through them."""
    task, seen = ready(folder, data, FORMS[form])
    weights, batch = {n: 20 * w for n, w in task.initial(stream()).items()}, BatchIndices((9, 2, 5))
    local = task.trainer(seen, stream("batches"))
    result = local.rows.per_sample(weights, batch)
    task.put(weights)
    for place, i in enumerate(batch.rows):
        loss = task.loss_sum(task.collate(seen[i : i + 1]))
        assert result.losses[place] == pytest.approx(float(loss.detach()), rel=1e-4)
        for name, g in zip(weights, torch.autograd.grad(loss, list(task.trained.values())), strict=True):
            torch.testing.assert_close(result.gradients[name][place], g, rtol=1e-3, atol=1e-4)
    if form == "contrast":
        with pytest.raises(TaskError, match="gradients with respect to the texts require"):
            local.rows.feature(weights, batch)
        return
    through = local.rows.feature(weights, batch)
    for place in range(3):
        pulled = through.pull(torch.outer(through.left[place], through.right[place]))
        for name, g in pulled.items():
            torch.testing.assert_close(g, result.gradients[name][place], rtol=1e-3, atol=1e-4)


def test_a_transport_has_no_gradients_of_single_rows(folder, data):
    task, seen = ready(folder, data, FORMS["transport"])
    local, weights = task.trainer(seen, stream()), task.initial(stream())
    for act in (local.rows.per_sample, local.rows.feature):
        with pytest.raises(TaskError, match="adapter"):
            act(weights, BatchIndices((0,)))


@pytest.mark.long
@pytest.mark.parametrize("clipped", ["prompt", "texts"])
def test_dp_fpl_learns_on_it_in_process(folder, data, clipped):
    """Two sites with two classes each; without noise and far from the bounds the loss of each site falls."""
    quiet = {"noise_local": 0.0, "noise_global": 0.0, "clip_local": 1e6, "clip_global": 1e6, "clip_texts": 1e6}
    method = DPFPL(
        rank=2, clipped=clipped, adapter=PromptAdapter(3), learning_rate=0.02, learning_rate_local=0.02, **quiet
    )
    task, seen = ready(folder, data, run__deterministic=True, run__rounds=15, task__class_names=",".join(NAMES))
    weights = task.initial(stream())
    sites = {"a": [r for r in seen if r.label < 2], "b": [r for r in seen if r.label >= 2]}
    federation = InProcessFederation(
        MessageExchange(method, "dp_fpl", task.spec),
        task.config,
        lambda site, ctx: task.trainer(sites[site], ctx.rng("batches")),
        list(sites),
        method.init(task.spec, weights, stream("method init")),
    )

    def loss(site: str, chosen) -> float:
        task.put(chosen)
        return task.mean_loss(sites[site])

    before = {site: loss(site, weights) for site in sites}
    federation.run()
    assert all(loss(site, federation.models(site)["client"]) < before[site] - 0.1 for site in sites)


def test_a_gradient_is_the_slope_of_the_loss(folder, data):
    task, seen = ready(folder, data, FORMS["factored"])
    weights, batch = task.initial(stream()), task.collate(seen[:4])
    task.put(weights)
    gradient = torch.autograd.grad(task.loss_sum(batch), task.trained["prompt.u"])[0]
    for i, j in ((0, 0), (2, 1)):
        step = torch.zeros(3, 2)
        step[i, j] = 0.05
        up, down = (float(task.loss_at(weights | {"prompt.u": weights["prompt.u"] + s * step}, batch)) for s in (1, -1))
        assert float(gradient[i, j]) == pytest.approx((up - down) / 0.1, rel=0.05, abs=5e-4)


def test_half_precision_keeps_the_trained_tensors_whole_and_the_loss_near(folder, data):
    exact, half = (ready(folder, data, train__precision=p) for p in ("fp32", "bf16"))
    weights = exact[0].initial(stream())
    losses = []
    for task, seen in (exact, half):
        task.put(weights)
        losses.append(task.mean_loss(seen))
        assert all(p.dtype == torch.float32 for p in task.trained.values())
    assert half[0].base.model.dtype == torch.bfloat16
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_training_lowers_the_loss_and_leaves_the_model_alone(folder, data, form):
    task, seen = ready(folder, data, FORMS[form], train__epochs=8, train__learning_rate=0.02)
    before = {n: p.clone() for n, p in task.base.model.named_parameters()}
    weights = task.initial(stream())
    trained = task.trainer(seen, stream("batches")).train(weights)
    task.put(trained.weights)
    assert task.mean_loss(seen) < trained.report["loss_received"] - 0.1
    assert all(torch.equal(p, before[n]) for n, p in task.base.model.named_parameters())
    assert not any(p.requires_grad for p in task.base.model.parameters())
    assert all(not torch.equal(w, weights[n]) for n, w in trained.weights.items())


# --- scores


def test_accuracy_and_loss_are_those_of_the_predictions(folder, data):
    task, seen = ready(folder, data)
    weights = task.initial(stream())
    logits = torch.stack([p.logits["target"][0] for p in task.predict(weights, seen)])
    right = [int(row.argmax()) == seen[i].label for i, row in enumerate(logits)]
    all_of = task.evaluate(weights, task.examples(data, "train"), generate=False)
    assert all_of["accuracy"] == pytest.approx(sum(right) / 16)
    wanted = torch.tensor([row.label for row in seen])
    assert all_of["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, wanted)), rel=1e-5)
    assert [int(p.wanted) for p in task.predict(weights, seen)] == wanted.tolist()


def test_zero_shot_is_the_model_with_words_and_no_prompt(folder, data):
    task, seen = ready(folder, data)
    points = torch.stack([row.points[0] for row in seen])
    expected = (points @ theirs(task, "a photo of a").T).argmax(-1)
    assert task.zero_shot_logits(seen).argmax(-1).tolist() == expected.tolist()
    with_patches, rows = ready(folder, data, FORMS["transport"])
    torch.testing.assert_close(with_patches.zero_shot_logits(rows), task.zero_shot_logits(seen))


# --- data


def test_an_image_goes_through_the_tower_once(folder, data, monkeypatch):
    looked = []
    original = clip.encode_images
    monkeypatch.setattr(
        clip, "encode_images", lambda base, p, patches: looked.append(len(p)) or original(base, p, patches)
    )
    task, seen = ready(folder, data)
    examples = task.examples(data, "train")
    again = task.encode([*examples[3:7], *examples[3:7]])
    task.evaluate(task.initial(stream()), task.examples(data, "train"), generate=False)
    assert looked == [16]
    assert all(torch.equal(a.points, seen[3 + i % 4].points) for i, a in enumerate(again))
    task.encode(task.examples(data, "test"))
    assert looked == [16, 9]


def test_names_come_from_the_config_or_the_data(folder, data, tmp_path):
    task, seen = ready(folder, data)
    assert task.names == tuple(NAMES)
    assert [row.label for row in seen[:6]] == [0, 1, 2, 3, 0, 1]
    labels = ("ox", "cat", "ox")
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(picture(i))
    lines = [json.dumps({"image": f"{i}.png", "label": name}) for i, name in enumerate(labels)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    task = make(folder)
    with pytest.raises(TaskError, match="expected the name of a class .* found a text of 2 characters in row 1 of"):
        task.encode(task.examples(tmp_path, "train"))
    task = make(folder, task__class_names=" cow , ox,cat")
    assert [row.label for row in task.encode(task.examples(tmp_path, "train"))] == [1, 2, 1]
    task = make(folder, task__class_names="cat")
    examples = task.examples(tmp_path, "train")
    with pytest.raises(
        TaskError, match="expected a class from 0 to 0, or its name, .* found a text of 2 characters in row 1 of"
    ):
        task.encode(examples)


def test_an_image_folder(folder, tmp_path):
    for name, seeds in (("sea_horse", (1, 5)), ("cat", (4,)), ("empty", ())):
        (tmp_path / "train" / name).mkdir(parents=True)
        for seed in seeds:
            (tmp_path / "train" / name / f"{seed}.png").write_bytes(picture(seed))
    task = make(folder)
    assert [row.label for row in task.encode(task.examples(tmp_path, "train"))] == [0, 2, 2]
    assert task.names == ("cat", "empty", "sea_horse")


def test_other_names_later_are_refused(folder, data, tmp_path):
    task, _ = ready(folder, data)
    features = Features({"image": Image(), "label": ClassLabel(names=["b", "a"])})
    Dataset.from_list([{"image": {"bytes": picture(1), "path": None}, "label": 1}], features=features).to_parquet(
        str(tmp_path / "test.parquet")
    )
    with pytest.raises(
        TaskError,
        match=r"the 4 known so far \(cat, sea_horse, very old dog, ox\), found 2 \(b, a\); the unknown ones",
    ):
        task.encode(task.examples(tmp_path, "test"))


def test_sites_have_whole_classes(folder, data):
    task = make(folder, task__partition="pathological", task__classes_per_site=0)
    label_sets = [{e.values["label"] for e in task.examples(data, "train", DatasetShard(i, 2))} for i in range(2)]
    assert label_sets[0] | label_sets[1] == {0, 1, 2, 3}
    assert not label_sets[0] & label_sets[1]


@pytest.mark.parametrize(
    ("adapter", "keys", "message"),
    [
        (LoraAdapter(), {}, 'adapter.kind: the task "clip-prompt" supports a prompt, found "lora"'),
        (
            PromptAdapter(3),
            {"task__name": "image-classification"},
            'supports LoRA pairs or all weights, found "prompt"',
        ),
        (PromptAdapter(3), {"train__compile": True}, 'train.compile: the task "clip-prompt" supports only False'),
        (
            PromptAdapter(3),
            {"train__quantized_base": "4bit"},
            'train.quantized-base: the task "clip-prompt" supports only',
        ),
        (PromptAdapter(38), {}, "adapter.length: expected at most 37"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, adapter, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(folder, adapter, **keys).spec  # noqa: B018


@pytest.mark.parametrize(
    ("names", "length", "message"),
    [("sea_horse,sea horse", 3, r"no duplicates, found \['sea horse'\]"), ("", 3, "neither this key nor the data"),
     ("cat,a very old dog indeed", 34, 'with "a very old dog indeed", .* take .* tokens, but .*; shorten')],
)  # fmt: skip
def test_names_that_cannot_be_are_refused(folder, names, length, message):
    task = make(folder, PromptAdapter(length), task__class_names=names)
    weights = task.initial(stream())
    with pytest.raises(TaskError, match=message):
        task.texts(weights)


@pytest.mark.long
def test_a_model_of_another_kind_is_refused():
    with pytest.raises(TaskError, match="task.model: .* lacks the weights logit_scale"):
        make(bundled.bundled_folder("text-generation")).spec  # noqa: B018


def test_a_broken_image_is_named_by_its_row(folder, data):
    task = make(folder)
    examples = task.examples(data, "train")
    with pytest.raises(TaskError, match="row 2 of .*train.parquet"):
        task.encode([examples[0], Example({**examples[1].values, "image": b"no image"}, examples[1].origin)])


# --- the bundled base


def test_the_bundled_base_is_small_and_knows_pictures_it_never_saw():
    at = bundled.bundled_folder("clip-prompt")
    assert sum(f.stat().st_size for f in at.iterdir()) < 3_000_000
    task = make("tiny", PromptAdapter(), task__class_names="dog,cat")
    assert {n: s.shape for n, s in task.spec.items()} == {"prompt": (16, 96)}


@pytest.mark.skipif("FEDVEIL_DATA" not in os.environ, reason="needs the real data")
@pytest.mark.parametrize(("name", "least"), [("caltech101", 0.04), ("cifar10", 0.3)])
def test_the_bundled_base_tells_unseen_pictures_apart_better_than_chance(name, least):
    """Chance is 0.01 and 0.1."""
    task = make("tiny", PromptAdapter())
    examples = task.examples(Path(os.environ["FEDVEIL_DATA"]) / name, "test")[::4]
    rows = task.encode(examples)
    right = task.zero_shot_logits(rows).argmax(-1) == torch.tensor([row.label for row in rows])
    assert float(right.float().mean()) > least


def test_the_script_repeats_itself_and_shows_public_pictures_alone(tmp_path, monkeypatch):
    features = Features({"image": Image(), "label": ClassLabel(names=NAMES)})
    rows = [{"image": {"bytes": picture(i), "path": None}, "label": i % 4, "source_path": str(i)} for i in range(40)]
    seen = {name: [row for row in rows if is_public(row["source_path"], name)] for name in ("caltech101", "cifar10")}
    assert len(seen["cifar10"]) > len(seen["caltech101"]) > 3
    features["source_path"] = Dataset.from_dict({"a": [""]}).features["a"]
    Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "train.parquet"))
    assert {name: len(pictures(tmp_path, name)) for name in seen} == {name: len(of) for name, of in seen.items()}
    assert len(pictures(tmp_path)) == 40
    asked = []
    monkeypatch.setattr(tiny_clip_prompt, "pictures", lambda *of: asked.append(of) or pictures(*of))
    losses = [tiny_clip_prompt.make(tmp_path, tmp_path, tmp_path / name, seed=5, steps=2) for name in ("one", "two")]
    assert losses[0] == losses[1]
    assert asked == 2 * [(tmp_path, "caltech101"), (tmp_path, "cifar10")]
    for name in ("model.safetensors", "tokenizer.json", "config.json", "processor_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
