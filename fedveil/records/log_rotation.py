"""Continue an audit log in a new file, to archive the old file or to continue after damage.

    audit-log.jsonl  ->  audit-log-<first>-<last>.jsonl    the old file, byte for byte
                         audit-log.jsonl                   {"event": "continued", "n": <last + 1>,
                                                            "previous": <last hash>, "file": ..., "sha256": ...,
                                                            "damaged": [[6, 6]], ...}

Line numbers and hashes continue, so anchors in the old file stay valid, and no other party has to be informed.

| the old file | its end is taken from |
|---|---|
| intact | its last line |
| its last line was cut off by a power failure | the line before it: the writer did not continue, so no anchor exists |
| damaged elsewhere | its last line; the damaged lines are recorded |
| its last line is complete but damaged, or the file is lost | an anchor held by another party, which must be given |

    audit-log.unchecked    exists if the log comes from a backup and was not compared with the server's anchor: lines
                           appended to it now would contradict lines that the server may have seen

A process that dies in between leaves the log unchanged or continued: the new file takes the old name in one step.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from fedveil.errors import StateError
from fedveil.records import audit_log
from fedveil.records.atomic_files import link_atomic, write_atomic
from fedveil.records.audit_log import LogHead

__all__ = ["is_unchecked", "mark_checked", "mark_unchecked", "rotate_log"]

_ASK = "fedveil log anchor OTHER --site NAME prints it at the server, then fedveil log rotate FILE --after LINES:HASH"
_UNCHECKED = ".unchecked"
_LEAST_LINE = 170  # bytes of the shortest line: two hashes of 64 hex digits, a time, and the keys
_MOST_PARTS = 1000  # maximum number of damaged parts to list; more are listed as one


def mark_unchecked(file: Path) -> None:
    """Note that a log comes from a backup, and was not compared with an anchor. Raises OSError."""
    write_atomic(file.with_suffix(_UNCHECKED), b"")


def is_unchecked(file: Path) -> bool:
    """Return whether a log comes from a backup, and was not compared with an anchor."""
    return file.with_suffix(_UNCHECKED).exists()


def mark_checked(file: Path) -> None:
    """Note that a log was compared with an anchor. Raises OSError."""
    file.with_suffix(_UNCHECKED).unlink(missing_ok=True)


def rotate_log(file: Path, after: LogHead | None = None) -> tuple[Path | None, LogHead]:
    """Continue the log in a new file; return the old file (None if it is lost) and the new head.

    Args:
        after: the last anchor that another party holds; required if the old file does not reveal its own end.

    Raises:
        StateError: the log is empty, its end is unknown, `after` contradicts it, or a file cannot be written.
    """
    try:
        with audit_log.locked_log(file) as log:
            data_end = log.seek(0, 2)
            if not data_end and after is None:
                raise StateError(
                    f"{file}: the audit log is empty or missing; if it was lost, give the last anchor that another "
                    f"party holds: {_ASK}"
                )
            first = _first(file)
            end, damaged = _end(file, first, after) if data_end else (after or LogHead(), [])
            old = file.with_name(f"{file.stem}-{first}-{end.lines - 1}{file.suffix}") if data_end else None
            about: dict[str, object] = {"damaged": damaged}
            if old is not None:
                torn = len(_torn(file))
                about |= {"file": old.name, "bytes": data_end, "torn": torn, "sha256": audit_log.sha256_of(file)}
                _keep(file, old)
            line, head = audit_log.continued_line(end, about | _clock(file))
            write_atomic(file, line)
            if after is not None:
                mark_checked(file)
    except OSError as error:
        raise StateError(f"{file}: cannot continue the audit log: {error}; correct this first") from error
    return old, head


def _first(file: Path) -> int:
    """Return the number of the file's first line, even if that line is damaged; 0 if no line is whole.

    A damaged line break joins two lines. So the damaged lines before the first intact one are counted from 0 if their
    bytes can hold that many lines. Otherwise the file continues another file, and only the existing lines count.
    """
    size = 0
    with file.open("rb") as log:
        for place, line in enumerate(log):
            if audit_log.is_whole(line):
                number = int(json.loads(line)["n"])
                return 0 if number * _LEAST_LINE <= size else max(0, number - place)
            size += len(line)
    return 0


def _end(file: Path, first: int, after: LogHead | None) -> tuple[LogHead, list[list[int]]]:
    """Return the end of a nonempty file, and its damaged parts."""
    numbers, last = set(), LogHead()
    for record in audit_log.whole_lines(file):
        if record["n"] >= first:
            numbers.add(int(record["n"]))
            last = max(last, LogHead(record["n"] + 1, record["hash"]), key=lambda head: head.lines)
    end = after or last
    if after is None and (not numbers or not _ends_whole(file)):
        said = f" (its last whole line gives {last})" if numbers else ""
        raise StateError(
            f"{file}: its last line is damaged{said}; give the last anchor that another party holds: {_ASK}"
        )
    if end.lines < last.lines or (end.lines == last.lines and end != last):
        raise StateError(f"--after: {end} is before the last whole line, {last}; give the latest anchor")
    return end, _parts(set(range(first, last.lines)) - numbers, last.lines, end.lines)


def _ends_whole(file: Path) -> bool:
    """Return whether the last complete line is intact; no one has seen a torn line after it."""
    with file.open("rb") as log:
        last = b""
        for line in log:
            last = line if line.endswith(b"\n") else last
    return audit_log.is_whole(last)


def _torn(file: Path) -> bytes:
    """Return the bytes after the last complete line."""
    with file.open("rb") as log:
        last = next(iter(deque(log, maxlen=1)), b"")
    return b"" if last.endswith(b"\n") else last


def _parts(missing: Iterable[int], last: int, end: int) -> list[list[int]]:
    """Return the first and last number of each run of missing lines, and of the lines from `last` up to `end`."""
    parts: list[list[int]] = []
    for number in sorted(missing):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    parts += [[last, end - 1]] if end > last else []
    return parts if len(parts) <= _MOST_PARTS else [[parts[0][0], parts[-1][1]]]


def _keep(file: Path, old: Path) -> None:
    """Give the old file its new name, replacing a second name left by a killed rotation."""
    if old.exists() and not old.samefile(file) and old.read_bytes() != file.read_bytes():
        raise StateError(f"{old}: another file already has this name; move it away and keep it")
    link_atomic(file, old)


def _clock(file: Path) -> dict[str, object]:
    """Return the program's clock from the last intact line, which a control log needs after a restart."""
    clock: dict[str, object] = {}
    for record in audit_log.whole_lines(file):
        if "clock" in record:
            clock = {"clock": record["clock"]}
    return clock
