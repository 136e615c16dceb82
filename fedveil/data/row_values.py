"""Values of rows in messages: their type and length, never their content, because a row may describe a patient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["describe_value"]


def describe_value(value: object) -> str:
    """Return the type and the length of a row's value, for an error or a log.

    The length of a number is not shown: an identifier could be guessed from the digits around it.
    """
    match value:
        case None:
            return "no value (null)"
        case bool():
            return "true or false"
        case int():
            return "an integer"
        case float():
            return "a number with a fraction" if math.isfinite(value) else "no number (NaN or infinite)"
        case str():
            return f"a text of {len(value):,} characters" if value.strip() else "an empty text"
        case bytes():
            return f"{len(value):,} bytes"
        case Mapping():
            return f"an object with {len(value):,} keys"
        case Sequence():
            return f"a list of {len(value):,} entries"
    return f"a value of type {type(value).__name__}"
