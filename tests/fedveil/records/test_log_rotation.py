"""A log that continues in a new file: anchors stay valid, damage is recorded, and nothing else is accepted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedveil.console.main import main
from fedveil.console.runs import unit_exposure
from fedveil.errors import StateError
from fedveil.records import audit_log
from fedveil.records.audit_log import LogHead, list_log_files, read_log, verify_log
from fedveil.records.log_rotation import rotate_log


def append(file: Path, count: int = 5) -> list[LogHead]:
    """Append lines and return the head after each."""
    return [audit_log.append_entry(file, "sent", {"round": number}) for number in range(count)]


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / audit_log.NAME


def test_numbers_hashes_and_anchors_go_on_by_hand(log):
    before = append(log, 3)
    old_bytes = log.read_bytes()
    old, head = rotate_log(log)
    after = append(log, 2)
    assert old == log.with_name("audit-log-0-2.jsonl")
    assert old.read_bytes() == old_bytes
    first, second, _ = (json.loads(line) for line in log.read_bytes().splitlines())
    assert (first["n"], first["event"], first["previous"]) == (3, "continued", before[-1].hash)
    assert (first["file"], first["bytes"], first["damaged"]) == (old.name, len(old_bytes), [])
    assert (second["n"], second["previous"]) == (4, head.hash)
    assert log.stat().st_mode & 0o777 == 0o600
    assert verify_log(log, [*before, head, *after]) == after[-1] == audit_log.log_head(log)
    assert [line["n"] for line in read_log(log)] == [0, 1, 2, 3, 4, 5]
    again, _ = rotate_log(log)
    assert list_log_files(log) == [old, again, log]
    assert again.name == "audit-log-3-5.jsonl"
    append(log)
    assert verify_log(log, [*before, *after]).lines == 12


def test_a_later_file_by_itself_is_checked_from_its_first_line_on(log, tmp_path):
    before = append(log)
    rotate_log(log)
    after = append(log)
    alone = tmp_path / "elsewhere" / "log.jsonl"
    alone.parent.mkdir()
    alone.write_bytes(log.read_bytes())
    assert verify_log(alone, [before[-1], *after]) == after[-1]
    with pytest.raises(StateError, match="begins at line 5; name the earlier files too"):
        verify_log(alone, [before[1]])
    with pytest.raises(StateError, match="the log was rewritten"):
        verify_log(alone, [LogHead(5, "0" * 64)])
    data = alone.read_bytes()
    alone.write_bytes(data.split(b"\n", 1)[1])  # without the line that says where it begins
    with pytest.raises(StateError, match="n: expected 0, found 6"):
        verify_log(alone)


@pytest.mark.parametrize("what", ["a byte", "a line", "the last line", "another file", "the order"])
def test_a_change_of_the_earlier_file_is_found(what, log):
    append(log)
    old, _ = rotate_log(log)
    append(log)
    lines = old.read_bytes().splitlines(keepends=True)
    if what == "a byte":
        old.write_bytes(b"".join(lines).replace(b'"round":2', b'"round":7'))
    elif what == "a line":
        old.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    elif what == "the last line":
        old.write_bytes(b"".join(lines[:-1]))
    elif what == "another file":
        other = log.with_name("other.jsonl")
        append(other)
        other.replace(old)
    else:
        with pytest.raises(StateError):
            audit_log.verify_log_files([log, old])
        return
    with pytest.raises(StateError):
        verify_log(log)


def test_a_torn_last_line_is_left_behind_and_the_honest_site_stays_honest(log):
    before = append(log)
    with log.open("ab") as file:
        file.write(b'{"event":"sent","n":5,"pre')
    with pytest.raises(StateError, match="fedveil log rotate FILE"):
        append(log)
    rotate_log(log)
    after = append(log)
    assert verify_log(log, [*before, *after]) == after[-1]
    assert audit_log.count_damaged([log]) == 0
    with pytest.raises(StateError, match="the log was rewritten"):
        verify_log(log, [LogHead(6, before[-1].hash)])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**20), st.integers(0, 2**20), st.integers(1, 255))
@example(seed=1, place=223, change=1)  # the first line break
def test_whatever_byte_was_damaged_the_other_lines_and_all_anchors_hold(tmp_path_factory, seed, place, change):
    """A byte of any line but the last: the numbers that are lost are recorded, and no other change passes."""
    log = tmp_path_factory.mktemp("log") / audit_log.NAME
    before = append(log, 6)
    data = bytearray(log.read_bytes())
    end = data[:-1].rfind(b"\n") + 1
    data[place % end] ^= change
    log.write_bytes(data)
    old, _ = rotate_log(log)
    after = append(log, 2)
    damaged = audit_log.count_damaged([log])
    assert 1 <= damaged <= 2  # a changed line break joins two lines
    assert verify_log(log, [*before, *after]) == after[-1]
    assert len(read_log(log)) == 6 - damaged + 3
    draw = random.Random(seed)
    more = bytearray(old.read_bytes())
    more[draw.randrange(len(more))] ^= draw.randrange(1, 256)
    old.write_bytes(more)
    if more != data:
        with pytest.raises(StateError):
            verify_log(log)


def test_a_damaged_last_line_and_a_lost_log_need_an_anchor_of_another_party(log):
    before = append(log)
    whole = log.read_bytes()
    log.write_bytes(whole[:-10] + b"x" + whole[-9:])
    with pytest.raises(StateError, match=r"its last line is damaged \(its last whole line gives 4:.*--after"):
        rotate_log(log)
    with pytest.raises(StateError, match="--after: .* is before the last whole line"):
        rotate_log(log, before[2])
    with pytest.raises(StateError, match="--after"):
        rotate_log(log, LogHead(4, "0" * 64))
    rotate_log(log, before[4])
    after = append(log)
    assert verify_log(log, [*before, *after]) == after[-1]
    assert audit_log.count_damaged([log]) == 1
    for file in list_log_files(log):
        file.unlink()
    with pytest.raises(StateError, match="the audit log is empty or missing; if it was lost"):
        rotate_log(log)
    old, _ = rotate_log(log, after[-1])
    assert old is None
    last = append(log)
    assert verify_log(log, [after[-1], *last]) == last[-1]


def test_a_damaged_first_line_of_a_file_that_continues_one(log):
    before = append(log)
    rotate_log(log)
    middle = append(log)
    data = bytearray(log.read_bytes())
    data[20] ^= 1
    log.write_bytes(data)
    old, _ = rotate_log(log)
    after = append(log)
    assert old.name == "audit-log-5-10.jsonl"
    assert verify_log(log, [*before, *middle, *after]) == after[-1]


def test_a_record_of_damage_excuses_no_other_file(log):
    """The line names the file's SHA-256, and its numbers may be of any size."""
    append(log)
    data = bytearray(log.read_bytes())
    data[30] ^= 1
    log.write_bytes(data)
    old, _ = rotate_log(log)
    old.write_bytes(old.read_bytes().splitlines(keepends=True)[-1])
    with pytest.raises(StateError):
        verify_log(log)
    huge = log.with_name("huge.jsonl")
    line, _ = audit_log.continued_line(
        LogHead(10**17, "1" * 64), {"damaged": [[0, 10**17]], "sha256": audit_log.sha256_of(old)}
    )
    huge.write_bytes(line)
    audit_log.verify_log_files([old, huge])  # returns at once: no loop over the numbers


