"""The disclosure ledger of a run folder, summed up: what left each side, how often, in how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.console.runs import by_site
from fedveil.console.runs.folder import Run
from fedveil.console.runs.unseen import NOT_SEEN
from fedveil.records import disclosed
from fedveil.records.disclosed import Kind, words_of

__all__ = [
    "Kind",
    "describe_fields",
    "kinds",
    "learned",
    "never_together",
    "reported",
    "scalars",
    "unlisted",
    "words_of",
]


# Of the names that methods have in common; a site's own number, where a method gives it one, is i or k.
SYMBOLS = (
    "A and B are the two factors of LoRA, an index r or t is the round, i or k the site; n_i, or n_k, is the number of "
    "examples that the site reports."
)


def learned(run: Run) -> list[str]:
    """What each side came to know by the method, in sentences; of a secure run what the server got in its place."""
    words = [sentence.replace("`", "") for sentence in words_of(run.method)]
    return disclosed.in_sum(words, f"the sum over the sites of each round. {NOT_SEEN}") if run.unseen else words


def kinds(run: Run) -> list[Kind]:
    """The ledger by kind of message, uploads first."""
    return disclosed.kinds(run.messages)


def scalars(run: Run) -> dict[str, list[str]]:
    """Names of the values that messages carried beside their tensors, by direction."""
    return disclosed.scalars(run.messages)


def reported(run: Run) -> list[str]:
    """Names of the figures that sites reported about their training."""
    return disclosed.reported(run.attempts)


def never_together(run: Run, site: str) -> bool:
    """Whether no single upload of a site held all the fields that its uploads held together."""
    of_kind = {message["kind"]: message["fields"] for message in run.messages
               if message["direction"] == "up" and message["site"] == site}  # fmt: skip
    uploads: list[set[str]] = [{name for name, *_ in fields} for fields in of_kind.values()]
    return len(uploads) > 0 and all(names != set().union(*uploads) for names in uploads)


def unlisted(run: Run, direction: str) -> str:
    """What the bytes are that the ledger does not list."""
    refused = any(str(why).startswith(by_site.REFUSED) for a in run.attempts for why in a.get("failed", {}).values())
    parts = ["keys and shares of secure aggregation"] if run.unseen else []
    return " and ".join(parts + ["refused uploads"] * (direction == "up" and refused)) or "not listed by field"


def describe_fields(fields: Sequence[tuple[str, str, list[int], int]]) -> dict[str, Any]:
    """Number of tensors, of entries, and the codecs, of one kind of message."""
    entries = 0
    for _, _, shape, _ in fields:
        count = 1
        for side in shape:
            count *= side
        entries += count
    return {"tensors": len(fields), "entries": entries, "codecs": sorted({codec for _, codec, _, _ in fields})}
