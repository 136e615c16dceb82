"""Summarize a run's disclosure ledger: the messages that left each side, with counts and bytes."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil import paths

_OF_SERVER = "The server learns: "


@dataclass
class DisclosureKind:
    """All messages with the same direction, variant and set of fields.

    Attributes:
        fields: (name, codec, shape, bytes) of each field in the first such message.
        sites: number of messages by site.
        total_bytes: total size of the messages in bytes.
        payload_bytes: size of the fields alone in bytes.
    """

    direction: str
    variant: str
    fields: list[tuple[str, str, list[int], int]]
    sites: Counter[str] = field(default_factory=Counter)
    total_bytes: int = 0
    payload_bytes: int = 0

    @property
    def messages(self) -> int:
        """Return the number of messages."""
        return self.sites.total()

    @property
    def overhead_bytes(self) -> int:
        """Return the number of bytes beyond the fields: names, shapes, and a site's training report."""
        return self.total_bytes - self.payload_bytes


def message_kinds(messages: Sequence[Mapping[str, Any]]) -> list[DisclosureKind]:
    """Return the messages by kind, uploads first.

    Args:
        messages: the result of `fedveil.records.disclosure_ledger.read_messages`.
    """
    kinds: dict[int, DisclosureKind] = {}
    for message in messages:
        if message["kind"] not in kinds:
            fields = [(name, codec, shape, size) for name, codec, shape, size in message["fields"]]
            kinds[message["kind"]] = DisclosureKind(message["direction"], message["variant"], fields)
        kind = kinds[message["kind"]]
        kind.sites[message["site"]] += 1
        kind.total_bytes += message["bytes"]
        kind.payload_bytes += message["payload_bytes"]
    return sorted(kinds.values(), key=lambda kind: (kind.direction != "up", kind.variant))


@dataclass
class TrafficSummary:
    """The number and total size of one site's messages in each direction, regardless of content.

    `unsigned` is the number of accepted uploads that the site did not sign.
    """

    up: int = 0
    up_bytes: int = 0
    down: int = 0
    down_bytes: int = 0
    unsigned: int = 0


def site_traffic(
    messages: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]]
) -> dict[str, TrafficSummary]:
    """Return all messages by site, including `unlisted_messages`.

    The arguments are those of `message_kinds` and `reported_metrics`.
    """
    traffic: defaultdict[str, TrafficSummary] = defaultdict(TrafficSummary)
    for message in messages:
        of = traffic[str(message["site"])]
        if message["direction"] == "up":
            of.up, of.up_bytes = of.up + 1, of.up_bytes + message["bytes"]
        else:
            of.down, of.down_bytes = of.down + 1, of.down_bytes + message["bytes"]
    for site, more in unlisted_messages(attempts).items():
        of = traffic[site]
        of.up, of.up_bytes = of.up + more.up, of.up_bytes + more.up_bytes
        of.down, of.down_bytes = of.down + more.down, of.down_bytes + more.down_bytes
    for attempt in attempts:
        for site in unsigned_sites(attempt):
            traffic[site].unsigned += 1
    return dict(traffic)


def unsigned_sites(attempt: Mapping[str, Any]) -> list[str]:
    """Return the accepted sites in an attempt that did not sign their upload.

    Lines from version 0.1 do not record this; in that version no site signed.
    """
    return [str(site) for site in attempt.get("unsigned", attempt.get("accepted") or [])]


def unlisted_messages(attempts: Sequence[Mapping[str, Any]]) -> dict[str, TrafficSummary]:
    """Return, by site, the messages without a ledger line: refused uploads, keys and shares.

    Older records do not include the number of messages.
    """
    traffic: defaultdict[str, TrafficSummary] = defaultdict(TrafficSummary)
    for attempt in attempts:
        for site, (up_bytes, down_bytes, *number) in (attempt.get("unlisted") or {}).items():
            of, (up, down) = traffic[str(site)], number or (0, 0)
            of.up, of.up_bytes = of.up + int(up), of.up_bytes + int(up_bytes)
            of.down, of.down_bytes = of.down + int(down), of.down_bytes + int(down_bytes)
    return dict(traffic)


def scalar_names(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return, by direction, the names of the values that messages carried in addition to their tensors."""
    names_by_direction: dict[str, set[str]] = {"up": set(), "down": set()}
    for message in messages:
        names_by_direction[message["direction"]] |= set(message["scalars"])
    return {direction: sorted(names) for direction, names in names_by_direction.items()}


def reported_metrics(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the training metrics that sites reported, from the lines of metrics.jsonl."""
    reports = [report for attempt in attempts for report in attempt.get("reports", {}).values()]
    return sorted({name for report in reports for name in report})


def what_is_learned(method: str) -> list[str]:
    """Return the sentences "The ... learns: ..." from the method's own file."""
    file = paths.find_folder("strategies") / f"{Path(method).name}.py"
    if not file.is_file():
        return []
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    sentences: list[str] = []
    for paragraph in text.split("\n\n"):
        if " learns: " in paragraph.partition("\n")[0]:
            for line in paragraph.splitlines():
                if " learns: " in line:
                    sentences.append(line)
                else:
                    sentences[-1] += " " + line.strip()
    return [part for sentence in sentences for part in re.split(f" (?={_OF_SERVER})", sentence)]


def what_is_learned_in_sum(sentences: Sequence[str], server: str) -> list[str]:
    """Return `what_is_learned` for a secure run: `server` replaces the server's sentences, which follow after it."""
    of_server = [sentence for sentence in sentences if sentence.startswith(_OF_SERVER)]
    clear = [f"Without secure aggregation it would be: {text.removeprefix(_OF_SERVER)}" for text in of_server]
    return [*(sentence for sentence in sentences if sentence not in of_server), _OF_SERVER + server, *clear]