def test_a_file_of_that_name_is_not_overwritten_and_a_killed_rotation_is_repeated(log):
    append(log, 2)
    name = log.with_name("audit-log-0-1.jsonl")
    name.write_text("other")
    with pytest.raises(StateError, match="another file already has this name"):
        rotate_log(log)
    name.unlink()
    name.hardlink_to(log)  # killed between its two steps
    old, _ = rotate_log(log)
    assert old == name
    assert verify_log(log).lines == 3


def test_a_control_logs_clock_goes_on(log):
    audit_log.append_entry(log, "refused", {"clock": "2030-01-01T00:00:00+00:00"})
    rotate_log(log)
    assert audit_log.last_entry(log)["clock"] == "2030-01-01T00:00:00+00:00"


WRITER = """
import sys
from pathlib import Path
from fedveil.records import audit_log
for number in range(40):
    audit_log.append_entry(Path(sys.argv[1]), "sent", {"writer": sys.argv[2], "round": number})
"""


@pytest.mark.long
def test_writers_in_other_processes_lose_no_line_while_the_log_is_rotated(log):
    append(log, 1)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(log), str(number)]) for number in range(3)]
    stop = threading.Event()
    rotated = 0
    while any(writer.poll() is None for writer in writers):
        rotate_log(log)
        rotated += 1
        stop.wait(0.05)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    lines = read_log(log)
    assert verify_log(log).lines == len(lines) == 1 + 3 * 40 + rotated
    for number in range(3):
        assert [line["round"] for line in lines if line.get("writer") == str(number)] == list(range(40))


