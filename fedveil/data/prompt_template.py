"""The text around an example's source and target: a newline between them, or the base's chat template.

A template is text from a model folder, so it is untrusted. transformers renders it in jinja's sandbox, once, with
two placeholders for the texts and with bounded input and output. No example passes through it. An example's
tokens are the concatenated tokens of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedveil.errors import ConfigError
from fedveil.sanitize import sanitize

SEPARATOR = "\n"
_MOST = 1 << 16  # characters of a template, and of its output
_SOURCE, _TARGET = "fedveil0source", "fedveil0target"


@dataclass(frozen=True)
class PromptFrame:
    """Tokens before the source, between source and target, and after the target, up to and including the end token."""

    before: list[int]
    between: list[int]
    end: list[int]

    @property
    def length(self) -> int:
        """Return the number of tokens before the source and between source and target."""
        return len(self.before) + len(self.between)


def plain_frame(tokenizer: Any) -> PromptFrame:
    """Return a frame of a begin token (if the tokenizer adds one), a newline, and the end token."""
    first = tokenizer("")["input_ids"][:1]
    begin = [int(i) for i in first if i == tokenizer.bos_token_id and i != tokenizer.eos_token_id]
    return PromptFrame(begin, tokenizer.encode(SEPARATOR, add_special_tokens=False), [tokenizer.eos_token_id])


def template_frame(tokenizer: Any, base: str) -> PromptFrame:
    """Return the text of the tokenizer's chat template around a user message and its answer, up to the end token.

    Args:
        base: task.model, for errors.

    Raises:
        ConfigError: there is no template, or it does not contain both texts once, one after the other.
    """
    before, between, after = _parts(_written(tokenizer, base), base)
    ids = [[int(i) for i in tokenizer.encode(text, add_special_tokens=False)] for text in (before, between, after)]
    end = tokenizer.eos_token_id
    return PromptFrame(ids[0], ids[1], [*ids[2][: ids[2].index(end)], end] if end in ids[2] else [end])


def _written(tokenizer: Any, base: str) -> str:
    template = tokenizer.chat_template
    if not template:
        raise _bad(base, "a tokenizer with a chat template", "none")
    if len(str(template)) > _MOST:
        raise _bad(base, f"a chat template of at most {_MOST} characters", f"{len(str(template))}")
    messages = [{"role": "user", "content": _SOURCE}, {"role": "assistant", "content": _TARGET}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # an untrusted template may raise any error
        raise _bad(base, "a chat template for a message and its answer", sanitize(error, 200)) from None
    if len(text) > _MOST:
        raise _bad(base, f"a chat template that renders at most {_MOST} characters", f"{len(text)}")
    return text


def _parts(text: str, base: str) -> tuple[str, str, str]:
    before, *rest = text.split(_SOURCE)
    between, *after = rest[0].split(_TARGET) if len(rest) == 1 else ("",)
    if len(after) != 1:
        raise _bad(base, "a chat template that renders a message and its answer once each", sanitize(text, 200))
    return before, between, after[0]


def _bad(base: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        f"task.chat-template: expected {expected} in {sanitize(base, 200)}, found {found}; use a chat model as the "
        "base, or leave it out"
    )
