"""A tamper-evident log: JSON lines, each with the hash of the line before.

    {"app":"5f..","event":"admitted","hash":"9c..","n":3,"previous":"a0..","round":0,"time":"2026-01-02T03:04:05+00:00"}

    hash     = SHA-256 of the line's own JSON (keys sorted, no spaces, ASCII) without the key "hash"
    previous = hash of the line before; 64 zeros in the first
    n        = number of the line, from 0

A line must be exactly what this module would write, byte for byte, so even an added space is found. Content from
the other side is truncated, so that a sender cannot make appending slow: texts after 1,000 characters, lists
after 4,096 entries.

Formal guarantees, for a log whose head (number of lines, last hash) another party holds, and SHA-256
without collisions:
- every change to the lines up to that head is found, no matter who made it.

| what was done to the file | found without an anchor | found with an anchor |
|---|---|---|
| a byte changed, a line removed from the start or the middle, lines swapped, inserted or repeated | yes | yes |
| the last lines cut off, or the whole file removed | no: the rest is a valid log | yes, back to the anchor |
| a line changed and every later hash recomputed | no | yes, up to the anchor |
| the last line torn by a power cut | yes | yes |

An anchor is the text "LINES:HASH" of `log_head`. Server and site exchange their anchors with every
message, so each log holds anchors of the other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil import paths
from fedveil.errors import StateError

__all__ = ["NAME", "LogHead", "last_entry", "log_head", "read_log", "verify_log"]

NAME = "audit-log.jsonl"
_GENESIS = "0" * 64
_OWN = frozenset({"n", "time", "event", "previous", "hash"})
_BLOCK = 1 << 16
_LONGEST_TEXT = 1000  # characters
_LONGEST_LIST = 4096  # entries
_LONGEST_LINE = 8 << 20  # bytes


@dataclass(frozen=True)
class LogHead:
    """The end of a log: its number of lines, and the hash of the last one."""

    lines: int = 0
    hash: str = _GENESIS

    def __str__(self) -> str:
        return f"{self.lines}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> LogHead:
        """Parse the head from its `str`. Raises StateError."""
        if not re.fullmatch(r"(0|[1-9]\d{0,17}):[0-9a-f]{64}", text):
            raise StateError(f'anchor: expected "LINES:HASH" with 64 hex digits, found {text[:90]!r}; copy it whole')
        lines, _, digest = text.partition(":")
        return cls(int(lines), digest)


def append_entry(file: Path, event: str, about: Mapping[str, Any]) -> LogHead:
    """Append one line, which is on the disk when this returns, and return the new head. Several processes may append.

    Long texts and lists in `about` are truncated; the line then records their original length.

    Raises:
        StateError: the last line is torn or does not match its hash, the file cannot be written, or the line would
            still be longer than 8 MiB. The log does not change.
    """
    if _OWN & set(about):
        raise StateError(f"audit log: expected names other than {sorted(_OWN)}, found {sorted(_OWN & set(about))}")
    try:
        paths.private_folder(file.parent)
        about = {_cut(key): _cut(value) for key, value in about.items()}
        with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            end = log.seek(0, os.SEEK_END)
            before = _head(_last(file, log, end))
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            record = {**about, "n": before.lines, "time": now, "event": event, "previous": before.hash}
            record["hash"] = _hash(record)
            line = _canonical(record) + b"\n"
            if len(line) > _LONGEST_LINE:
                raise StateError(
                    f"{file}: expected at most {_LONGEST_LINE} bytes per line, found {len(line)}; shorten it"
                )
            if (written := log.write(line)) != len(line):
                log.truncate(end)
                raise StateError(f"{file}: expected {len(line)} bytes to be written, found {written}; free space")
            os.fsync(log.fileno())
    except OSError as error:
        raise StateError(f"{file}: cannot write the audit log: {error}; fix that first") from error
    return LogHead(before.lines + 1, str(record["hash"]))


def log_head(file: Path) -> LogHead:
    """Return the log's head, reading only its last line; the head of an empty log if there is no file. Raises
    StateError."""
    return _head(last_entry(file))


def last_entry(file: Path) -> dict[str, Any]:
    """Return the log's last line; {} if there is none. Raises StateError if it is invalid."""
    if not file.exists():
        return {}
    with file.open("rb") as log:
        return _last(file, log, log.seek(0, os.SEEK_END))


