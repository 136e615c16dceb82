"""A summary of a run folder's disclosure ledger: what left each side, how often, and in how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.console.runs import per_site
from fedveil.console.runs.run_reader import RunView
from fedveil.console.runs.secagg_summary import not_seen
from fedveil.records import disclosure_summary
from fedveil.records.disclosure_summary import DisclosureKind, what_is_learned

__all__ = [
    "DisclosureKind",
    "describe_fields",
    "message_kinds",
    "never_together",
    "reported_metrics",
    "scalar_names",
    "unlisted_messages",
    "what_is_learned",
    "what_was_learned",
]


# Notation that the methods share; a site's own number, if a method assigns one, is i or k.
SYMBOLS = (
    "A and B are the two LoRA factors; an index r or t is the round, i or k the site; n_i or n_k is the number of "
    "examples that the site reports."
)


def what_was_learned(run: RunView) -> list[str]:
    """Return sentences on what each side learned with the method; in a secure run, on what the server got instead."""
    words = [sentence.replace("`", "") for sentence in what_is_learned(run.method)]
    return (
        disclosure_summary.what_is_learned_in_sum(words, f"each round's sum over the sites. {not_seen(run)}")
        if run.unseen
        else words
    )


def message_kinds(run: RunView) -> list[DisclosureKind]:
    """Return the ledger by kind of message, uploads first."""
    return disclosure_summary.message_kinds(run.messages)


def scalar_names(run: RunView) -> dict[str, list[str]]:
    """Return the names of the scalar values sent along with tensors, by direction."""
    return disclosure_summary.scalar_names(run.messages)


def reported_metrics(run: RunView) -> list[str]:
    """Return the names of the metrics that sites reported about their training."""
    return disclosure_summary.reported_metrics(run.attempts)


def never_together(run: RunView, site: str) -> bool:
    """Return whether none of a site's uploads contained all the fields that its uploads contained together."""
    of_kind = {message["kind"]: message["fields"] for message in run.messages
               if message["direction"] == "up" and message["site"] == site}  # fmt: skip
    uploads: list[set[str]] = [{name for name, *_ in fields} for fields in of_kind.values()]
    return len(uploads) > 0 and all(names != set().union(*uploads) for names in uploads)


def unlisted_messages(run: RunView, direction: str) -> str:
    """Describe traffic that the run's message list does not include."""
    refused = any(str(why).startswith(per_site.REFUSED) for a in run.attempts for why in a.get("failed", {}).values())
    parts = ["keys and shares of secure aggregation"] if run.unseen else []
    return " and ".join(parts + ["refused uploads"] * (direction == "up" and refused)) or "not listed by field"


def describe_fields(fields: Sequence[tuple[str, str, list[int], int]]) -> dict[str, Any]:
    """Return the number of tensors, the number of entries, and the codecs for one kind of message."""
    entries = 0
    for _, _, shape, _ in fields:
        count = 1
        for side in shape:
            count *= side
        entries += count
    return {"tensors": len(fields), "entries": entries, "codecs": sorted({codec for _, codec, _, _ in fields})}
