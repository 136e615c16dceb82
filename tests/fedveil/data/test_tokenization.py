"""Tokens of conversations under tokenizers and templates of each kind, compared with values computed by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from fedveil.data import prompt_template
from fedveil.data.tokenization import MarkedText, TextTokenizer

SHARED = Path(__file__).parents[4] / "shared" / "data" / "tokenizers"
SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|bot|>",
]
TEXTS = [
    "Blue Spice serves Thai food.",
    "name[Blue Spice], food[Thai]",
    "Aromi is a pub.",
    "user model assistant",
    "[INST] a [/INST] USER: a b ASSISTANT: b",
] * 3
SOURCE, TARGET = "food[Thai]", "Blue Spice."

LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{{ m.content.lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}",
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GLM = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>' }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>\n{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# (template, prompt, answer, the token that ends it), written by hand
CONVERSATIONS = {
    "llama2": (LLAMA2, "<s>[INST] food[Thai] [/INST]", " Blue Spice. </s>", "</s>"),
    "chatml": (
        CHATML, "<|im_start|>user\nfood[Thai]<|im_end|>\n<|im_start|>assistant\n", "Blue Spice.<|im_end|>", "<|im_end|>"
    ),
    "qwen3": (
        QWEN3, "<|im_start|>user\nfood[Thai]<|im_end|>\n<|im_start|>assistant\n",
        "<think>\n\n</think>\n\nBlue Spice.<|im_end|>", "<|im_end|>",
    ),
    "gemma": (
        GEMMA, "<s><start_of_turn>user\nfood[Thai]<end_of_turn>\n<start_of_turn>model\n", "Blue Spice.<end_of_turn>",
        "<end_of_turn>",
    ),
    "glm": (GLM, "<|user|>\nfood[Thai]<|bot|>\n", "Blue Spice.", "<|user|>"),
    "vicuna": (VICUNA, "USER: food[Thai] ASSISTANT:", " Blue Spice.</s>", "</s>"),
}  # fmt: skip


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # SentencePiece learns within words
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


def _prepending() -> Tokenizer:
    """Llama 2 as its first tokenizer.json has it: a normalizer that puts the blank, no pre-tokenizer."""
    tokenizer = _metaspace("first")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=90,
            special_tokens=SPECIAL,
            unk_token="<unk>",
            initial_alphabet=list("\n<>/"),
            show_progress=False,
        ),
    )
    return tokenizer


FAMILIES = {
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "metaspace never": lambda: _metaspace("never"),
    "prepending": _prepending,
    "byte level": _byte_level,
    "word piece": _word_piece,
    "unigram": _unigram,
}


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request):
    return _wrapped(FAMILIES[request.param]())


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, extra_special_tokens=SPECIAL[3:])


def _row(tokenizer, frame: prompt_template.PromptFrame, source=SOURCE, target=TARGET):
    """Return the tokens of a row's prompt, of its answer, and those of its source."""
    (tokens,) = TextTokenizer(tokenizer).tokenize([frame.conversation(source, target)])
    start, end, answer = tokens.marks
    return [*frame.begin, *tokens.ids[:answer]], [*tokens.ids[answer:], *frame.end], tokens.ids[start:end]


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_a_conversation_has_the_tokens_of_the_whole_text_and_the_template_s_own_prompt(tokenizer, kind):
    template, prompt, answer, stop = CONVERSATIONS[kind]
    tokenizer.chat_template = template
    ends = {tokenizer.convert_tokens_to_ids(name) for name in ("</s>", "<|user|>")}
    frame = prompt_template.template_frame(tokenizer, "base", ends)
    asked, answered, source = _row(tokenizer, frame)
    whole = tokenizer.encode(prompt + answer, add_special_tokens=False)
    ended = [*whole, tokenizer.convert_tokens_to_ids("<|user|>")] if kind == "glm" else whole
    assert asked + answered == ended
    messages = [{"role": "user", "content": SOURCE}, {"role": "assistant", "content": TARGET}]
    rendered = tokenizer.apply_chat_template(messages, return_dict=False)
    assert rendered[: len(whole)] == whole
    assert asked == tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert answered[-1] == frame.stop == tokenizer.convert_tokens_to_ids(stop)
    decoded = tokenizer.decode(source).replace(" ", "").lower()
    assert decoded == SOURCE.lower()
    assert frame.prompt(SOURCE).text == prompt


def test_a_plain_row_has_the_tokens_of_the_whole_text(tokenizer):
    frame = prompt_template.plain_frame(tokenizer)
    asked, answered, _ = _row(tokenizer, frame)
    whole = tokenizer.encode(f"{SOURCE}\n{TARGET}", add_special_tokens=False)
    assert asked + answered == [*whole, tokenizer.eos_token_id]
    assert asked == tokenizer.encode(f"{SOURCE}\n", add_special_tokens=False)


