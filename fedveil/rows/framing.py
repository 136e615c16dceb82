"""What stands around a row's source and target: a newline between them, or the words of the base's chat template.

A template is text of a model folder, so anybody's. transformers renders it in jinja's sandbox; here it is rendered
once, on two marks in place of texts, from a bounded text to a bounded one, and no row goes through it. A row's tokens
are those of its parts behind one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedveil.errors import ConfigError
from fedveil.foreign import shown

SEPARATOR = "\n"
_MOST = 1 << 16  # characters of a template, and of what it writes
_SOURCE, _TARGET = "fedveil0source", "fedveil0target"


@dataclass(frozen=True)
class Frame:
    """Tokens before the source, between it and the target, and behind that: the end token, or what closes an answer."""

    before: list[int]
    between: list[int]
    end: list[int]

    @property
    def length(self) -> int:
        """Tokens before and between."""
        return len(self.before) + len(self.between)


def plain(tokenizer: Any) -> Frame:
    """A begin token, where the tokenizer puts one; a newline; the end token."""
    first = tokenizer("")["input_ids"][:1]
    begin = [int(i) for i in first if i == tokenizer.bos_token_id and i != tokenizer.eos_token_id]
    return Frame(begin, tokenizer.encode(SEPARATOR, add_special_tokens=False), [tokenizer.eos_token_id])


def of_template(tokenizer: Any, base: str) -> Frame:
    """What the tokenizer's own chat template writes around a user's message and its answer, up to the end token.

    Args:
        base: task.model, for errors.

    Raises:
        ConfigError: there is no template, or none that says both texts once, one after the other.
    """
    before, between, after = _parts(_written(tokenizer, base), base)
    ids = [[int(i) for i in tokenizer.encode(text, add_special_tokens=False)] for text in (before, between, after)]
    end = tokenizer.eos_token_id
    return Frame(ids[0], ids[1], [*ids[2][: ids[2].index(end)], end] if end in ids[2] else [end])


def _written(tokenizer: Any, base: str) -> str:
    template = tokenizer.chat_template
    if not template:
        raise _bad(base, "a tokenizer with a chat template", "none")
    if len(str(template)) > _MOST:
        raise _bad(base, f"a chat template of at most {_MOST} characters", f"{len(str(template))}")
    said = [{"role": "user", "content": _SOURCE}, {"role": "assistant", "content": _TARGET}]
    try:
        found = str(tokenizer.apply_chat_template(said, tokenize=False))
    except Exception as error:  # whatever a foreign template raises: jinja's own errors, and any of an operation in it
        raise _bad(base, "a chat template for a message and its answer", shown(error, 200)) from None
    if len(found) > _MOST:
        raise _bad(base, f"a chat template that writes at most {_MOST} characters", f"{len(found)}")
    return found


def _parts(text: str, base: str) -> tuple[str, str, str]:
    before, *rest = text.split(_SOURCE)
    between, *after = rest[0].split(_TARGET) if len(rest) == 1 else ("",)
    if len(after) != 1:
        raise _bad(base, "a chat template that says a message and its answer once each", shown(text, 200))
    return before, between, after[0]


def _bad(base: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        f"task.chat-template: expected {expected} in {shown(base, 200)}, found {found}; take a base that was made for "
        "chats, or leave it out"
    )
