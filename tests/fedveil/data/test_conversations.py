"""Conversations of several turns: both formats, refusals, and the tokens that are learned."""

from __future__ import annotations

import itertools
import json
import logging

import pytest
import torch

from fedveil import config as run_config
from fedveil import tasks
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.console.doctor import data_checks
from fedveil.contract.task import Example
from fedveil.data import batches, packing, prompt_template
from fedveil.data.batches import TokenExample
from fedveil.data.conversation_frame import conversation_frame
from fedveil.data.conversations import Conversation, ConversationError, EmptyTurnError, read_conversation
from fedveil.data.tokenization import TextTokenizer
from fedveil.errors import ConfigError, TaskError
from fedveil.rng import RandomStream
from fedveil.tasks.text_generation import TextGeneration
from tests.fedveil.data.test_tokenization import CHATML, CONVERSATIONS, FAMILIES, LLAMA2, QWEN3, VICUNA, _wrapped

MARKED = (  # as templates with generation marks have them
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [("system", "Be brief."), ("user", "food[Thai]"), ("assistant", "Blue Spice."), ("user", "a b"),
         ("assistant", "Aromi is a pub.")]  # fmt: skip
GPT = {"user": "human", "assistant": "gpt", "system": "system"}


def openai(turns=TURNS) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def sharegpt(turns=TURNS) -> list[dict[str, str]]:
    return [{"from": GPT[role], "value": text} for role, text in turns]


SOURCE = Conversation("Be brief.", (("food[Thai]", "Blue Spice."),), "a b")


def make(template: str = CHATML, **keys: object) -> TextGeneration:
    given = {f"task.{key.replace('_', '-')}": value for key, value in keys.items() if "__" not in key}
    given |= {key.replace("__", "."): value for key, value in keys.items() if "__" in key}
    config = parse({"task.chat-template": True, "task.messages-column": "messages", "task.max-tokens": 96} | given)
    task = tasks.load_task(config, LoraAdapter(rank=2), "cpu")
    assert isinstance(task, TextGeneration)
    tokenizer = task.base.tokenizer
    tokenizer.chat_template = template
    if "<|im_start|>" in template:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.eos_token = "<|im_end|>"
        task.base.model.resize_token_embeddings(len(tokenizer))
    return task


def pieces(task: TextGeneration, row: TokenExample) -> list[str]:
    """Return the texts of a row that are not learned and learned, by turns."""
    bounds = [0, row.start, *(bound for gap in row.gaps for bound in gap), row.length]
    return [task.base.tokenizer.decode(row.ids[start:end]) for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize(("value", "form"), [
    (openai(), "OpenAI"),
    (sharegpt(), "ShareGPT"),
    ([*openai(), {"role": "user", "content": "and?"}], "OpenAI"),
    ([turn | {"tool_calls": None, "weight": None} for turn in openai()], "OpenAI"),
    ([{"role": role, "content": [{"type": "text", "text": text}]} for role, text in TURNS], "OpenAI"),
    ([{"role": role, "content": [{"type": "text", "text": c} for c in text]} for role, text in TURNS], "OpenAI"),
    ([{"from": role, "value": text} for role, text in TURNS], "ShareGPT"),
])  # fmt: skip
def test_both_forms_give_the_same_conversation(value, form):
    source, target = read_conversation(value)
    assert (source, target, source.form) == (SOURCE, "Aromi is a pub.", form)
    assert source.unanswered == (len(value) == 6)
    assert source.texts == ("Be brief.", "food[Thai]", "Blue Spice.", "a b")
    assert source.describe() == "system: Be brief.\nuser: food[Thai]\nassistant: Blue Spice.\nuser: a b"


def changed(at: int, **new: object) -> list[dict[str, object]]:
    return [turn | new if i == at else turn for i, turn in enumerate(openai())]


@pytest.mark.parametrize(("value", "message", "is_empty"), [
    (None, "a list of turns, found no value", True),
    ([], "the list of turns is empty", True),
    (openai(TURNS[:2]), "the assistant gives no answer", True),
    (openai(TURNS[:1]), "the assistant gives no answer", True),
    (changed(2, content=None), 'text in "content" of turn 3, found no value', True),
    (changed(2, content=" \n"), "found an empty text", True),
    (changed(2, content=[]), "of turn 3", True),
    ("secret", "a list of turns, found a text of 6 characters", False),
    ({"role": "secret"}, "a list of turns, found an object", False),
    (["secret"], 'turns with "role" and "content", or with "from" and "value", found a text', False),
    ([{"speaker": "secret"}], "found an object with 1 keys", False),
    ([*openai(), "secret"], "an object as turn 6, found a text", False),
    (changed(1, role="tool"), '"role" of turn 2 must be system, user or assistant', False),
    (changed(1, role="human"), "must be system", False),
    (changed(1, role=["secret"]), "must be system", False),
    ([{"from": "secret", "value": "a"}], '"from" of turn 1 must be system, human, user, gpt or assistant', False),
    ([*openai(), *sharegpt(TURNS[1:])], '"role" of turn 6 must be system', False),
    (openai(TURNS[2:]), "turn 1 must be the user's, but is the assistant's", False),
    (openai([TURNS[1], *TURNS[1:]]), "turn 2 must be the assistant's, but is the user's", False),
    (openai([*TURNS, TURNS[0]]), "turn 6 must be the user's, but is the system's", False),
    (openai([TURNS[0], *TURNS]), "turn 2 must be the user's, but is the system's", False),
    (changed(2, tool_calls=[{"name": "secret"}]), 'turn 3 has "tool_calls", which is not supported: a list', False),
    (changed(2, weight=0), 'turn 3 has "weight", which is not supported', False),
    (changed(1, content=[{"type": "image_url", "image_url": "secret"}]), "only parts of the type", False),
    (changed(1, content={"a": "secret"}), 'text in "content" of turn 2, found an object', False),
    (openai(TURNS[1:3] * 201), "it has 402 turns, but at most 400 are allowed", False),
])  # fmt: skip
def test_what_is_no_conversation_is_refused_without_its_content(value, message, is_empty):
    with pytest.raises(ConversationError) as refused:
        read_conversation(value)
    assert message in str(refused.value)
    assert isinstance(refused.value, EmptyTurnError) == is_empty
    assert "secret" not in str(refused.value)


def test_all_answers_are_learned_and_nothing_else():
    task = make()
    start, user = "<|im_start|>", "<|im_end|>\n<|im_start|>assistant\n"
    wanted = [
        f"{start}system\nBe brief.<|im_end|>\n{start}user\nfood[Thai]{user}", "Blue Spice.<|im_end|>",
        f"\n{start}user\na b{user}", "Aromi is a pub.<|im_end|>",
    ]  # fmt: skip
    for value in (openai(), sharegpt(), [*openai(), {"role": "user", "content": "and?"}]):
        (row,) = task.encode([Example({"messages": value})])
        assert pieces(task, row) == wanted
        assert task.base.tokenizer.decode([row.ids[at] for at in row.targets()]) == wanted[1] + wanted[3]


def test_a_single_exchange_is_the_row_of_a_source_and_a_target():
    long, rows = "food[Thai] " * 30, []
    for source, target in (("food[Thai]", "Blue Spice."), (long, "Blue Spice."), ("a", long)):
        plain, task = make(messages_column=""), make()
        (row,) = plain.encode([Example({"mr": source, "ref": target})])
        (talk,) = task.encode([Example({"messages": openai([("user", source), ("assistant", target)])})])
        assert (talk, talk.cut, talk.whole) == (row, row.cut, row.whole)
        rows.append(row.cut)
    assert rows == [0, 1, 2]


def test_the_mask_is_that_of_transformers_where_a_template_marks_its_answers():
    for family in ("byte level", "metaspace never"):
        tokenizer = _wrapped(FAMILIES[family]())
        tokenizer.chat_template = MARKED
        single = prompt_template.template_frame(tokenizer, "base", ())
        for turns in (TURNS, TURNS[1:], TURNS[1:3], [*TURNS, *TURNS[1:], *TURNS[1:]]):
            count, has_system = sum(role == "assistant" for role, _ in turns), turns[0][0] == "system"
            frame = conversation_frame(tokenizer, single, count, has_system, lambda a, b: TaskError(f"{a} {b}"))
            (tokens,) = TextTokenizer(tokenizer).tokenize([frame.fill(*read_conversation(openai(turns)))])
            expected = tokenizer.apply_chat_template(
                openai(turns), return_assistant_tokens_mask=True, return_dict=True, tokenize=True
            )
            *earlier, _, _, answer = tokens.marks
            learned = [0] * len(tokens.ids)
            for start, end in zip(earlier[::2], earlier[1::2], strict=True):
                learned[start:end] = [1] * (end - start)
            learned[answer:] = [1] * (len(tokens.ids) - answer)
            assert tokens.ids == expected["input_ids"][: len(tokens.ids)]
            assert learned == expected["assistant_masks"][: len(tokens.ids)]
            assert sum(learned) == sum(expected["assistant_masks"]) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_a_conversation_has_the_tokens_of_the_whole_text(family, kind):
    """Every template and tokenizer: the ids are those of the rendered text, and the prompt is the template's own."""
    tokenizer = _wrapped(FAMILIES[family]())
    tokenizer.chat_template, _, _, stop = CONVERSATIONS[kind]
    ends = {tokenizer.convert_tokens_to_ids(name) for name in ("</s>", "<|user|>")}
    single = prompt_template.template_frame(tokenizer, "base", ends)
    frame = conversation_frame(tokenizer, single, 2, False, lambda a, b: TaskError(f"{a} {b}"))
    talk = openai([("user", " food[Thai]"), ("assistant", "Blue Spice.\n"), ("user", "a b"), ("assistant", "b")])
    (tokens,) = TextTokenizer(tokenizer).tokenize([frame.fill(*read_conversation(talk))])
    rendered = tokenizer.apply_chat_template(talk, return_dict=False)
    assert tokens.ids == rendered[: len(tokens.ids)]
    first, end, _, _, answer = tokens.marks
    prompts = [
        tokenizer.apply_chat_template(talk[:count], add_generation_prompt=True, return_dict=False) for count in (1, 3)
    ]
    assert (rendered[:first], rendered[:answer]) == tuple(prompts)
    assert rendered[end - 1] == tokenizer.convert_tokens_to_ids(stop) == single.stop


def test_a_template_that_writes_earlier_answers_without_a_thought_learns_their_text():
    """Qwen3 writes the empty thought only into the last answer."""
    template = QWEN3.replace("m.role == 'assistant'", "loop.last and m.role == 'assistant'")
    task = make(template)
    (row,) = task.encode([Example({"messages": openai(TURNS[1:])})])
    assert pieces(task, row)[1::2] == ["Blue Spice.<|im_end|>", "<think>\n\n</think>\n\nAromi is a pub.<|im_end|>"]
    thinks = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
        "{{ m.content }}", "{{ '<think>\n' if loop.last and m.role == 'assistant' }}{{ m.content }}"
    )
    task = make(thinks)
    (row,) = task.encode([Example({"messages": openai(TURNS[1:])})])
    assert pieces(task, row)[1::2] == ["Blue Spice.<|im_end|>", "Aromi is a pub.<|im_end|>"]


@pytest.mark.parametrize(("template", "message"), [
    (CHATML.replace("<|im_start|>{{", "{{ raise_exception('no system') if m.role == 'system' }}<|im_start|>{{"),
     r"a system turn and 2 questions and answers in tiny, found no system; use another chat model, or remove .* \("),
    (CHATML.replace("messages %}", "messages[-2:] %}", 1), "each text, unchanged, once and in order"),
    (CHATML.replace("{{ m.content }}", "{{ m.content if loop.index < 5 else m.content | upper }}"),
     "once and in order"),
    (CHATML.replace("{{ m.content }}", "{{ m.content if loop.index < 5 else m.content | replace('\t', '') }}"),
     "trims texts at most"),
    (CHATML.replace("{% if add", "{% if messages | length > 2 and add_generation_prompt %}x{% endif %}{% if add"),
     "conversation begins with its prompt for the last answer"),
    (CHATML.replace("<|im_end|>\n{% endfor", "{{ '<|im_end|>' if messages | length < 3 }}\n{% endfor"),
     "ends an answer in the same way as after one question"),
])  # fmt: skip
def test_a_template_that_does_not_carry_the_turns_is_refused_with_the_row(template, message):
    task = make(template)
    task.encode([Example({"messages": openai(TURNS[1:3])})])
    with pytest.raises(TaskError, match=message) as refused:
        task.encode([Example({"messages": openai()})])
    assert str(refused.value).startswith("task.messages-column: expected ")
    assert "Blue Spice" not in str(refused.value)


def test_the_system_turn_may_stand_in_the_first_question():
    template = LLAMA2.replace("{% for m in messages %}", (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}"
        "{% endif %}{% for m in messages %}"
    )).replace("[INST] {{ m", "[INST] {{ s ~ '//' if s is defined and loop.first }}{{ m")  # fmt: skip
    tokenizer = _wrapped(FAMILIES["byte level"]())
    tokenizer.chat_template = template
    single = prompt_template.template_frame(tokenizer, "base", ())
    frame = conversation_frame(tokenizer, single, 2, True, lambda a, b: TaskError(f"{a} {b}"))
    text = frame.fill(*read_conversation(openai())).text
    assert text == tokenizer.apply_chat_template(openai(), tokenize=False)
    assert text.startswith("<s>[INST] Be brief.//food[Thai] [/INST] Blue Spice. </s>[INST] a b [/INST] Aromi")


