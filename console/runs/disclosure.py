"""The disclosure ledger of a run, summed up: what left each side, how often, in how many bytes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil import places
from fedveil.console.runs.folder import Run


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


def kinds(run: Run) -> list[Kind]:
    """The ledger by kind of message, uploads first."""
    found: dict[int, Kind] = {}
    for message in run.messages:
        if message["kind"] not in found:
            fields = [(name, codec, shape, size) for name, codec, shape, size in message["fields"]]
            found[message["kind"]] = Kind(message["direction"], message["variant"], fields)
        kind = found[message["kind"]]
        kind.sites[message["site"]] += 1
        kind.total_bytes += message["bytes"]
        kind.payload_bytes += message["payload_bytes"]
    return sorted(found.values(), key=lambda kind: (kind.direction != "up", kind.variant))


def scalars(run: Run) -> dict[str, list[str]]:
    """Names of the values that messages carried beside their tensors, by direction."""
    found: dict[str, set[str]] = {"up": set(), "down": set()}
    for message in run.messages:
        found[message["direction"]] |= set(message["scalars"])
    return {direction: sorted(names) for direction, names in found.items()}


def reported(run: Run) -> list[str]:
    """Names of the figures that sites reported about their training."""
    reports = [report for attempt in run.attempts for report in attempt.get("reports", {}).values()]
    return sorted({name for report in reports for name in report})


def never_together(run: Run, site: str) -> bool:
    """Whether no single upload of a site held all the fields that its uploads held together."""
    of_kind = {message["kind"]: message["fields"] for message in run.messages
               if message["direction"] == "up" and message["site"] == site}  # fmt: skip
    uploads: list[set[str]] = [{name for name, *_ in fields} for fields in of_kind.values()]
    return len(uploads) > 0 and all(names != set().union(*uploads) for names in uploads)


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


def describe_fields(fields: Sequence[tuple[str, str, list[int], int]]) -> dict[str, Any]:
    """Number of tensors, of entries, and the codecs, of one kind of message."""
    entries = 0
    for _, _, shape, _ in fields:
        count = 1
        for side in shape:
            count *= side
        entries += count
    return {"tensors": len(fields), "entries": entries, "codecs": sorted({codec for _, codec, _, _ in fields})}