def verify_log(file: Path, anchors: Iterable[LogHead] = ()) -> LogHead:
    """Read the whole log and return its head.

    Raises:
        StateError: a line is wrong, or the log does not reach an anchor; the message names the first such line.
    """
    anchor_by_line = {anchor.lines: anchor for anchor in anchors}
    head = LogHead()
    _require(anchor_by_line, file, head)
    for _, head in _chained(file):
        _require(anchor_by_line, file, head)
    beyond = [anchor for anchor in anchor_by_line.values() if anchor.lines > head.lines]
    if beyond:
        raise StateError(
            f"{file}: expected at least {max(a.lines for a in beyond)} lines, as an anchor records, found "
            f"{head.lines}; the end was cut off"
        )
    return head


def read_log(file: Path) -> list[dict[str, Any]]:
    """Return every line of the log. Raises StateError for a wrong line, as `verify_log` does."""
    return [record for record, _ in _chained(file)]


def _require(held: Mapping[int, LogHead], file: Path, found: LogHead) -> None:
    anchor = held.get(found.lines, found)
    if anchor != found:
        raise StateError(
            f"{file}, line {found.lines}: expected the hash {anchor.hash}, as an anchor records, found {found.hash}; "
            "the log was rewritten"
        )


def _chained(file: Path) -> Iterator[tuple[dict[str, Any], LogHead]]:
    """Yield every verified line, with the head after it."""
    try:
        log = file.open("rb")
    except OSError as error:
        raise StateError(f"{file}: expected an audit log, found none ({error.strerror}); name the file") from None
    before = LogHead()
    with log:
        for number, line in enumerate(log):
            record = _record(line, f"{file}, line {number + 1}")
            for key, expected in (("n", number), ("previous", before.hash)):
                if record[key] != expected:
                    raise StateError(
                        f"{file}, line {number + 1}: {key}: expected {expected!r}, found {record[key]!r}; "
                        "a line before it is missing, moved or changed"
                    )
            before = LogHead(number + 1, record["hash"])
            yield record, before


def _record(line: bytes, where: str) -> dict[str, Any]:
    """Return the record in a line. Raises StateError unless the line is complete and matches its hash."""
    try:
        record = json.loads(line)
        right = isinstance(record, dict) and set(record) >= _OWN and line == _canonical(record) + b"\n"
        right = right and type(record["n"]) is int and record["hash"] == _hash(record)
    except (ValueError, RecursionError):
        right = False
    if not right:
        raise StateError(
            f"{where}: expected a whole line with its own hash, found {line[:60]!r}; it was changed or cut off"
        )
    return dict(record)


def _head(record: Mapping[str, Any]) -> LogHead:
    return LogHead(record["n"] + 1, record["hash"]) if record else LogHead()


def _last(file: Path, log: Any, end: int) -> dict[str, Any]:
    """Return the last line of an open log of `end` bytes; {} if it is empty. Leave the file position at the end."""
    start, tail, step = end, b"", _BLOCK
    while start and b"\n" not in tail[:-1]:
        # Double the block each time: a line of 20 MB, from an older version, needs a few reads instead of 300.
        step = min(start, 2 * step)
        start -= step
        log.seek(start)
        tail = log.read(step) + tail
    log.seek(end)
    return _record(tail[tail.rstrip(b"\n").rfind(b"\n") + 1 :], f"{file}, last line") if end else {}


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[:_LONGEST_TEXT]}... ({len(value)} characters)"
    if isinstance(value, list | tuple):
        entries = [_cut(entry) for entry in value[:_LONGEST_LIST]]
        return entries if len(value) <= _LONGEST_LIST else [*entries, f"... ({len(value)} entries)"]
    if isinstance(value, Mapping):
        return {_cut(key): _cut(entry) for key, entry in list(value.items())[:_LONGEST_LIST]}
    return value


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _hash(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical({key: value for key, value in record.items() if key != "hash"})).hexdigest()
