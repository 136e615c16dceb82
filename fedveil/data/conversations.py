"""Conversations in one column of a row (task.messages-column), in the OpenAI or the ShareGPT format.

| format | a turn | roles |
|---|---|---|
| OpenAI | `{"role": "user", "content": "..."}` | system, user, assistant |
| ShareGPT | `{"from": "human", "value": "..."}` | system, human or user, gpt or assistant |

The keys of the first turn determine the format of a conversation. The content may be a list of parts, each
`{"type": "text", "text": "..."}`. A conversation may begin with a system turn; then the user and the assistant
alternate, and the assistant answers at least once. A final, unanswered user turn is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from fedveil.data.row_values import as_text, describe_value

__all__ = ["Conversation", "ConversationError", "EmptyTurnError", "read_conversation"]

MAX_TURNS = 400
_FORMS = {"OpenAI": ("role", "content"), "ShareGPT": ("from", "value")}
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_SHAREGPT_ROLES = ("human", "gpt")
_UNSUPPORTED = ("tool_calls", "function_call", "weight", "images", "reasoning_content", "thinking")


class ConversationError(ValueError):
    """A conversation that cannot be trained on. The error text contains no row value."""


@final
class EmptyTurnError(ConversationError):
    """A conversation with missing text: it is null, or has no turns, no answer, or a turn without text."""


@final
@dataclass(frozen=True)
class Conversation:
    """One conversation up to its last answer.

    Attributes:
        system: the text of the system turn; "" if there is none.
        earlier: the earlier questions, each with its answer, in order.
        question: the last question that has an answer.
        form: "OpenAI" or "ShareGPT".
        unanswered: whether a final, unanswered user turn was left out.
    """

    system: str
    earlier: tuple[tuple[str, str], ...]
    question: str
    form: str = field(default="OpenAI", compare=False)
    unanswered: bool = field(default=False, compare=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts of all turns, in order."""
        system = (self.system,) if self.system else ()
        return (*system, *(text for exchange in self.earlier for text in exchange), self.question)

    def without_oldest(self, count: int) -> Conversation:
        """Return the conversation without its `count` oldest exchanges."""
        return replace(self, earlier=self.earlier[count:])

    def describe(self) -> str:
        """Return the turns as lines, each with its role."""
        roles = (*(("system",) if self.system else ()), *("user", "assistant") * len(self.earlier), "user")
        return "\n".join(f"{role}: {text}" for role, text in zip(roles, self.texts, strict=True))


def read_conversation(value: object) -> tuple[Conversation, str]:
    """Return the conversation in a column's value up to its last answer, and that answer.

    Raises:
        EmptyTurnError: some text is missing.
        ConversationError: the value has neither format, an unknown role, or turns in a different order.
    """
    if value is None:
        raise EmptyTurnError("expected a list of turns, found no value (null)")
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ConversationError(f"expected a list of turns, found {describe_value(value)}")
    if len(value) > MAX_TURNS:
        raise ConversationError(f"it has {len(value):,} turns, but at most {MAX_TURNS} are allowed")
    if not value:
        raise EmptyTurnError("the list of turns is empty")
    form = _form_of(value[0])
    turns = [_turn(turn, form, number, number == len(value)) for number, turn in enumerate(value, start=1)]
    system = turns.pop(0)[1] if turns[0][0] == "system" else ""
    for at, (role, _) in enumerate(turns):
        if role != ("user", "assistant")[at % 2]:
            expected, number = ("user", "assistant")[at % 2], len(value) - len(turns) + at + 1
            raise ConversationError(f"turn {number} must be the {expected}'s, but is the {role}'s")
    unanswered = len(turns) % 2 == 1
    answered = turns[:-1] if unanswered else turns
    if not answered:
        raise EmptyTurnError("the assistant gives no answer")
    texts = [text for _, text in answered]
    exchanges = tuple(zip(texts[::2], texts[1::2], strict=True))
    question, target = exchanges[-1]
    return Conversation(system, exchanges[:-1], question, form, unanswered), target


def _form_of(turn: object) -> str:
    if isinstance(turn, Mapping):
        for form, keys in _FORMS.items():
            if turn.get(keys[0]) is not None:
                return form
    raise ConversationError(
        f'expected turns with "role" and "content", or with "from" and "value", found {describe_value(turn)}'
    )


def _turn(turn: object, form: str, number: int, is_last: bool) -> tuple[str, str]:
    """Return the role and the text of a turn. A final user turn, which is left out, may have no text."""
    role_key, text_key = _FORMS[form]
    if not isinstance(turn, Mapping):
        raise ConversationError(f"expected an object as turn {number}, found {describe_value(turn)}")
    for key in _UNSUPPORTED:
        if turn.get(key) not in (None, [], ""):
            raise ConversationError(f'turn {number} has "{key}", which is not supported: {describe_value(turn[key])}')
    said = turn.get(role_key)
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None or (form == "OpenAI" and said in _SHAREGPT_ROLES):
        known = "system, user or assistant" if form == "OpenAI" else "system, human, user, gpt or assistant"
        raise ConversationError(f'"{role_key}" of turn {number} must be {known}')
    text = _text_of(turn.get(text_key), text_key, number)
    if not text.strip() and not (is_last and role == "user"):
        raise EmptyTurnError(
            f'expected text in "{text_key}" of turn {number}, found {describe_value(turn.get(text_key))}'
        )
    return role, text


def _text_of(value: object, key: str, number: int) -> str:
    """Return the text in a turn's content; "" for null."""
    if value is None:
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        parts = [part.get("text") for part in value if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(parts) < len(value) or not all(isinstance(part, str) for part in parts):
            raise ConversationError(f'expected only parts of the type "text" in "{key}" of turn {number}, found others')
        return "".join(map(str, parts))
    if (text := as_text(value)) is None:
        raise ConversationError(f'expected text in "{key}" of turn {number}, found {describe_value(value)}')
    return text
