"""The disclosure ledger of a run, summed up: what left each side, how often, in how many bytes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil import places


@dataclass
class Kind:
    """All messages of one direction, variant and set of fields.

    Attributes:
        fields: (name, codec, shape, bytes) of each field; of the first such message.
        sites: number of messages by site.
        total_bytes: whole messages.
        payload_bytes: the fields alone.
    """

    direction: str
    variant: str
    fields: list[tuple[str, str, list[int], int]]
    sites: Counter[str] = field(default_factory=Counter)
    total_bytes: int = 0
    payload_bytes: int = 0

    @property
    def messages(self) -> int:
        """Number of messages."""
        return self.sites.total()

    @property
    def overhead_bytes(self) -> int:
        """Bytes beyond the fields: names, shapes, what a site reports of its training."""
        return self.total_bytes - self.payload_bytes


def kinds(messages: Sequence[Mapping[str, Any]]) -> list[Kind]:
    """The messages by kind, uploads first. `messages`: as `fedveil.records.disclosure.messages` gives them."""
    found: dict[int, Kind] = {}
    for message in messages:
        if message["kind"] not in found:
            fields = [(name, codec, shape, size) for name, codec, shape, size in message["fields"]]
            found[message["kind"]] = Kind(message["direction"], message["variant"], fields)
        kind = found[message["kind"]]
        kind.sites[message["site"]] += 1
        kind.total_bytes += message["bytes"]
        kind.payload_bytes += message["payload_bytes"]
    return sorted(found.values(), key=lambda kind: (kind.direction != "up", kind.variant))


def scalars(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Names of the values that messages carried beside their tensors, by direction."""
    found: dict[str, set[str]] = {"up": set(), "down": set()}
    for message in messages:
        found[message["direction"]] |= set(message["scalars"])
    return {direction: sorted(names) for direction, names in found.items()}


def reported(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the figures that sites reported about their training, from the lines of metrics.jsonl."""
    reports = [report for attempt in attempts for report in attempt.get("reports", {}).values()]
    return sorted({name for report in reports for name in report})


def words_of(method: str) -> list[str]:
    """What the method's own file says that each side learns: its paragraphs "The ... learns: ..."."""
    file = places.folder("strategies") / f"{Path(method).name}.py"
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
    return sentences
