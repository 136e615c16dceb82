"""The text around an example's source and target: a newline between them, or the base's chat template.

A template is text from a model folder, so it is untrusted. transformers renders it a few times in Jinja's sandbox,
with placeholders for the texts and with limits on input and output. No example passes through it.

| part of a conversation | content |
|---|---|
| prompt | exactly the template's rendering of the user's message with add_generation_prompt |
| answer | the rest of the rendering of both messages, up to the token that ends the turn |
| end of the turn | the first added token after the target; otherwise the token that begins the next user message, if
  the base stops there (GLM); otherwise the tokenizer's end token |

A template whose conversation does not begin with its own prompt is refused, because the model would be trained on one
prompt and queried with another. A template may trim the texts; a template that changes them in any other way is
refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.data.tokenization import MarkedText
from fedveil.errors import ConfigError, TaskError
from fedveil.sanitize import sanitize

SEPARATOR = "\n"
_MOST = 1 << 16  # characters in a template, and in its output
_SOURCE, _TARGET = 'fedVeil0 \n\n <source> & "it\'s"', 'fedVeil0 \n\n <target> & "it\'s"'
LEFT, RIGHT = "\n\t ", " \t\n"  # added around a text to find out what a template trims
TRIMS: tuple[str | None, ...] = ("", "\n", None)  # characters that templates trim; None: all whitespace
_NEXT = "fedVeil0next"

Refusal = Callable[[str, str], ConfigError | TaskError]


@dataclass(frozen=True)
class PromptFrame:
    """The text around a source and a target.

    Attributes:
        begin: tokens before the text.
        before, between: text before the source, and from the source to the end of the prompt.
        lead: text in the answer before the target.
        tail: text in the answer after the target; it ends with the end-of-turn token unless `end` has that token.
        end: tokens after the text.
        stop: the end-of-answer token: the last token of each complete example.
        trims: the characters that the template strips from the left and right of the source, then of the target, as
            arguments to `str.strip`.
    """

    begin: list[int]
    before: str
    between: str
    lead: str
    tail: str
    end: list[int]
    stop: int
    trims: tuple[str | None, ...] = ("", "", "", "")

    def prompt(self, source: str) -> MarkedText:
        """Return the prompt, with marks at the start and end of the source."""
        source = source.lstrip(self.trims[0]).rstrip(self.trims[1])
        start = len(self.before)
        return MarkedText(f"{self.before}{source}{self.between}", (start, start + len(source)))

    def conversation(self, source: str, target: str) -> MarkedText:
        """Return the prompt and answer, with marks at the start and end of the source and the start of the answer."""
        prompt = self.prompt(source)
        return MarkedText(prompt.text + self.answer(target), (*prompt.marks, len(prompt.text)))

    def answer(self, target: str) -> str:
        """Return the text of an answer."""
        return f"{self.lead}{target.lstrip(self.trims[2]).rstrip(self.trims[3])}{self.tail}"


def plain_frame(tokenizer: Any) -> PromptFrame:
    """Return a frame with a begin token (if the tokenizer adds one), a newline, and the end token."""
    first, end = tokenizer("")["input_ids"][:1], int(tokenizer.eos_token_id)
    begin = [int(i) for i in first if i == tokenizer.bos_token_id and i != end]
    return PromptFrame(begin, "", SEPARATOR, "", "", [end], end)


def template_frame(tokenizer: Any, base: str, stops: Collection[int]) -> PromptFrame:
    """Return the frame that the tokenizer's chat template puts around a user message and its answer.

    Args:
        base: task.model, for errors.
        stops: the tokens at which the base stops generating.

    Raises:
        ConfigError: there is no template, the template changes the two texts or does not render each of them once, in
            order, or a conversation does not begin with its prompt.
    """

    def refusal(expected: str, found: str) -> ConfigError:
        return ConfigError(
            f"task.chat-template: expected {expected} in {sanitize(base, 200)}, found {found}; use a chat model as the "
            "base, or leave it out"
        )

    if not tokenizer.chat_template:
        raise refusal("a tokenizer with a chat template", "none")
    return frame_of(tokenizer, tokenizer, stops, lambda text, _: text, refusal)


def frame_of(
    processor: Any, tokenizer: Any, stops: Collection[int], content: Callable[[str, bool], Any], refusal: Refusal
) -> PromptFrame:
    """Return the frame of a chat template, as `template_frame` does, for messages with any content.

    Args:
        processor: the processor with the template.
        content: returns a message's content, given its text and whether it is the first message.
        refusal: returns the error, given the expected and the found text.
    """
    if (length := len(str(processor.chat_template))) > _MOST:
        raise refusal(f"a chat template of at most {_MOST} characters", f"{length}")

    def messages(texts: Sequence[str]) -> list[Mapping[str, Any]]:
        roles = ("user", "assistant", "user")
        return [
            {"role": role, "content": content(text, i == 0)}
            for i, (role, text) in enumerate(zip(roles, texts, strict=False))
        ]

    def render(*texts: str) -> str:
        return _render(processor, messages(texts), False, refusal)

    def checked(expected: str, *texts: str, asks: bool = False) -> str:
        return render_messages(processor, messages(texts), asks, expected, refusal)

    whole = checked("a chat template for a message and its answer", _SOURCE, _TARGET)
    before, between, after = _parts(whole, refusal)
    prompt = checked("a chat template for a message that is to be answered", _SOURCE, asks=True)
    padded = checked("a chat template for texts with blanks", f"{LEFT}{_SOURCE}{RIGHT}", f"{LEFT}{_TARGET}{RIGHT}")
    shared = f"{before}{_SOURCE}"
    if not (whole.startswith(prompt) and prompt.startswith(shared) and len(prompt) <= len(shared + between)):
        raise refusal(
            "a chat template whose conversation begins with its prompt for an answer",
            f"the prompt {sanitize(prompt, 200)} and the conversation {sanitize(whole, 200)}",
        )
    trims = _trims((before, between, after), padded, refusal)
    gap = prompt[len(shared) :]
    tail, stop = find_turn_end(after, tokenizer)
    if stop is None:
        stop = _next_turn(render, tokenizer, stops)
        return PromptFrame([], before, gap, between[len(gap) :], after.rstrip(), [stop], stop, trims)
    return PromptFrame([], before, gap, between[len(gap) :], tail, [], stop, trims)


def render_messages(
    processor: Any, messages: Sequence[Mapping[str, Any]], asks: bool, expected: str, refusal: Refusal
) -> str:
    """Render the messages with the chat template, followed by a prompt for an answer if `asks`.

    Raises the error from `refusal`, with the text `expected`, if the template raises any error or renders too much.
    """
    try:
        return _render(processor, messages, asks, refusal)
    except (ConfigError, TaskError):
        raise
    except Exception as error:  # an untrusted template may raise any error
        raise refusal(expected, sanitize(error, 200)) from None


def _render(processor: Any, messages: Sequence[Mapping[str, Any]], asks: bool, refusal: Refusal) -> str:
    text = str(processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks))
    if len(text) > _MOST:
        raise refusal(f"a chat template that renders at most {_MOST} characters", f"{len(text)}")
    return text


def find_turn_end(after: str, tokenizer: Any) -> tuple[str, int | None]:
    """Return the text after the target through the first added token, and that token; else all text and None."""
    found = []
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.content and (at := after.find(added.content)) >= 0:
            found.append((at, -len(added.content), int(token)))
    if not found:
        return after, None
    at, length, token = min(found)
    return after[: at - length], token


def _next_turn(render: Callable[..., str], tokenizer: Any, stops: Collection[int]) -> int:
    """Return the token that begins the user's next message if the base stops there, else the tokenizer's end token."""
    try:
        _, _, behind = render(_SOURCE, _TARGET, _NEXT).partition(_TARGET)
    except (ConfigError, TaskError):
        raise
    except Exception:  # a template may allow only a single exchange
        behind = ""
    _, token = find_turn_end(behind.partition(_NEXT)[0], tokenizer)
    return token if token is not None and token in stops else int(tokenizer.eos_token_id)


def _parts(text: str, refusal: Refusal) -> tuple[str, str, str]:
    before, *rest = text.split(_SOURCE)
    between, *after = rest[0].split(_TARGET) if len(rest) == 1 else ("",)
    if len(after) != 1:
        raise refusal(
            "a chat template that renders a message and its answer, unchanged, once each", sanitize(text, 200)
        )
    return before, between, after[0]


def _trims(plain: tuple[str, str, str], padded: str, refusal: Refusal) -> tuple[str | None, ...]:
    """Return the characters that the template trims around the texts. Raises ConfigError if it does more than that."""
    for trims in itertools.product(TRIMS, repeat=4):
        left, right = LEFT.lstrip(trims[0]), RIGHT.rstrip(trims[1])
        other_left, other_right = LEFT.lstrip(trims[2]), RIGHT.rstrip(trims[3])
        parts = (plain[0] + left, right + plain[1] + other_left, other_right + plain[2])
        if parts == _parts(padded, refusal):
            return trims
    raise refusal("a chat template that trims texts at most", sanitize(padded, 200))
