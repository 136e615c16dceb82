"""A tamper-evident log: JSON lines, each with the hash of the previous line.

    {"app":"5f..","event":"admitted","hash":"9c..","n":3,"previous":"a0..","round":0,"time":"2026-01-02T03:04:05+00:00"}

    hash     = SHA-256 of the line's own JSON (keys sorted, no spaces, ASCII) without the key "hash"
    previous = hash of the previous line; 64 zeros in the first line
    n        = number of the line, from 0

A line must match this module's output byte for byte, so even an added space is detected. Content from
the other side is truncated, so that a sender cannot make appending slow: text after 1,000 characters, lists
after 4,096 entries.

Formal guarantees, for a log whose head (number of lines, last hash) another party holds, if SHA-256 has
no collisions:
- every change to the lines up to that head is found, no matter who made it.

| change to the file | found without an anchor | found with an anchor |
|---|---|---|
| a byte changed, a line removed from the start or the middle, lines swapped, inserted or repeated | yes | yes |
| the last lines removed, or the whole file removed | no: the rest is a valid log | yes, back to the anchor |
| a line changed and every later hash recomputed | no | yes, up to the anchor |
| the last line torn by a power cut | yes | yes |

An anchor is the text "LINES:HASH" of `log_head`. Server and site exchange their anchors with every
message, so each log holds anchors of the other.

A log may continue in a new file (log_rotation.py). The earlier files are in the same folder and belong to the log:

    audit-log-0-1233.jsonl    lines 0 to 1233
    audit-log.jsonl           its first line has n = 1234, the hash of line 1233 as previous, and the event "continued"

So lines keep their numbers and every anchor stays valid. The "continued" line records the earlier file's SHA-256 and
its damaged lines, if any: exactly that damage is accepted in exactly that file.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from fedveil import paths
from fedveil.errors import StateError

__all__ = [
    "NAME",
    "LogHead",
    "last_entry",
    "list_log_files",
    "log_bytes",
    "log_head",
    "read_log",
    "verify_log",
    "verify_log_files",
]

NAME = "audit-log.jsonl"
CONTINUED = "continued"  # event of the first line in a file that continues a log
_GENESIS = "0" * 64
_OWN = frozenset({"n", "time", "event", "previous", "hash"})
_BLOCK = 1 << 16
_LONGEST_TEXT = 1000  # characters
_LONGEST_LIST = 4096  # entries
_LONGEST_LINE = 8 << 20  # bytes


@dataclass(frozen=True)
class LogHead:
    """The end of a log: its number of lines, and the last line's hash."""

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
    """Append one line, and return the new head once the line is on disk. Several processes may append.

    Long texts and lists in `about` are truncated; the line then records their original length.

    Raises:
        StateError: the last line is torn or does not match its hash, the file cannot be written, or the line would
            still be longer than 8 MiB. The log does not change.
    """
    if _OWN & set(about):
        raise StateError(f"audit log: {sorted(_OWN & set(about))} are the log's own names; choose others")
    try:
        paths.private_folder(file.parent)
        about = {_cut(key): _cut(value) for key, value in about.items()}
        with locked_log(file) as log:
            end = log.seek(0, os.SEEK_END)
            line, head = _new_line(_head(_last(file, log, end)), event, about)
            if len(line) > _LONGEST_LINE:
                raise StateError(
                    f"{file}: a line may have at most {_LONGEST_LINE} bytes, but this one has {len(line)}; shorten it"
                )
            if (written := log.write(line)) != len(line):
                log.truncate(end)
                raise StateError(f"{file}: only {written} of {len(line)} bytes were written; free some disk space")
            os.fsync(log.fileno())
    except OSError as error:
        raise StateError(f"{file}: cannot write the audit log: {error}; correct this before the next run") from error
    return head


def continued_line(before: LogHead, about: Mapping[str, Any]) -> tuple[bytes, LogHead]:
    """Return the first line of a file that continues a log with this head, and the head after it."""
    return _new_line(before, CONTINUED, about)


def _new_line(before: LogHead, event: str, about: Mapping[str, Any]) -> tuple[bytes, LogHead]:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    record = {**about, "n": before.lines, "time": now, "event": event, "previous": before.hash}
    record["hash"] = _hash(record)
    return _canonical(record) + b"\n", LogHead(before.lines + 1, str(record["hash"]))


@contextmanager
def locked_log(file: Path) -> Iterator[FileIO]:
    """Open the log's current file for one writer, and create it if there is none. Raises OSError."""
    while True:
        with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            opened = os.fstat(log.fileno())
            with suppress(FileNotFoundError):
                if (file.stat().st_ino, file.stat().st_dev) == (opened.st_ino, opened.st_dev):
                    yield log
                    return
        # Another process continued the log in a new file between the two calls.