def test_a_long_conversation_loses_its_oldest_exchanges_and_is_counted(caplog):
    task, turns = make(max_tokens=60), [TURNS[0], *TURNS[1:3] * 4, *TURNS[3:]]
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        rows = task.encode([Example({"messages": openai(turns)}), Example({"messages": openai(TURNS)})])
    whole = make(max_tokens=192).encode([Example({"messages": openai(turns)})])[0]
    (kept,) = make().encode([Example({"messages": openai(TURNS)})])
    single = make().encode([Example({"messages": openai([TURNS[0], *TURNS[3:]])})])[0]
    assert len(single.ids) <= 60 < len(kept.ids)
    assert rows[0] == rows[1] == single
    assert [(row.cut, row.whole) for row in rows] == [(1, len(whole.ids)), (1, len(kept.ids))]
    assert "2 of 2 (100.0 %) examples lose the oldest turns or the end of their source, and 0 of these" in caplog.text
    (row,) = make(max_tokens=len(kept.ids)).encode([Example({"messages": openai(turns)})])
    assert (row, row.cut) == (kept, 1)  # the system turn stays, as few exchanges as possible go
    (row,) = make(max_tokens=30).encode([Example({"messages": openai([*TURNS[:4], ("assistant", "a b " * 40)])})])
    assert (row.cut, row.length, row.gaps) == (2, 30, ())


