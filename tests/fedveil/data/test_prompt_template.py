"""Rows rendered with a chat template, and the number of rows that are too long."""

from __future__ import annotations

import logging

import pytest

from fedveil import tasks
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.contract.task import Example
from fedveil.data import prompt_template
from fedveil.data.tokenization import MarkedText
from fedveil.errors import ConfigError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SOURCE, TARGET = "name[Aromi], area[riverside]", "Aromi is a pub by the river."
ROW = {"mr": SOURCE, "ref": TARGET}


def make(template: str = "", end: str = "", **keys: object):
    task = tasks.load_task(
        parse({f"task.{k.replace('_', '-')}": v for k, v in keys.items()}), LoraAdapter(rank=2), "cpu"
    )
    tokenizer = task.base.tokenizer
    if template:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
        task.base.model.resize_token_embeddings(len(tokenizer))
    if end:
        tokenizer.eos_token = end
    return task, tokenizer


def test_a_row_is_what_the_tokenizer_makes_of_the_conversation_and_learns_the_answer():
    task, tokenizer = make(CHATML, "<|im_end|>", chat_template=True)
    (row,) = task.encode([Example(ROW)])
    conversation = [{"role": "user", "content": SOURCE}, {"role": "assistant", "content": TARGET}]
    whole = tokenizer.apply_chat_template(conversation, tokenize=False).removesuffix("\n")
    assert tokenizer.decode(row.ids) == whole
    asked = tokenizer.apply_chat_template(conversation[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row.ids[: row.start]) == asked
    assert tokenizer.decode(row.ids[row.start :]) == f"{TARGET}<|im_end|>"
    (prompt,) = task._tokens.tokenize([task._frame.prompt(SOURCE)])
    assert task._prompt(prompt, 96) == row.ids[: row.start]  # the prompt with which generation begins


def test_an_answer_that_the_template_leaves_open_gets_the_end_token():
    open_end = "{{ messages[0].content }} =>{% for m in messages[1:] %} {{ m.content }}!\n{% endfor %}"
    task, tokenizer = make(open_end, chat_template=True)
    (row,) = task.encode([Example(ROW)])
    assert tokenizer.decode(row.ids[: row.start]) == f"{SOURCE} =>"
    assert tokenizer.decode(row.ids[row.start :]) == f" {TARGET}!{tokenizer.eos_token}"
    assert task._target_of(f"{TARGET}!") == TARGET


@pytest.mark.parametrize(
    "template, message",
    [
        ("", "found none"),
        ("{{ messages[0]['content'] }}", "once each"),
        ("{{ messages[1]['content'] + messages[0]['content'] }}", "once each"),
        ("{% for m in messages + messages %}{{ m['content'] }}{% endfor %}", "once each"),
        ("{{ messages[0]['content'] + messages[1]['content'] }}", "for a message that is to be answered"),
        (CHATML.replace("m['content']", "m['content'] | replace('\n', ' ')"), "once each"),
        (CHATML.replace("m['content']", "m['content'] | upper"), "once each"),
        (CHATML.replace("m['content']", "m['content'] | escape"), "once each"),
        (CHATML.replace("m['content']", "(m['content'] | replace('\t', ''))"), "trims texts at most"),
        (CHATML.replace("assistant\n", "assistant\n<think>\n"), "conversation begins with its prompt"),
        (CHATML.replace("assistant\n", "model\n"), "conversation begins with its prompt"),
        ("{{ messages[9]['content']['x'] }}", "for a message and its answer"),
        ("{{ 1 / 0 }}", "for a message and its answer"),
        ("{{ ''.__class__.__mro__ }}", "once each|for a message"),  # jinja's sandbox gives nothing away
        ("{{ messages[0]['content'] }}" + "{# #}" * 20_000, "template of at most 65536 characters"),
        ("{{ messages[0]['content'] * 9000 }}", "renders at most 65536"),
        ("{{ 'x' * 200 }}{{ '\x1b[31m' }}", r"found (?!.*\x1b)"),
    ],
)
def test_a_foreign_template_is_bounded_and_named(template, message):
    task, _ = make(template, chat_template=True)
    with pytest.raises(ConfigError, match=message) as refused:
        task.encode([Example(ROW)])
    assert "task.chat-template" in str(refused.value)
    assert len(str(refused.value)) < 800


def test_a_template_without_room_for_a_row_and_a_task_without_chats_are_refused():
    task, _ = make(CHATML, chat_template=True, max_tokens=8)
    with pytest.raises(ConfigError, match="task.max-tokens: the base's chat template takes"):
        task.encode([Example(ROW)])
    with pytest.raises(ConfigError, match='task.chat-template: the task "vision-language" does not support it'):
        make(chat_template=True, name="vision-language")


def test_cut_rows_are_counted_and_said(caplog):
    task, _ = make(max_tokens=24)
    rows = [
        Example({"mr": "a", "ref": "b"}),
        Example({"mr": SOURCE * 4, "ref": "b"}),
        Example({"mr": "a", "ref": TARGET * 9}),
    ]
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        encoded_rows = task.encode(rows)
    assert encoded_rows.cuts.tolist() == [0, 1, 2]
    assert [row.cut for row in encoded_rows] == [0, 1, 2]
    assert "task.max-tokens = 24: 2 of 3 (66.7 %) examples lose the end of their source, and 1 of these" in caplog.text
    assert caplog.text.endswith("; raise it, to at most 192 (75 tokens keep 95 % whole)\n")
    longest, _ = make(max_tokens=192)
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        longest.encode([Example({"mr": SOURCE * 40, "ref": "b"})])
    assert caplog.text.endswith("; shorten the examples, because tiny does not support more tokens\n")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        task.encode(rows[:1])
    assert not caplog.text


def test_the_plain_frame_is_a_newline_and_the_end_token():
    _, tokenizer = make()
    frame = prompt_template.plain_frame(tokenizer)
    assert (frame.begin, frame.end) == ([], [tokenizer.eos_token_id])
    assert frame.conversation("a", "b") == MarkedText("a\nb", (0, 1, 2))
