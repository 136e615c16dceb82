"""Row values as text: in full for a model, and described for messages.

A message contains the type and length of a value, never its content, because a row may describe a patient.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Mapping, Sequence

__all__ = ["as_text", "describe_value", "filled_text"]


def as_text(value: object) -> str | None:
    """Return a value as it would be written in a file; None for null, NaN, infinity and anything that isn't a scalar.

    Numbers from JSON and CSV are already text, as written in the file; see `row_files.RowFile`.
    """
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else None
        case decimal.Decimal():
            return f"{value:f}" if value.is_finite() else None
        case datetime.datetime():
            return value.isoformat(" ")
        case datetime.date() | datetime.time():
            return value.isoformat()
    return None


def filled_text(value: object) -> str | None:
    """Return `as_text(value)`, but None if the text is empty or only whitespace."""
    text = as_text(value)
    return text if text and text.strip() else None


def describe_value(value: object) -> str:
    """Return the type and length of a row value, for an error or a log line.

    The length of a number is not shown: together with other information, the number of digits could help to guess an
    identifier.
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
