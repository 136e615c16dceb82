"""Vision-language task on the bundled base: rows, training, the loss compared with transformers' own, bad input."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from fedveil import config as run_config
from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.hadamard import HadamardLoraAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.task import DatasetShard, Example, ExampleOrigin
from fedveil.errors import ConfigError, TaskError
from fedveil.models import bundled, library_logging
from fedveil.tasks import load_task, vision_language
from fedveil.tasks.vision_language import CAPTION_PROMPT, CHOICE_PROMPT, VisionLanguage


def picture(seed: int) -> bytes:
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (40 + seed, 60, 3), generator=generator, dtype=torch.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(out, "PNG")
    return out.getvalue()


def make(adapter=LoraAdapter(rank=2), **keys: object) -> VisionLanguage:
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    flat = {"task.name": "vision-language", "task.target-column": "caption", "train.batch-size": 3} | flat
    task = load_task(run_config.parse(flat), adapter, "cpu")
    assert isinstance(task, VisionLanguage)
    return task


def save(folder: Path, rows: list[dict], split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    Dataset.from_list(rows).to_parquet(str(folder / f"{split}.parquet"))
    return folder


@pytest.fixture(scope="module")
def task() -> VisionLanguage:
    return make(evaluate__max_new_tokens=6)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Six images, one or two captions each."""
    captions = [["A dog.", "A small dog."], ["A cat."], ["Two boats."], ["A red car."], ["A tree."], ["A bird flies."]]
    rows = [{"image": {"bytes": picture(i), "path": None}, "caption": c} for i, c in enumerate(captions)]
    return save(tmp_path_factory.mktemp("data") / "images", rows)


@pytest.fixture(scope="module")
def rows(task, data):
    return task.encode(task.examples(data, "train"))


def randomised(task: VisionLanguage) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(577215)
    return {n: 0.1 * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}


def test_a_row_is_image_prompt_caption_end(task, data, rows):
    assert len(rows) == 7  # one image has two captions
    image, tokenizer = task.base.image_token, task.base.tokenizer
    row = rows[2]
    assert row.ids[:16] == [image] * 16
    assert image not in row.ids[16:]
    assert tokenizer.decode(row.ids[16 : row.start]) == CAPTION_PROMPT + "\n"
    assert tokenizer.decode(row.ids[row.start :]) == "A cat." + tokenizer.eos_token
    assert rows[0].ids[: rows[0].start] == rows[1].ids[: rows[1].start]


