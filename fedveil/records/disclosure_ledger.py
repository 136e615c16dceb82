"""A run's disclosure ledger, disclosure.jsonl: the messages that left each side. Lines are appended and never removed.

    {"form": 2, "kind": 0, "direction": "up", "variant": "A", "fields": [[name, codec, shape, bytes], ...]}
    {"round": 4, "attempt": 0, "site": "north", "kind": 0, "bytes": 61440}

The direction, the variant, and the fields' names and codecs define the kind of a message. A kind has one line,
before its first message; every message has its own line.

| a message ... | its line also has |
|---|---|
| with fields of a different shape than in the kind's line | "others": [[index of the field, shape, bytes], ...] |
| with scalars in addition to its fields | "scalars": {name: word, ...} |
| with scores of held-out examples (evaluate.held-out) | "figures": {name: bytes, ...} |
| that is an upload in a run with cohort.buffer-size | "step": the round whose server step takes it; "round" is that of
  the state that the site trained from. In one process, also a late site's broadcast, which is counted in that step |
| with a "step" whose attempt is not the first | "step-attempt": the attempt |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from fedveil.errors import StateError
from fedveil.records import atomic_files

__all__ = ["NAME", "DisclosureLedger", "counted_in", "read_messages"]

NAME: Final = "disclosure.jsonl"
Row = dict[str, Any]

_FORM = 2
_LONGEST = 40  # maximum number of characters of a damaged line in an error


@final
class DisclosureLedger:
    """Appends to one run's ledger. Only the process that holds the run folder's lock may do so."""

    def __init__(self, file: Path) -> None:
        """Open the ledger. Raises StateError if the file has lines in a different format."""
        self._file = file
        self._kinds = {_key(kind, kind["direction"]): kind for kind in _read(file)[0]}

    def append(self, where: Mapping[str, Any], direction: str, disclosed: Mapping[str, Any]) -> None:
        """Append a message's disclosure.

        Args:
            where: the message's round, attempt and site, and for an upload into a buffer its step and step-attempt.
            disclosed: result of `fedveil.wire.envelope.describe_message`.
        """
        kind = self._kind(direction, disclosed)
        line = {**where, "kind": kind["kind"], "bytes": disclosed["bytes"]}
        pairs = zip(kind["fields"], disclosed["fields"], strict=True)
        if others := [[i, *new[2:]] for i, (first, new) in enumerate(pairs) if first[2:] != list(new[2:])]:
            line["others"] = others
        if disclosed["scalars"]:
            line["scalars"] = dict(disclosed["scalars"])
        if disclosed.get("figures"):
            line["figures"] = dict(disclosed["figures"])
        atomic_files.append_line(self._file, line)

    def _kind(self, direction: str, disclosed: Mapping[str, Any]) -> Row:
        key = _key(disclosed, direction)
        if key not in self._kinds:
            fields = [[name, codec, list(shape), size] for name, codec, shape, size in disclosed["fields"]]
            about = {"direction": direction, "variant": disclosed["variant"], "fields": fields}
            kind = {"form": _FORM, "kind": len(self._kinds), **about}
            atomic_files.append_line(self._file, kind)
            self._kinds[key] = kind
        return self._kinds[key]


def read_messages(file: Path) -> list[Row]:
    """Return every message in the ledger, or [] if there is no file. Skip a last line that is still being written.

    Each message has round, attempt, site, direction, variant, kind, bytes, payload_bytes, fields as [name, codec,
    shape, bytes], scalars, and figures as bytes by name; a message with a step has that and step-attempt too. Messages
    of the same kind share one list of fields.

    Raises:
        StateError: a line has a different form; the error names the line.
    """
    return _read(file)[1]


def counted_in(message: Mapping[str, Any]) -> tuple[int, int]:
    """Return the round and the attempt whose line in metrics.jsonl counts a message."""
    if "step" in message:
        return message["step"], message.get("step-attempt", 0)
    return message["round"], message["attempt"]


def _key(message: Mapping[str, Any], direction: str) -> tuple[Any, ...]:
    return direction, message["variant"], *((name, codec) for name, codec, _, _ in message["fields"])


def _read(file: Path) -> tuple[list[Row], list[Row]]:
    """Return kinds and messages."""
    kinds: list[Row] = []
    messages: list[Row] = []
    data = file.read_bytes() if file.exists() else b""
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError(f"a {type(row).__name__}")
            if "form" in row:
                kinds.append(_checked_kind(row, len(kinds)))
            else:
                messages.append(_checked(row, kinds))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(
                f"{file}, line {number}: this is neither a message nor a kind of messages: {line[:_LONGEST]!r} "
                f"({error}); it was damaged: restore it, or move the file away to continue without these records"
            ) from None
        except _OldForm:
            raise StateError(
                f"{file}, line {number}: expected form {_FORM}, which lists fields once per run, found a message "
                "with its fields, the form of 0.1; read it with the version named in config.json next to it"
            ) from None
    return kinds, messages


class _OldForm(Exception):
    """Raised for a line from version 0.1."""


def _checked_kind(row: Row, number: int) -> Row:
    _expect(row, "form", _FORM, row["form"] == _FORM)
    _expect(row, "kind", number, type(row.get("kind")) is int and row["kind"] == number)
    _expect(row, "direction", '"up" or "down"', row.get("direction") in ("up", "down"))
    _expect(row, "variant", "a text", isinstance(row.get("variant"), str))
    for name, codec, shape, size in row["fields"]:
        is_field = isinstance(name, str) and isinstance(codec, str) and _is_size(shape, size)
        _expect(row, "fields", "name, codec, shape and bytes of each", is_field)
    return row | {"payload_bytes": sum(field[3] for field in row["fields"])}


def _checked(row: Row, kinds: list[Row]) -> Row:
    if "fields" in row and "kind" not in row:
        raise _OldForm
    for key in ("round", "attempt", "kind", "bytes"):
        _expect(row, key, "a count", _is_count(row.get(key)))
    _expect(row, "kind", f"one of the {len(kinds)} above", row["kind"] < len(kinds))
    _expect(row, "site", "a text", isinstance(row.get("site"), str))
    kind, scalars = kinds[row["kind"]], row.get("scalars", {})
    _expect(row, "scalars", "words by name", isinstance(scalars, dict))
    figures = row.get("figures", {})
    _expect(row, "figures", "bytes by name", isinstance(figures, dict) and all(map(_is_count, figures.values())))
    for key in ("step", "step-attempt"):
        _expect(row, key, "a count", _is_count(row.get(key, 0)))
    fields, payload_bytes = kind["fields"], kind["payload_bytes"]
    if "others" in row:
        fields = [*fields]
        for index, shape, size in row["others"]:
            is_field = _is_count(index) and index < len(fields) and _is_size(shape, size)
            _expect(row, "others", "index, shape and bytes of fields of its kind", is_field)
            fields[index] = [*fields[index][:2], shape, size]
        payload_bytes = sum(field[3] for field in fields)
    return {
        **{key: row[key] for key in ("round", "attempt", "site", "kind", "bytes")},
        "direction": kind["direction"], "variant": kind["variant"], "fields": fields, "scalars": scalars,
        "payload_bytes": payload_bytes, "figures": figures,
        **({"step": row["step"], "step-attempt": row.get("step-attempt", 0)} if "step" in row else {}),
    }  # fmt: skip


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_size(shape: object, size: object) -> bool:
    return isinstance(shape, list) and all(map(_is_count, shape)) and _is_count(size)


def _expect(row: Row, key: str, expected: object, holds: bool) -> None:
    if not holds:
        value_text = repr(row[key])[:_LONGEST] if key in row else "none"
        raise ValueError(f"{key}: expected {expected}, found {value_text}")
