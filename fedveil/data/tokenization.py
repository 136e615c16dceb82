"""Tokenize many texts at a time, so that the tokenizer's own threads work in parallel."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, final

_REMEMBERED = 1 << 14  # texts: in some data, one source occurs with many targets


@final
class CachedTokenizer:
    """A tokenizer without special tokens. It caches recent texts, so that equal ones are tokenized once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of everything that determines the tokens; "" if the tokenizer is not a fast one."""
        if not self._tokenizer.is_fast:
            return ""
        return hashlib.sha256(self._tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, as the tokenizer's `encode` returns them one by one."""
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        if new := list(dict.fromkeys(text for text in texts if text not in self._known)):
            self._known.update(zip(new, self._encoded(new), strict=True))
        return [self._known[text] for text in texts]

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        if not self._tokenizer.is_fast:
            return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self._tokenizer.encode("", add_special_tokens=False)  # disables truncation and padding, as for a single text
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]