def test_metaspace_tokens_by_hand():
    """No blank stands before the target, which a target that is tokenized alone gets."""
    tokenizer = _wrapped(_metaspace("first"))
    asked, answered, _ = _row(tokenizer, prompt_template.plain_frame(tokenizer), "a", "b")
    assert tokenizer.convert_ids_to_tokens(asked + answered) == ["▁a", "<0x0A>", "b", "</s>"]
    tokenizer.chat_template = LLAMA2
    asked, answered, _ = _row(tokenizer, prompt_template.template_frame(tokenizer, "base", ()), "a", "b")
    pieces = tokenizer.convert_ids_to_tokens(asked)
    assert (pieces[0], pieces[-1], "".join(pieces[1:])) == ("<s>", "▁[/INST]", "[INST]▁a▁[/INST]")
    assert tokenizer.convert_ids_to_tokens(answered) == ["▁b", "▁", "</s>"]


def test_a_token_with_characters_of_prompt_and_answer_belongs_to_the_answer():
    """A blank at the prompt's end is the first word's; an added token keeps the blanks that it takes."""
    tokenizer = _wrapped(_metaspace("never"))
    text = MarkedText("a: b", (3,))
    (tokens,) = TextTokenizer(tokenizer).tokenize([text])
    assert tokenizer.convert_ids_to_tokens(tokens.ids) == ["a", ":", "▁b"]
    assert tokens.marks == (2,)
    from tokenizers import AddedToken

    tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken("<|a|>", rstrip=True), AddedToken("<|e|>", lstrip=True)]}
    )
    (tokens,) = TextTokenizer(tokenizer).tokenize([MarkedText("a<|a|>\n  b  <|e|>", (7, 11))])
    assert tokenizer.convert_ids_to_tokens(tokens.ids) == ["a", "<|a|>", "b", "<|e|>"]
    assert tokens.marks == (2, 3)


def test_templates_that_trim_give_the_same_tokens_as_they_render():
    tokenizer = _wrapped(_byte_level())
    for template in (GEMMA, LLAMA2, QWEN3, CHATML, GLM):
        tokenizer.chat_template = template
        frame = prompt_template.template_frame(tokenizer, "base", ())
        for source, target in ((" \n a ", "\n\n b \n"), ("\t", ""), ("a", " b")):
            messages = [{"role": "user", "content": source}, {"role": "assistant", "content": target}]
            rendered = tokenizer.apply_chat_template(messages, tokenize=False)
            assert rendered.startswith(frame.conversation(source, target).text)
            asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
            assert frame.prompt(source).text == asked


def test_a_template_of_one_exchange_ends_with_the_end_token_unless_the_base_stops_at_the_next_turn():
    tokenizer = _wrapped(_byte_level())
    tokenizer.chat_template = GLM
    assert prompt_template.template_frame(tokenizer, "base", ()).stop == tokenizer.eos_token_id
    tokenizer.chat_template = GLM.replace(
        "{{ m.content }}", "{{ m.content }}{{ messages[9].x.y if messages | length > 2 }}"
    )
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert prompt_template.template_frame(tokenizer, "base", (user,)).stop == tokenizer.eos_token_id


def test_the_switch_of_a_base_that_thinks_as_the_page_says_it():
    """Qwen 3's switch goes on as the trained answer begins; GLM 4.5's makes a prompt that no example had."""
    off = "enable_thinking is defined and not enable_thinking"
    qwen = QWEN3.replace(
        "assistant\n{% endif %}", "assistant\n{% if " + off + " %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    glm = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{{ '/nothink' if " + off + " }}"
        "{% else %}<|bot|>\n<think></think>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{{ '\n<think></think>' if " + off + " }}{% endif %}"
    )
    tokenizer = _wrapped(_byte_level())
    asked = [{"role": "user", "content": "food[Thai]"}]
    for template, goes_on in ((qwen, True), (glm, False)):
        tokenizer.chat_template = template
        whole = prompt_template.template_frame(tokenizer, "base", ()).conversation("food[Thai]", "Blue Spice.").text
        plain = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert whole.startswith(plain)
        switched = tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert switched != plain
        assert whole.startswith(switched + "Blue Spice.") is goes_on


def test_a_tokenizer_without_offsets_splits_where_the_tokens_part():
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    tokens = TextTokenizer(tokenizer)
    assert tokens.fingerprint == ""
    (row,) = tokens.tokenize([MarkedText("é\nab", (0, 1, 2))])
    assert row.ids == [byte + 3 for byte in "é\nab".encode()]
    assert row.marks == (0, 2, 3)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/tokenizers")
def test_the_vocabularies_of_gpt2_and_clip_give_whole_texts():
    merges = [tuple(line.split()) for line in (SHARED / "gpt2_merges.txt").read_text().splitlines()[1:] if line.strip()]
    vocabulary = json.loads((SHARED / "gpt2_vocab.json").read_text())
    gpt2 = Tokenizer(models.BPE(vocabulary, merges))
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt2 = PreTrainedTokenizerFast(tokenizer_object=gpt2, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    asked, answered, _ = _row(gpt2, prompt_template.plain_frame(gpt2), "food[Thai]", "Blue Spice.")
    assert asked == [19425, 58, 817, 1872, 60, 198]
    assert answered == [14573, 43537, 13, 50256]
    asked, answered, _ = _row(gpt2, prompt_template.plain_frame(gpt2), "a", "\n\nb")
    assert (asked, answered) == ([64], [628, 198, 65, 50256])  # one token has two newlines, so it is the answer's
    lines = gzip.decompress((SHARED / "clip_bpe_simple_vocab_16e6.txt.gz").read_bytes()).decode().splitlines()[1:]
    assert len(lines) > 48_894
