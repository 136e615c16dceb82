"""The text around the turns of a conversation, from a base's chat template.

As in `prompt_template`, the template renders only placeholders, once for each number of turns; no example passes
through it.

| part | content |
|---|---|
| prompt for the last answer | exactly the template's rendering of the turns before it with add_generation_prompt |
| an answer that is trained on | begins where the prompt for it ends or, if the template writes earlier answers |
| | differently (without a thought), where its own text begins |
| | ends with the end-of-turn token or, if the template writes none, where its own text ends |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

from fedveil.data.conversations import Conversation
from fedveil.data.prompt_template import LEFT, RIGHT, TRIMS, PromptFrame, Refusal, find_turn_end, render_messages
from fedveil.data.tokenization import MarkedText
from fedveil.sanitize import sanitize

__all__ = ["ConversationFrame", "conversation_frame"]


@final
@dataclass(frozen=True)
class ConversationFrame:
    """The text around the turns of a conversation.

    Attributes:
        gaps: the text before each turn's own text, and after the last answer's.
        trims: for each turn, the characters that the template strips from the left and the right of the text, as
            arguments to `str.strip`.
        leads, tails: for each answer, how many characters before and after its text are trained on with it.
        has_system: whether the first turn is a system turn.
    """

    gaps: tuple[str, ...]
    trims: tuple[tuple[str | None, str | None], ...]
    leads: tuple[int, ...]
    tails: tuple[int, ...]
    has_system: bool

    def fill(self, source: Conversation, target: str) -> MarkedText:
        """Return the text of a conversation.

        It marks the start and end of each earlier answer that is trained on, the start and end of the last question,
        and the start of the last answer.
        """
        text, places = "", list[tuple[int, int]]()
        turns = (*source.texts, target)
        for gap, turn, (left, right) in zip(self.gaps[:-1], turns, self.trims, strict=True):
            text += gap
            start = len(text)
            text += turn.lstrip(left).rstrip(right)
            places.append((start, len(text)))
        answers = places[self.has_system + 1 :: 2]
        earlier = [
            mark
            for (start, end), lead, tail in zip(answers[:-1], self.leads[:-1], self.tails[:-1], strict=True)
            for mark in (start - lead, end + tail)
        ]
        return MarkedText(text + self.gaps[-1], (*earlier, *places[-2], answers[-1][0] - self.leads[-1]))


def conversation_frame(
    tokenizer: Any, single: PromptFrame, exchanges: int, has_system: bool, refusal: Refusal
) -> ConversationFrame:
    """Return the frame for conversations with `exchanges` questions and answers.

    Args:
        tokenizer: the tokenizer with the chat template.
        single: the template's frame for one question and its answer.
        refusal: returns the error, given the expected and the found text.

    Raises:
        the error from `refusal`: the template refuses these turns, changes them or renders them in a different order,
            or the rendered conversation does not begin with the prompt for the last answer.
    """
    roles = (*(("system",) if has_system else ()), *("user", "assistant") * exchanges)
    texts = [f'fedVeil{i} \n\n <text> & "it\'s"' for i in range(len(roles))]
    kind = f"a chat template for {'a system turn and ' if has_system else ''}{exchanges} questions and answers"

    def render(chosen: Sequence[str], asks: bool = False) -> str:
        messages = [{"role": role, "content": text} for role, text in zip(roles, chosen, strict=False)]
        return render_messages(tokenizer, messages, asks, kind, refusal)

    whole = render(texts)
    gaps = _gaps(whole, texts, kind, refusal)
    padded = _gaps(render([f"{LEFT}{text}{RIGHT}" for text in texts]), texts, kind, refusal)
    trims = _trims(gaps, padded, refusal)
    behind, stop = find_turn_end(gaps[-1], tokenizer)
    if (stop is None) != bool(single.end) or (stop is not None and stop != single.stop):
        raise refusal(f"{kind} that ends an answer in the same way as after one question", sanitize(gaps[-1], 200))
    last = gaps[-1].rstrip() if stop is None else behind
    leads, at = list[int](), 0
    for i, (gap, role) in enumerate(zip(gaps, (*roles, ""), strict=True)):
        at += len(gap)
        if role == "assistant":
            prompt = render(texts[:i], asks=True)
            fits = whole.startswith(prompt) and at - len(gap) <= len(prompt) <= at
            if not fits and i == len(roles) - 1:
                raise refusal(
                    f"{kind} whose conversation begins with its prompt for the last answer",
                    f"the prompt {sanitize(prompt, 200)} and the conversation {sanitize(whole, 200)}",
                )
            leads.append(at - len(prompt) if fits else 0)
        at += len(texts[i]) if role else 0
    stops = {single.stop}
    tails = [_tail(gaps[i + 1], last, tokenizer, stops) for i, role in enumerate(roles[:-1]) if role == "assistant"]
    return ConversationFrame((*gaps[:-1], last), trims, tuple(leads), (*tails, len(last)), has_system)


def _tail(gap: str, last: str, tokenizer: Any, stops: Collection[int]) -> int:
    """Return how many characters after an earlier answer are trained on with it."""
    text, token = find_turn_end(gap, tokenizer)
    if token in stops:
        return len(text)
    return len(last) if gap.startswith(last) else 0


def _gaps(text: str, texts: Sequence[str], kind: str, refusal: Refusal) -> list[str]:
    gaps = []
    for each in texts:
        before, found, text = text.partition(each)
        if not found:
            break
        gaps.append(before)
    if len(gaps) < len(texts) or any(each in gap for each in texts for gap in (*gaps, text)):
        raise refusal(f"{kind} that renders each text, unchanged, once and in order", sanitize(text, 200))
    return [*gaps, text]


def _trims(plain: Sequence[str], padded: Sequence[str], refusal: Refusal) -> tuple[tuple[str | None, str | None], ...]:
    """Return the characters that the template strips from the left and the right of each text."""
    rights, lefts = list[str | None](), list[str | None]()
    for i, (gap, found) in enumerate(zip(plain, padded, strict=True)):
        options = [
            (right, left)
            for right in (TRIMS if i else ("",))
            for left in (TRIMS if i < len(plain) - 1 else ("",))
            if (RIGHT.rstrip(right) if i else "") + gap + (LEFT.lstrip(left) if i < len(plain) - 1 else "") == found
        ]
        if not options:
            raise refusal("a chat template that trims texts at most", sanitize(found, 200))
        rights, lefts = [*rights, options[0][0]], [*lefts, options[0][1]]
    return tuple(zip(lefts[:-1], rights[1:], strict=True))