def test_the_commands(log, capsys, tmp_path):
    before = append(log)
    server = tmp_path / "server.jsonl"
    for head in before:
        audit_log.append_entry(server, "accepted", {"site": "north", "site_log": str(head)})
    with log.open("ab") as file:
        file.write(b"torn")
    assert main(["log", "verify", str(log), "--other", str(server), "--site", "north"]) == 2
    assert "fedveil log rotate" in capsys.readouterr().err
    assert main(["log", "rotate", str(log)]) == 0
    assert "audit-log-0-4.jsonl, so keep it" in capsys.readouterr().out
    audit_log.append_entry(server, "accepted", {"site": "north", "site_log": str(append(log)[-1])})
    assert main(["log", "anchor", str(server), "--site", "north"]) == 0
    assert capsys.readouterr().out.startswith("11:")
    code = main(["log", "verify", str(log), "--other", str(server), "--site", "north"])
    said = capsys.readouterr()
    assert (code, "matching anchors: 6" in said.out) == (0, True), said
    old, alone = log.with_name("audit-log-0-4.jsonl"), tmp_path / "archive" / "new.jsonl"
    alone.parent.mkdir()
    log.rename(alone)
    assert main(["log", "verify", str(alone), "--other", str(server), "--site", "north"]) == 0
    said = capsys.readouterr().out
    assert "matching anchors: 2" in said
    assert "4 anchors belong to earlier files and were not checked" in said
    assert main(["log", "verify", str(old), str(alone), "--other", str(server), "--site", "north"]) == 0
    assert "matching anchors: 6" in capsys.readouterr().out
    assert main(["log", "verify", str(alone), "--anchor", str(before[0])]) == 2
    assert "name the earlier files too" in capsys.readouterr().err


def test_what_a_site_sent_before_a_rotation_is_still_found_and_damage_is_said(log, capsys):
    for number in range(3):
        audit_log.append_entry(log, "sent", {"run": "first", "round": number})
    data = bytearray(log.read_bytes())
    data[30] ^= 1
    log.write_bytes(data)
    rotate_log(log)
    audit_log.append_entry(log, "sent", {"run": "second", "round": 0})
    runs = unit_exposure._from_log(log)
    assert {name: sum(run.rounds.values()) for name, run in runs.items()} == {"first": 2, "second": 1}
    assert "note: 1 lines of" in capsys.readouterr().err
    assert audit_log.log_bytes(log) == sum(file.stat().st_size for file in list_log_files(log))


def test_a_range_that_ends_before_it_begins_excuses_nothing(log):
    """A sum of such ranges would be 0 damaged lines."""
    append(log, 6)
    rotate_log(log)
    record = json.loads(log.read_text().splitlines()[0])
    assert audit_log._damage(record | {"damaged": [[3, 3], [5, 4], [-2, 1]]}) == [(3, 3)]


def test_a_rotation_that_was_killed_between_its_steps_leaves_a_log_that_reads(log):
    before = append(log, 4)
    log.with_name(f"{log.stem}-0-3{log.suffix}").hardlink_to(log)
    assert list_log_files(log) == [log]
    assert verify_log(log) == before[-1]
    append(log, 1)
    old, _ = rotate_log(log)
    assert old is not None
    assert old.name == f"{log.stem}-0-4{log.suffix}"
    assert len(read_log(log)) == 6
