"""Tokenize complete texts, and find the token at which a part of a text begins.

A text is always tokenized as a whole, as in the base's own training. SentencePiece tokenizers (Llama 2, Mistral, Phi 3)
produce different tokens for the parts of a text than for the whole text, because they put a space before each part.

| tokenizer | where a part begins |
|---|---|
| fast | at the first token that contains a character of that part, according to the tokenizer's offsets |
| slow, without offsets | after the tokens that the whole text shares with the text before that part |

A token with characters from two parts belongs to the later part. An added token, such as a turn marker that absorbs the
spaces around it, belongs to the part with the token's own characters.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final


@dataclass(frozen=True)
class MarkedText:
    """A text, and the character positions at which its parts begin."""

    text: str
    marks: tuple[int, ...] = ()


@dataclass(frozen=True)
class MarkedTokens:
    """The tokens of a `MarkedText`, and the token positions at which its parts begin."""

    ids: list[int]
    marks: tuple[int, ...] = ()


@final
class TextTokenizer:
    """A tokenizer that adds no special tokens and tokenizes many texts at a time, in its own threads."""

    def __init__(self, tokenizer: Any, check: Callable[[Sequence[int]], None] = lambda ids: None) -> None:
        """Wrap a tokenizer. `check` raises an error for tokens that the base cannot read."""
        self._tokenizer, self._check = tokenizer, check
        self._added = frozenset(tokenizer.added_tokens_decoder)

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of everything that determines the tokens; "" if the tokenizer is not a fast tokenizer."""
        if not self._tokenizer.is_fast:
            return ""
        return hashlib.sha256(self._tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

    def tokenize(self, texts: Sequence[MarkedText]) -> list[MarkedTokens]:
        """Return the tokens of each text, the same as from the tokenizer's `encode`, and the positions of its marks."""
        tokenized = self._tokenize(texts)
        for each in tokenized:
            self._check(each.ids)
        return tokenized

    def _tokenize(self, texts: Sequence[MarkedText]) -> list[MarkedTokens]:
        if not self._tokenizer.is_fast:
            return [self._without_offsets(text) for text in texts]
        self._tokenizer.encode("", add_special_tokens=False)  # disables truncation and padding, as for a single text
        encodings = self._tokenizer.backend_tokenizer.encode_batch(
            [text.text for text in texts], add_special_tokens=False
        )
        return [
            MarkedTokens(ids := encoding.ids, self._places(text, ids, encoding.offsets))
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _places(self, text: MarkedText, ids: list[int], offsets: list[tuple[int, int]]) -> tuple[int, ...]:
        places = []
        for mark in text.marks:
            at = bisect_right(offsets, mark, key=operator.itemgetter(1))
            if at < len(ids) and ids[at] in self._added and text.text[offsets[at][0] : mark].strip():
                at += 1
            places.append(at)
        return tuple(places)

    def _without_offsets(self, text: MarkedText) -> MarkedTokens:
        ids = self._encoded(text.text)
        shared = [common_length(ids, self._encoded(text.text[:mark])) for mark in text.marks]
        return MarkedTokens(ids, tuple(itertools.accumulate(shared, max)))

    def _encoded(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that the two sequences share."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