def test_a_prompt_for_scoring_loses_its_oldest_exchanges_too(monkeypatch):
    task = make(max_tokens=45, evaluate__max_new_tokens=4)
    prompts = []
    monkeypatch.setattr(TextGeneration, "_texts_of", lambda _, rows: prompts.extend(rows) or [""] * len(rows))
    turns = [TURNS[0], *TURNS[1:3] * 4, *TURNS[3:]]
    task._generate([read_conversation(openai(turns))[0], SOURCE, "a"])
    decoded = [task.base.tokenizer.decode(row.ids) for row in prompts]
    asked = task.base.tokenizer.apply_chat_template(
        openai([TURNS[0], TURNS[3]]), tokenize=False, add_generation_prompt=True
    )
    assert decoded[0] == asked
    assert decoded[2] == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_loss_score_and_gradient_are_those_of_the_answers_by_hand():
    task = make(VICUNA.replace("m.role == 'user'", "m.role != 'assistant'"), evaluate__max_new_tokens=2)
    weights = {n: torch.randn_like(w) * 0.1 for n, w in task.initial(RandomStream(bytes(32))).items()}
    rows = task.encode([Example({"messages": openai()}), Example({"messages": openai(TURNS[1:3])})])
    assert [len(row.gaps) for row in rows] == [1, 0]
    task.put(weights)
    total, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            logits = task.base.model(input_ids=torch.tensor([row.ids])).logits[0]
        learned = [at for at in range(1, row.length) if at >= row.start and not any(a <= at < b for a, b in row.gaps)]
        total += sum(
            float(torch.nn.functional.cross_entropy(logits[at - 1], torch.tensor(row.ids[at]))) for at in learned
        )
        count += len(learned)
    assert task.mean_loss(rows) == pytest.approx(total / count, rel=1e-5)
    assert task.evaluate(weights, [Example({"messages": openai()}), Example({"messages": openai(TURNS[1:3])})], False)[
        "loss"
    ] == pytest.approx(total / count, rel=1e-5)
    alone = [float(task.sample_loss(weights, *(t[0] for t in task.samples([row])))) for row in rows]
    lengths = [len(row.targets()) for row in rows]
    mean = sum(a * n for a, n in zip(alone, lengths, strict=True)) / sum(lengths)
    assert mean == pytest.approx(total / count, rel=1e-5)
    predictions = list(task.predict(weights, rows))
    found = sum(
        float(torch.nn.functional.cross_entropy(p.logits["target"], p.wanted, reduction="sum")) for p in predictions
    )
    assert found / count == pytest.approx(total / count, rel=1e-5)