def test_an_answer_has_the_tokens_of_the_whole_text_and_ends_its_turn():
    """LLaVA's template on a base whose turn does not end with the tokenizer's end token."""
    task = make()
    task.base.tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    task.base.model.resize_token_embeddings(len(task.base.tokenizer))
    task.base.processor.chat_template = (
        "{% for m in messages %}{{ 'USER:' if m.role == 'user' else 'ASSISTANT:' }}{% for part in m.content %}"
        "{{ ' <image>' if part.type == 'image' else ' ' + part.text | trim }}{% endfor %}"
        "{{ '<|turn|>' if m.role == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    (row,) = task.encode([Example({"image": picture(1), "caption": " A dog. "})])
    tokenizer, image = task.base.tokenizer, task.base.image_token
    whole = f"USER: <image> {CAPTION_PROMPT} ASSISTANT: A dog.<|turn|>"
    ids = tokenizer.encode(whole, add_special_tokens=False)
    at = ids.index(image)
    assert row.ids == [*ids[:at], *[image] * 16, *ids[at + 1 :]]
    assert tokenizer.decode(row.ids[row.start :]) == " A dog.<|turn|>"
    assert task.end_tokens == (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|turn|>"))
    task.base.processor.chat_template = "<image>{{ messages[0].content[1].text }}"
    del task._frame
    with pytest.raises(ConfigError, match=r"task.model: expected a chat template that renders .* use another base"):
        task.encode([Example({"image": picture(1), "caption": "A dog."})])


def test_a_question_becomes_lettered_choices(data):
    asked = make(task__choices_column="choices", task__source_column="question", task__target_column="answer")
    example = {"image": picture(0), "question": "Which?", "choices": ["north", "south", "west"], "answer": 2}
    (row,) = asked.encode([Example(example)])
    text = asked.base.tokenizer.decode(row.ids[16:])
    assert text == f"Which?\nA. north\nB. south\nC. west\n{CHOICE_PROMPT}\nC{asked.base.tokenizer.eos_token}"


def asking(**keys: object) -> VisionLanguage:
    columns = {"choices_column": "choices", "source_column": "question", "target_column": "answer"}
    return make(**{f"task__{key}": value for key, value in columns.items()}, **keys)


def hinted(hint: object) -> list[Example]:
    values = {"image": picture(0), "question": "Which?", "choices": ["north", "south"], "answer": 1, "hint": hint}
    return [Example(values, ExampleOrigin("f", 7))]


def prompt_of(task: VisionLanguage, row) -> str:
    return task.base.tokenizer.decode(row.ids[16 : row.start])


def test_an_open_question_is_trained_with_its_question_and_answers(tmp_path):
    task = make(task__source_column="question", task__target_column="answer", task__hint_column="hint")
    rows = [
        {"image": f"{i}.png", "question": question, "answer": answer, "hint": hint}
        for i, (question, answer, hint) in enumerate(
            [("How many?", ["2"], None), ("What color?", ["red", "dark red"], None), ("What color?", ["red"], "A dog.")]
        )
    ]
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(picture(1))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoded = task.encode(task.examples(tmp_path, "train"))
    end = task.base.tokenizer.eos_token
    assert [task.base.tokenizer.decode(row.ids[16:]) for row in encoded] == [
        f"How many?\n2{end}",
        f"What color?\nred{end}",
        f"What color?\ndark red{end}",
        f"Context: A dog.\nWhat color?\nred{end}",
    ]
    (number,) = task.encode([Example({"image": picture(1), "question": "How many?", "answer": 2})])
    assert number.ids == encoded[0].ids
    weights = randomised(task)
    task.put(weights)
    losses = [task.mean_loss([row]) for row in (encoded[1], encoded[3])]
    assert losses[0] != losses[1]
    with pytest.raises(ConfigError, match="--image: expected at least one image and one --prompt"):
        task.write(weights, [], [("a", picture(1))])
    for value, found in ((None, r"no value \(null\)"), ("  ", "an empty text"), (["a"], "a list of 1 entries")):
        with pytest.raises(TaskError, match=f'expected a question in column "question", found {found} in'):
            task.encode([Example({"image": picture(1), "question": value, "answer": "red"})])
    with pytest.raises(TaskError, match='expected an answer, or a list of them, in column "answer", found no value'):
        task.encode([Example({"image": picture(1), "question": "What?", "answer": None})])
    assert vision_language.INFO.metrics(task.config.task) == vision_language.INFO.metrics(make().config.task)


def test_a_hint_stands_before_the_question_and_a_row_without_one_is_as_before():
    plain, asked = asking(), asking(task__hint_column="hint")
    question = f"Which?\nA. north\nB. south\n{CHOICE_PROMPT}\n"
    (row,) = asked.encode(hinted(" The needle points up. "))
    assert prompt_of(asked, row) == f"Context: The needle points up.\n{question}"
    assert row.cut == 0
    for none in ("", "  ", None):
        assert asked.encode(hinted(none))[0].ids == plain.encode(hinted("unread"))[0].ids
    assert prompt_of(plain, plain.encode(hinted("unread"))[0]) == question


def test_a_hint_too_long_loses_its_end_and_the_question_nothing(caplog):
    short, roomy = asking(task__hint_column="hint", task__max_tokens=70), asking(task__hint_column="hint")
    hint = " ".join(f"word{i}" for i in range(200))
    (row,) = short.encode(hinted(hint))
    context, question = prompt_of(short, row).split("\n", 1)
    assert len(row.ids) <= 70
    assert row.start >= 60
    assert question == f"Which?\nA. north\nB. south\n{CHOICE_PROMPT}\n"
    assert hint.startswith(context.removeprefix("Context: "))
    assert row.cut == 1
    assert "task.max-tokens = 70: 1 of 1 (100.0 %) examples lose the end of their hint, or 0 of these" in caplog.text
    assert short.base.tokenizer.decode(row.ids[row.start :]) == "B" + short.base.tokenizer.eos_token
    whole = roomy.encode(hinted("word0 word1"))[0]
    assert set(row.inputs()) == set(whole.inputs())
    none = asking(task__hint_column="hint", task__max_tokens=short.encode(hinted(""))[0].start + 2)
    assert none.encode(hinted("é" * 300))[0].ids == none.encode(hinted(""))[0].ids
    with pytest.raises(ConfigError, match="task.max-tokens: image and prompt take"):
        asking(task__hint_column="hint", task__max_tokens=20).encode(hinted(hint))


def test_a_hint_that_is_no_text_or_has_no_question_is_refused(tmp_path):
    with pytest.raises(TaskError, match='a text, or none, in column "hint", found an integer in row 7 of f'):
        asking(task__hint_column="hint").encode(hinted(3))
    with pytest.raises(ConfigError, match=r'captions have no hints \("hint"\)'):
        make(task__hint_column="hint")
    row = {"image": {"bytes": picture(0), "path": None}, "question": "Which?", "choices": ["n", "s"], "answer": 1}
    with pytest.raises(TaskError, match='expected column "hint" in'):
        asking(task__hint_column="hint").examples(save(tmp_path / "asked", [row]), "train")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"choices": ["north"]}, r"expected a text in \"question\" and 2 to 26 choices"),
        ({"answer": 3}, r"expected an index from 0 to 2 in \"answer\", found an integer in row 7 of f"),
        ({"answer": None}, "expected an index from 0 to 2"),
        ({"question": None}, "expected a text in"),
    ],
)
def test_a_question_without_what_it_needs_is_refused(change, said):
    asked = make(task__choices_column="choices", task__source_column="question", task__target_column="answer")
    example = {"image": picture(0), "question": "Which?", "choices": ["n", "s", "w"], "answer": 2}
    with pytest.raises(TaskError, match=said):
        asked.encode([Example(example | change, ExampleOrigin("f", 7))])


