"""The disclosure ledger of a run, summed up: what left each side, how often, in how many bytes."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil import places

_OF_SERVER = "The server learns: "
THE_SUM = "the sum over the sites of each round, and of no single site its values, number of examples, losses or norm."


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


@dataclass
class Traffic:
    """One site's messages, whatever was in them: number and bytes each way."""

    up: int = 0
    up_bytes: int = 0
    down: int = 0
    down_bytes: int = 0


def traffic(messages: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]]) -> dict[str, Traffic]:
    """All messages by site, with those that `unlisted` has. Arguments as of `kinds` and `reported`."""
    found: defaultdict[str, Traffic] = defaultdict(Traffic)
    for message in messages:
        of = found[str(message["site"])]
        if message["direction"] == "up":
            of.up, of.up_bytes = of.up + 1, of.up_bytes + message["bytes"]
        else:
            of.down, of.down_bytes = of.down + 1, of.down_bytes + message["bytes"]
    for site, more in unlisted(attempts).items():
        of = found[site]
        of.up, of.up_bytes = of.up + more.up, of.up_bytes + more.up_bytes
        of.down, of.down_bytes = of.down + more.down, of.down_bytes + more.down_bytes
    return dict(found)


def unlisted(attempts: Sequence[Mapping[str, Any]]) -> dict[str, Traffic]:
    """By site what stands in no line of the ledger: refused uploads, keys and shares. Earlier
    records have no number of messages there.
    """
    found: defaultdict[str, Traffic] = defaultdict(Traffic)
    for attempt in attempts:
        for site, (up_bytes, down_bytes, *number) in (attempt.get("unlisted") or {}).items():
            of, (up, down) = found[str(site)], number or (0, 0)
            of.up, of.up_bytes = of.up + int(up), of.up_bytes + int(up_bytes)
            of.down, of.down_bytes = of.down + int(down), of.down_bytes + int(down_bytes)
    return dict(found)


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
    return [part for sentence in sentences for part in re.split(f" (?={_OF_SERVER})", sentence)]


def in_sum(sentences: Sequence[str], server: str) -> list[str]:
    """The sentences of `words_of` for a run with secure aggregation: `server` in the place of what a server learns
    otherwise, which follows as such.
    """
    of_server = [sentence for sentence in sentences if sentence.startswith(_OF_SERVER)]
    clear = [f"Without secure aggregation it would be: {said.removeprefix(_OF_SERVER)}" for said in of_server]
    return [*(sentence for sentence in sentences if sentence not in of_server), _OF_SERVER + server, *clear]