def test_packed_and_padded_batches_have_the_same_targets():
    rows = [TokenExample([1, 2, 3, 4, 5, 6, 7, 8], 2, gaps=((3, 5), (6, 7))), TokenExample([9, 10, 11], 1)]
    padded, packed = batches.collate_batch(rows, 0), packing.collate_packed(rows, 0, 11)
    assert padded.wanted.tolist() == packed.wanted.tolist() == [3, 6, 8, 10, 11]
    assert padded.positions.tolist() == [1, 4, 6, 8, 9]
    assert packed.positions.tolist() == [1, 4, 6, 8, 9]
    everything = batches.collate_batch(rows, 0, whole=True)
    assert everything.wanted.tolist() == [2, 3, 4, 5, 6, 7, 8, 10, 11]


def write(folder, rows, split="train"):
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_rows_of_a_file_are_cached_and_their_forms_are_said(tmp_path, caplog):
    rows = [{"messages": openai(), "id": 1}, {"messages": openai(TURNS[1:3]), "id": "x"}]
    rows.append({"messages": [*openai(), {"role": "user", "content": "and?"}], "id": None})
    data, task = write(tmp_path / "data", [row | {"id": str(row["id"])} for row in rows]), make()
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        first = task.prepare(data, "train", shelf=tmp_path / "shelf").rows
    said = (
        """= "messages": 3 conversations in OpenAI's form; in 1 of them the last turn has no answer and is left out"""
    )
    assert said in caplog.text
    second = task.prepare(data, "train", shelf=tmp_path / "shelf").rows
    assert list(first) == list(second) == list(task.encode(task.examples(data, "train")))
    assert [len(row.gaps) for row in second] == [1, 0, 1]
    task.base.tokenizer.chat_template = CHATML.replace("<|im_start|>", "<|im_start|> ")
    task.__dict__.pop("_conversation_frame")
    assert list(task.prepare(data, "train", shelf=tmp_path / "shelf").rows) != list(first)


