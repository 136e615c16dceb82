"""A bound on what one site weighs in a round.

    n_k <- min(n_k, s / (1 - s) * sum of the others' n),   s from 1/2 to 1

A site says itself how many examples stand behind its upload, and nobody can check that. With s = 1/2 it never weighs
more than all others together, whatever it says. Methods that weigh every site alike do not need the bound.

| case | what happens |
|---|---|
| s = 1 | nothing is bounded |
| a round of one upload | nothing is bounded |
| no site is above the bound | every upload is passed on in the order in which it came |
| one site is above it (with s >= 1/2 there cannot be two) | it may come later than it came, with fewer examples |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from fedveil.contract.method import Upload

_MOST_WAITING = 2


def bounded(uploads: Iterable[Upload], share: float, cut: Callable[[str, int], None]) -> Iterator[Upload]:
    """The uploads, of which none has more than `share` of all examples. At most 3 are in memory at a time.

    Args:
        uploads: as they come.
        share: s, from 1/2 to 1.
        cut: called with the name of a site whose examples were cut, and with the number that counts.
    """
    waiting: list[Upload] = []
    total = 0
    for upload in uploads:
        waiting.append(upload)
        total += upload.num_examples
        del upload
        while waiting and waiting[0].num_examples <= share * total:
            yield waiting.pop(0)
        if len(waiting) > _MOST_WAITING:  # the first has more than half so far, so the others are below the bound
            yield waiting.pop(1)
    while waiting:
        upload = waiting.pop(0)
        others = total - upload.num_examples
        if others and upload.num_examples > share * total:
            counted = max(1, int(share / (1 - share) * others))
            cut(upload.ctx.client, counted)
            upload = replace(upload, num_examples=counted)
        yield upload
        del upload