def log_head(file: Path) -> LogHead:
    """Return the log's head, reading only its last line; without a file, the head of an empty log. Raises
    StateError."""
    return _head(last_entry(file))


def last_entry(file: Path) -> dict[str, Any]:
    """Return the log's last line; {} if there is none. Raises StateError if it is invalid."""
    if not file.exists():
        return {}
    with file.open("rb") as log:
        return _last(file, log, log.seek(0, os.SEEK_END))


def list_log_files(file: Path) -> list[Path]:
    """Return the files of a log in order: the earlier files next to `file`, then `file` itself."""
    name = re.compile(rf"{re.escape(file.stem)}-(\d{{1,18}})-\d{{1,18}}{re.escape(file.suffix)}")
    earlier = [(int(match[1]), path) for path in file.parent.glob(f"{glob.escape(file.stem)}-*{file.suffix}")
               if (match := name.fullmatch(path.name))]  # fmt: skip
    files = [*(path for _, path in sorted(earlier)), file]
    # A rotation that was killed between its two steps leaves a second name of the same file.
    last_names = {(about.st_dev, about.st_ino): path for path in files if path.exists() and (about := path.stat())}
    return [path for path in files if path == file or path in last_names.values()]


def log_bytes(file: Path) -> int:
    """Return the size of a log with its earlier files. Raises OSError."""
    return sum(part.stat().st_size for part in list_log_files(file))


def verify_log(file: Path, anchors: Iterable[LogHead] = ()) -> LogHead:
    """Read the whole log, including the earlier files next to `file`, and return its head.

    Raises:
        StateError: a line is wrong, or the log does not reach an anchor; the message names the first such line.
    """
    return verify_log_files(list_log_files(file), anchors)


def verify_log_files(files: Sequence[Path], anchors: Iterable[LogHead] = ()) -> LogHead:
    """Read files that continue each other, in this order, and return the log's head.

    Raises:
        StateError: a line is wrong, a file does not continue the one before it, or the log does not reach an anchor or
            begins after it; the message names the first such line.
    """
    anchor_by_line = {anchor.lines: anchor for anchor in anchors}
    before = start_of(files[0])
    _require(anchor_by_line, files[0], before)
    if early := [anchor for anchor in anchor_by_line.values() if anchor.lines < before.lines]:
        raise StateError(
            f"{files[0]}: an anchor covers line {min(a.lines for a in early)}, but the log begins at line "
            f"{before.lines}; name the earlier files too"
        )
    head = before
    for file, head in _heads(files, before):
        _require(anchor_by_line, file, head)
    beyond = [anchor for anchor in anchor_by_line.values() if anchor.lines > head.lines]
    if beyond:
        raise StateError(
            f"{files[-1]}: an anchor records {max(a.lines for a in beyond)} lines, but the log has only "
            f"{head.lines}; its end was cut off"
        )
    return head


def read_log(file: Path) -> list[dict[str, Any]]:
    """Return every line of the log, including the earlier files next to `file`.

    Damaged lines in an earlier file are left out; the next file's "continued" line counts them.

    Raises:
        StateError: a line is wrong, as in `verify_log`.
    """
    files = list_log_files(file)
    return [record for _, record, _ in _lines(files, start_of(files[0])) if record]


def count_damaged(files: Sequence[Path]) -> int:
    """Return the number of damaged lines in earlier files, as recorded in the files' first lines. Raises StateError."""
    return sum(to - first + 1 for file in files for first, to in _damage(_first_line(file)))


def _require(held: Mapping[int, LogHead], file: Path, found: LogHead) -> None:
    anchor = held.get(found.lines, found)
    if found.hash and anchor != found:
        raise StateError(
            f"{file}, line {found.lines}: expected the hash {anchor.hash}, as an anchor records, found {found.hash}; "
            "the log was rewritten"
        )


def _heads(files: Sequence[Path], before: LogHead) -> Iterator[tuple[Path, LogHead]]:
    for file, _, head in _lines(files, before):
        yield file, head


def _lines(files: Sequence[Path], before: LogHead) -> Iterator[tuple[Path, dict[str, Any], LogHead]]:
    """Yield every line of files that continue each other, with the head after it; {} for a damaged line."""
    for file, after in zip(files, [*files[1:], None], strict=True):
        about = _first_line(after) if after else {}
        is_damaged = about.get("event") == CONTINUED and bool(about.get("damaged") or about.get("torn"))
        if is_damaged and about.get("sha256") == sha256_of(file):
            lines = _around_damage(file, before, LogHead(about["n"], about["previous"]), _damage(about))
        else:
            lines = _chained(file, before)
        for record, before in lines:
            yield file, record, before