def test_rows_without_a_text_are_dropped_and_counted_or_refused(tmp_path):
    rows = [{"messages": openai()}, {"messages": None}, {"messages": openai(TURNS[:2])}]
    data = write(tmp_path / "data", rows)
    with pytest.raises(
        TaskError, match=r'column "messages" of row 2 .*found no value.*or set task\.empty-texts = "drop"'
    ):
        make().prepare(data, "train")
    prepared = make(empty_texts="drop").prepare(data, "train")
    assert (len(prepared.rows), prepared.dropped) == (1, 2)
    write(tmp_path / "data", [*rows, {"messages": [{"role": "tool", "content": "x"}]}])
    with pytest.raises(TaskError, match=r"must be system, user or assistant; correct or drop the row$"):
        make(empty_texts="drop").prepare(data, "train")


def test_a_file_of_conversations_names_the_key(tmp_path):
    data = write(tmp_path / "data", [{"conversations": sharegpt()}])
    with pytest.raises(TaskError, match=r'or task\.messages-column = "conversations" if that column has'):
        tasks.load_task(parse({}), LoraAdapter(rank=2), "cpu").prepare(data, "train")
    rows = make(messages_column="conversations").prepare(data, "train").rows
    assert list(rows) == list(make().encode([Example({"messages": openai()})]))


