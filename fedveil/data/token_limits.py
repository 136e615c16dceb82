"""The maximum number of tokens in an example: task.max-tokens or, if that is 0, a length derived from the examples.

| task.max-tokens | maximum number of tokens in an example |
|---|---|
| set | that number; truncated examples are counted |
| 0, the default | twice the length that 99 % of the examples do not exceed, but at most the base's context |

The default truncates a few very long examples, which would otherwise determine the memory of a training step. It
refuses data if the context would truncate more than 5 % of the examples; only a length that was set may do that.

Each site determines its own length, and no message or sum depends on it. The server truncates its test examples by the
lengths of those examples, so the scores of all rounds are for the same texts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fedveil.errors import TaskError

SAMPLE = 2000  # examples whose length is measured before all examples are prepared
WHOLE_PERCENT = 99
MARGIN = 2
MAX_CUT = 0.05  # the fraction of the examples that may be truncated if no length is given
_KEPT_PERCENT = 95

Lengths = Int[np.ndarray, " examples"]


def spread_indices(count: int) -> range:
    """Return the positions of at most SAMPLE of `count` examples, evenly spread so that they cover sorted files.

    The positions depend on nothing else, so the same file always has the same length.
    """
    return range(0, count, -(-count // SAMPLE) or 1)


def length_of(lengths: Sequence[int] | Lengths, context: int | None) -> int:
    """Return the maximum number of tokens in an example, from the lengths before truncation and the base's context."""
    most = sys.maxsize if context is None else context
    return min(most, MARGIN * percentile(lengths, WHOLE_PERCENT)) if len(lengths) else most


def percentile(lengths: Sequence[int] | Lengths, percent: int) -> int:
    """Return the smallest length that at least `percent` of the examples do not exceed."""
    return int(np.percentile(np.asarray(lengths), percent, method="inverted_cdf"))


def require_whole(cut: int, lengths: Lengths, given: int, context: int | None, model: str) -> None:
    """Raise TaskError if the base's context truncates more than MAX_CUT of the examples and no length is `given`."""
    if given or context is None or cut <= MAX_CUT * len(lengths):
        return
    raise TaskError(
        f"task.max-tokens: {describe_share(cut, len(lengths))} of the examples are longer than {context} tokens, "
        f"the context of {model}, but at most {100 * MAX_CUT:g} % may be; {percentile(lengths, _KEPT_PERCENT)} "
        f"tokens would keep {_KEPT_PERCENT} % whole. Use a base with a longer context, shorten the examples, or "
        f"set task.max-tokens = {context} to train on the truncated examples"
    )


def describe_share(count: int, total: int) -> str:
    """Return "12 of 400 (3.0 %)"."""
    return f"{count:,} of {total:,} ({100 * count / max(1, total):.1f} %)"


def describe_remedy(lengths: Lengths, limit: int, given: int, context: int | None, model: str) -> str:
    """Return advice on what to do about truncated examples."""
    if not given:
        return f"set task.max-tokens to keep more (now at most {limit})"
    if given == context:
        return f"shorten the examples, because {model} does not support more tokens"
    kept = f"{percentile(lengths, _KEPT_PERCENT)} tokens keep {_KEPT_PERCENT} % whole"
    return f"raise it ({kept})" if context is None else f"raise it, to at most {context} ({kept})"