def start_of(file: Path) -> LogHead:
    """Return the head before the file's first line: an empty log's head, unless the file continues an earlier one.

    Raises StateError if there is no file.
    """
    record = _first_line(file)
    return LogHead(record["n"], record["previous"]) if record.get("event") == CONTINUED else LogHead()


def _first_line(file: Path) -> dict[str, Any]:
    """Return the file's first line, or {} if it is empty, damaged or incomplete."""
    try:
        with file.open("rb") as log:
            return _record(log.readline(_LONGEST_LINE), f"{file}, line 1")
    except OSError as error:
        raise StateError(f"{file}: cannot read an audit log ({error.strerror}); name an existing file") from None
    except StateError:
        return {}


def _damage(record: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the first and last line number of each damaged part of the earlier file, from the "continued" line."""
    parts = record.get("damaged") if record.get("event") == CONTINUED else None
    parts = parts if isinstance(parts, list) else []
    pairs = [part for part in parts if isinstance(part, list) and [type(n) for n in part] == [int, int]]
    return [(first, last) for first, last in pairs if 0 <= first <= last]  # an untrue count must excuse nothing


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises StateError."""
    try:
        with file.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise StateError(f"{file}: cannot read an audit log ({error.strerror}); name an existing file") from None


def is_whole(line: bytes) -> bool:
    """Return whether a line matches its own hash."""
    try:
        return bool(_record(line, ""))
    except StateError:
        return False


def whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that match their own hash, wherever they are. Raises OSError."""
    with file.open("rb") as log:
        for line in log:
            with suppress(StateError):
                yield _record(line, "")


def _around_damage(
    file: Path, before: LogHead, end: LogHead, damage: Sequence[tuple[int, int]]
) -> Iterator[tuple[dict[str, Any], LogHead]]:
    """Yield the intact lines of a damaged file, and {} for each damaged line, whose hash may still be in the next line.

    Raises StateError if a line is missing that `damage`, by first and last number, does not record.
    """
    hashes: dict[int, str] = {end.lines: end.hash}
    records: dict[int, dict[str, Any]] = {}
    for record in whole_lines(file):
        hashes |= {record["n"]: record["previous"]}
        records[record["n"]] = record
    hashes |= {number + 1: record["hash"] for number, record in records.items()}
    expected = before.lines
    for number in [*sorted(number for number in records if before.lines <= number < end.lines), end.lines]:
        if expected < number and not any(first <= expected and number - 1 <= last for first, last in damage):
            raise StateError(
                f"{file}, line {expected + 1}: this line is damaged, and the next file does not record the damage; "
                "restore the file from a backup"
            )
        expected = number + 1
    # Not a range: a number in another party's log may be of any size.
    for number in sorted({*records, *(lines - 1 for lines in hashes)}):
        if not before.lines <= number < end.lines:
            continue
        record = records.get(number, {})
        if record and record["previous"] != hashes.get(number, record["previous"]):
            raise StateError(
                f"{file}, line {number + 1}: it does not contain the hash of the previous line, so one of the two was "
                "changed"
            )
        yield record, LogHead(number + 1, hashes.get(number + 1, ""))


def _chained(file: Path, before: LogHead) -> Iterator[tuple[dict[str, Any], LogHead]]:
    """Yield every verified line, with the head after it."""
    try:
        log = file.open("rb")
    except OSError as error:
        raise StateError(f"{file}: cannot read an audit log ({error.strerror}); name an existing file") from None
    with log:
        for number, line in enumerate(log, before.lines):
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
            f"{where}: expected a whole line with its own hash, found {line[:60]!r}; it was changed or cut off. To "
            "continue, start a new file, which keeps this one: fedveil log rotate FILE"
        )
    return dict(record)


def _head(record: Mapping[str, Any]) -> LogHead:
    return LogHead(record["n"] + 1, record["hash"]) if record else LogHead()


def _last(file: Path, log: Any, end: int) -> dict[str, Any]:
    """Return the last line of an open log of `end` bytes; {} if it is empty. Leave the file position at the end."""
    start, tail, step = end, b"", _BLOCK
    while start and b"\n" not in tail[:-1]:
        # Double the block each time: a 20 MB line, from an older version, needs a few reads instead of 300.
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