@pytest.mark.parametrize(("keys", "message"), [
    ({"task.chat-template": False}, r"task\.chat-template: task\.messages-column requires true"),
    ({"task.source-template": "{a}"}, r'task\.source-template: "\{a\}" has no effect with task\.messages-column'),
    ({"task.source-column": "a"}, r'task\.source-column: "a" has no effect with task\.messages-column'),
    ({"task.target-column": "a"}, r'task\.target-column: "a" has no effect with task\.messages-column'),
    ({"task.name": "text-classification"}, 'the task "text-classification" does not support "m"'),
])  # fmt: skip
def test_keys_that_a_conversation_does_not_read_are_refused(keys, message):
    chat = {} if "task.name" in keys else {"task.chat-template": True}
    config = run_config.parse({"task.messages-column": "m"} | chat | keys)
    with pytest.raises(ConfigError, match=message):
        tasks.load_task(config, LoraAdapter(), "cpu")


def test_a_last_turn_of_the_user_without_text_is_left_out():
    for value in ([*openai(), {"role": "user", "content": None}], [*sharegpt(), {"from": "human", "value": " "}]):
        source, target = read_conversation(value)
        assert (source, target, source.unanswered) == (SOURCE, "Aromi is a pub.", True)
    with pytest.raises(EmptyTurnError):
        read_conversation([*openai(TURNS[:3]), {"role": "user", "content": ""}, {"role": "assistant", "content": ""}])
    with pytest.raises(EmptyTurnError, match="the assistant gives no answer"):
        read_conversation([{"role": "user", "content": ""}])


def test_doctor_counts_conversations_that_lack_a_text(tmp_path):
    rows = [openai(), sharegpt(), changed(2, content="")]
    keys = {"task.data": str(tmp_path), "task.messages-column": "messages", "task.chat-template": True}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows[:1]))
    (check,) = data_checks.check_run_data(parse(keys).task, [])
    assert check.verdict == "ok"
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows[::2]))
    (check,) = data_checks.check_run_data(parse(keys).task, [])
    assert check.verdict == "fail"
    assert "found 1 rows without one, the first is row 2" in check.text
    (check,) = data_checks.check_run_data(parse(keys | {"task.empty-texts": "drop"}).task, [])
    assert (check.verdict, "; 1 rows without a text are dropped" in check.text) == ("ok", True)
    broken = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(broken) + "\n")
    (check,) = data_checks.check_run_data(parse(keys).task, [])
    assert check.verdict == "ok"  # the preview gives the reason for the refusal