def test_only_the_language_model_is_trained(task):
    assert task.spec
    assert all(name.startswith("layers.") for name in task.spec)
    wanted = {n for n, p in task.base.model.named_parameters() if p.requires_grad}
    assert all("language_model" in name and "lora" in name for name in wanted)
    assert len(wanted) == len(task.spec)


@pytest.mark.parametrize("adapter", [AllWeightsAdapter(), HadamardLoraAdapter(rank=2)], ids=["all", "hadamard"])
def test_other_adapters_are_of_the_language_model_too(adapter):
    other = make(adapter)
    model = other.base.model
    assert not any(p.requires_grad for n, p in model.named_parameters() if "vision" in n or "projector" in n)
    assert (
        other.trainer(
            other.encode(Example.from_columns([{"image": picture(1), "caption": "A dog."}])), rng.initial_stream(0, "b")
        )
        .train(other.initial(rng.initial_stream(0, "weights")))
        .report["steps"]
        == 1
    )


def test_loss_equals_that_of_the_original_model(data):
    """The base alone, by transformers' own processor and loss, one row at a time."""
    from PIL import Image
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    task = make(AllWeightsAdapter())
    folder = bundled.bundled_folder("vision-language")
    with library_logging.quiet_libraries():
        plain = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        processor = AutoProcessor.from_pretrained(folder)
    total = count = 0
    for i, caption in ((1, "A cat."), (2, "Two boats.")):
        image = Image.open(io.BytesIO(picture(i)))
        content = [{"type": "image"}, {"type": "text", "text": CAPTION_PROMPT}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        start = processor(images=[image], text=[prompt], return_tensors="pt")["input_ids"].shape[1]
        full = processor(images=[image], text=[prompt + caption + task.base.tokenizer.eos_token], return_tensors="pt")
        labels = full["input_ids"].clone()
        labels[:, :start] = -100
        terms = int((labels != -100).sum())
        total += float(plain(**full, labels=labels).loss.detach()) * terms
        count += terms
    task.put(task.initial(rng.initial_stream(0, "weights")))
    mine = task.mean_loss(task.encode(list(task.examples(data, "train"))[1:3]))
    assert mine == pytest.approx(total / count, rel=1e-5)


def test_padding_and_the_company_in_a_batch_change_nothing(task, rows):
    task.put(randomised(task))
    together = task.mean_loss(rows[:3]) * sum(len(r.ids) - r.start for r in rows[:3])
    apart = sum(task.mean_loss([r]) * (len(r.ids) - r.start) for r in rows[:3])
    assert together == pytest.approx(apart, rel=1e-4)


def test_the_image_matters(task, rows):
    """Each row's own image stands behind its tokens: swapping two images changes both losses."""
    from dataclasses import replace

    task.put(randomised(task))
    swapped = replace(rows[2], inputs=rows[3].inputs)
    assert task.mean_loss([rows[2]]) != task.mean_loss([swapped])


def test_images_beyond_the_memory_bound_are_decoded_again(task, data, rows, monkeypatch):
    monkeypatch.setattr(vision_language, "_KEPT_BYTES", rows[0].inputs()["pixel_values"].nbytes * 2)
    bounded = task.encode(task.examples(data, "train"))
    assert bounded[0].inputs() is bounded[0].inputs()  # kept
    assert bounded[-1].inputs() is not bounded[-1].inputs()
    for row, again in zip(rows, bounded, strict=True):
        assert torch.equal(row.inputs()["pixel_values"], again.inputs()["pixel_values"])


def test_predictions_are_the_rows_own(task, rows):
    weights = randomised(task)
    predictions = list(task.predict(weights, rows, generate=True))
    assert len(predictions) == len(rows)
    for row, each in zip(rows, predictions, strict=True):
        assert each.wanted.tolist() == row.ids[row.start :]
        assert each.logits["image"].shape == (16, len(task.base.tokenizer))
        assert len(each.logits["target"]) == len(each.wanted)
        loss = torch.nn.functional.cross_entropy(each.logits["target"], each.wanted)
        task.put(weights)
        assert float(loss) == pytest.approx(task.mean_loss([row]), rel=1e-4)
        assert 1 <= len(each.logits["generated"]) <= 6


@pytest.mark.long
def test_training_learns_the_captions(data):
    task = make(train__epochs=30, train__learning_rate=5e-3, evaluate__max_new_tokens=8)
    examples = list(task.examples(data, "train"))[2:]
    start = task.initial(rng.initial_stream(0, "weights"))
    trained = task.trainer(task.encode(examples), rng.initial_stream(0, "batches")).train(start)
    before, after = task.evaluate(start, examples, True), task.evaluate(trained.weights, examples, True)
    # The captions have three words: scores of four in a row tell nothing.
    assert set(after) == {"loss", "exact_match", "bleu_1", "bleu_2", "bleu_3", "rouge_l"}
    assert after["loss"] < before["loss"] / 3
    assert after["exact_match"] > before["exact_match"]


def test_shares_cut_by_label(tmp_path):
    rows = [{"image": picture(0), "caption": "A dog.", "topic": str(i % 3)} for i in range(30)]
    task = make(task__partition="dirichlet", task__alpha=0.5, task__label_column="topic")
    folder = save(tmp_path / "d", rows)
    parts = [task.examples(folder, "train", DatasetShard(i, 2)) for i in range(2)]
    where = [example.where for part in parts for example in part]
    assert sorted(where) == sorted({f"row {i + 1} of {folder / 'train.parquet'}" for i in range(30)})


def test_images_by_path_lie_beside_the_data_file(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(3))
    (tmp_path / "train.jsonl").write_text(json.dumps({"image": "a.png", "caption": "A dog."}) + "\n")
    task = make()
    (row,) = task.encode(task.examples(tmp_path, "train"))
    (other,) = task.encode(Example.from_columns([{"image": picture(3), "caption": "A dog."}]))
    assert torch.equal(row.inputs()["pixel_values"], other.inputs()["pixel_values"])


def test_bad_rows_are_named_by_file_and_row(tmp_path, task):
    whole = {"image": picture(0), "caption": "A dog."}
    cases = {
        "image": (
            {"image": b"no image", "caption": "x"},
            "cannot decode the image in row 2 of .*train.parquet",
        ),
        "caption": ({"image": picture(1), "caption": " "}, "expected a caption.* in row 2 of .*train.parquet"),
        "none": (
            {"image": picture(1), "caption": None},
            "expected a caption.* found no value \\(null\\) in row 2 of .*train.parquet",
        ),
        "empty": ({"image": None, "caption": "x"}, r'expected an image in column "image".* row 2 of .*train.parquet'),
    }
    for name, (bad, pattern) in cases.items():
        folder = save(tmp_path / name, [whole, bad])
        with pytest.raises(TaskError, match=pattern):
            task.encode(task.examples(folder, "train"))
    (tmp_path / "train.jsonl").write_text(json.dumps({"image": "gone.png", "caption": "A dog."}) + "\n")
    with pytest.raises(
        TaskError, match=r'cannot read the image that column "image" names in row 1 of .*train.jsonl: No such file'
    ):
        task.encode(task.examples(tmp_path, "train"))


def test_a_prompt_without_room_is_refused(data):
    task = make(task__max_tokens=30)
    with pytest.raises(ConfigError, match=r"task.max-tokens: image and prompt take 33 tokens, .* within 30"):
        task.encode(task.examples(data, "train"))


@pytest.mark.long
def test_a_model_without_eyes_or_template_is_refused(tmp_path):
    with pytest.raises(TaskError, match="cannot load .* as an image-text-to-text model with its processor"):
        make(task__model=str(bundled.bundled_folder("text-generation"))).base  # noqa: B018
    copy = tmp_path / "copy"
    shutil.copytree(bundled.bundled_folder("vision-language"), copy)
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(TaskError, match="has no chat template"):
        make(task__model=str(copy)).base  # noqa: B018
