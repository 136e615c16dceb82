"""The most tokens of an example: task.max-tokens or, if that is 0, a length that follows the examples.

| task.max-tokens | the most tokens of an example |
|---|---|
| given | that number; cut examples are counted |
| 0, the default | twice the length that 99 % of the examples do not exceed, at most the base's context |

The default cuts a few very long examples, which would otherwise set the memory of a training step. It refuses data of
which the context would cut more than 5 %: only a length that was given may do that.

A site's length is its own. No message and no sum depends on it, and the server cuts its test examples by their own
lengths, so the scores of all rounds are for the same texts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fedveil.errors import TaskError

SAMPLE = 2000  # examples of which the length is measured before all are prepared
WHOLE_PERCENT = 99
MARGIN = 2
MAX_CUT = 0.05  # the part of the examples that may be cut without a given length
_KEPT_PERCENT = 95

Lengths = Int[np.ndarray, " examples"]


def spread_indices(count: int) -> range:
    """Return the positions of at most SAMPLE of `count` examples, evenly spread, so that sorted files are seen whole.

    They depend on nothing else, so that the same file always has the same length.
    """
    return range(0, count, -(-count // SAMPLE) or 1)


def length_of(lengths: Sequence[int] | Lengths, context: int | None) -> int:
    """Return the most tokens of an example, by the lengths of whole examples and the base's context."""
    most = sys.maxsize if context is None else context
    return min(most, MARGIN * percentile(lengths, WHOLE_PERCENT)) if len(lengths) else most


def percentile(lengths: Sequence[int] | Lengths, percent: int) -> int:
    """Return the smallest length that at least `percent` of the examples do not exceed."""
    return int(np.percentile(np.asarray(lengths), percent, method="inverted_cdf"))


def require_whole(cut: int, lengths: Lengths, given: int, context: int | None, model: str) -> None:
    """Raise TaskError if the base's context cuts more than MAX_CUT of the examples and no length was `given`."""
    if given or context is None or cut <= MAX_CUT * len(lengths):
        return
    raise TaskError(
        f"task.max-tokens: expected examples of which at most {100 * MAX_CUT:g} % are longer than {context} tokens, "
        f"the context of {model}, found {describe_share(cut, len(lengths))} longer ("
        f"{percentile(lengths, _KEPT_PERCENT)} tokens would keep {_KEPT_PERCENT} % whole); use a base with a longer "
        f"context, shorten the examples, or set task.max-tokens = {context} to train on what is left of them"
    )


def describe_share(count: int, total: int) -> str:
    """Return "12 of 400 (3.0 %)"."""
    return f"{count:,} of {total:,} ({100 * count / max(1, total):.1f} %)"


def describe_remedy(lengths: Lengths, limit: int, given: int, context: int | None, model: str) -> str:
    """Return what to do about cut examples."""
    if not given:
        return f"set task.max-tokens to keep more (now at most {limit})"
    if given == context:
        return f"shorten the examples: {model} has no more room"
    kept = f"{percentile(lengths, _KEPT_PERCENT)} tokens keep {_KEPT_PERCENT} % whole"
    return f"raise it ({kept})" if context is None else f"raise it, to at most {context} ({kept})"
