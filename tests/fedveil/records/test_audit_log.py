from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import StateError
from fedveil.records import audit_log
from fedveil.records.audit_log import LogHead


def written(file: Path, count: int = 5) -> list[bytes]:
    for i in range(count):
        audit_log.append_entry(file, "sent", {"round": i, "site": "north", "fields": [["h.0.lora_A", 31 + i]]})
    return file.read_bytes().splitlines(keepends=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[bytes]:
    return written(tmp_path_factory.mktemp("log") / "log.jsonl")


def test_a_line_by_hand(tmp_path):
    file = tmp_path / "log.jsonl"
    first, second = (json.loads(line) for line in written(file, 2))
    assert (first["n"], first["previous"], first["event"], second["n"]) == (0, "0" * 64, "sent", 1)
    unsigned = {key: first[key] for key in sorted(first) if key != "hash"}
    assert first["hash"] == hashlib.sha256(json.dumps(unsigned, separators=(",", ":")).encode()).hexdigest()
    assert second["previous"] == first["hash"]
    assert audit_log.verify_log(file) == audit_log.log_head(file) == LogHead(2, second["hash"])
    assert [record["round"] for record in audit_log.read_log(file)] == [0, 1]
    assert file.stat().st_mode & 0o777 == 0o600


def refused(tmp_path: Path, content: bytes, *anchors: LogHead) -> str:
    file = tmp_path / "changed.jsonl"
    file.write_bytes(content)
    with pytest.raises(StateError) as caught:
        audit_log.verify_log(file, anchors)
    return str(caught.value)


def test_every_byte_of_every_line_counts(whole, tmp_path):
    """Each byte in turn, of the first line, one in the middle, and the last."""
    content = b"".join(whole[:3])
    start = 0
    for number, line in enumerate(whole[:3], 1):
        for position in range(start, start + len(line)):
            changed = bytearray(content)
            changed[position] ^= 0x01 if position % 2 else 0x80
            assert f"line {number}:" in refused(tmp_path, bytes(changed))
        start += len(line)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_other_order_or_choice_of_lines_is_refused_unless_it_is_a_beginning(data, whole, tmp_path_factory):
    lines = data.draw(st.lists(st.sampled_from(whole), max_size=7))
    file = tmp_path_factory.mktemp("other") / "log.jsonl"
    file.write_bytes(b"".join(lines))
    if lines == whole[: len(lines)]:
        assert audit_log.verify_log(file).lines == len(lines)
    else:
        with pytest.raises(StateError, match="line"):
            audit_log.verify_log(file)


def test_a_line_dropped_at_the_front_or_torn_at_the_end_is_found_where_it_is(whole, tmp_path):
    assert "line 1: n: expected 0, found 1" in refused(tmp_path, b"".join(whole[1:]))
    assert "line 3: n: expected 2, found 3" in refused(tmp_path, b"".join(whole[:2] + whole[3:]))
    assert "line 5: expected a whole line" in refused(tmp_path, b"".join(whole)[:-1])
    assert "line 6" in refused(tmp_path, b"".join(whole) + b"\n")


def test_a_log_cut_at_the_end_verifies_and_an_anchor_finds_it(whole, tmp_path):
    """What the chain cannot see: the docstring's table says so."""
    file = tmp_path / "log.jsonl"
    file.write_bytes(b"".join(whole))
    anchor = audit_log.log_head(file)
    file.write_bytes(b"".join(whole[:3]))
    assert audit_log.verify_log(file).lines == 3
    assert "an anchor records 5 lines, but the log has only 3" in refused(tmp_path, b"".join(whole[:3]), anchor)


def test_a_log_written_anew_verifies_and_an_anchor_finds_it(whole, tmp_path):
    file = tmp_path / "forged.jsonl"
    for line in whole:
        record = json.loads(line)
        audit_log.append_entry(file, "sent", {"round": record["round"], "site": "south", "fields": []})
    assert audit_log.verify_log(file).lines == 5
    anchor = LogHead(2, json.loads(whole[1])["hash"])
    assert "line 2: expected the hash" in refused(tmp_path, file.read_bytes(), anchor)
    assert "line 0: expected the hash" in refused(tmp_path, file.read_bytes(), LogHead(0, "1" * 64))


def test_a_line_of_another_log_does_not_fit_in_though_it_is_its_own_hash(whole, tmp_path):
    other = written(tmp_path / "other.jsonl")
    assert "line 3: previous: expected" in refused(tmp_path, b"".join([*whole[:2], other[2], *whole[3:]]))


def test_it_is_not_continued_behind_a_line_that_is_not_whole(whole, tmp_path):
    file = tmp_path / "log.jsonl"
    for content in (b"".join(whole)[:-20], b"".join(whole).replace(b'"round":4', b'"round":5')):
        file.write_bytes(content)
        with pytest.raises(StateError, match="last line: expected a whole line"):
            audit_log.append_entry(file, "sent", {})
        assert file.read_bytes() == content


def test_a_line_longer_than_a_block_is_the_last_one_too(tmp_path):
    file = tmp_path / "log.jsonl"
    for size in (10, 200_000, 70_000, 3):
        audit_log.append_entry(file, "sent", {"text": "x" * size})
    assert audit_log.verify_log(file).lines == 4


def test_a_name_of_its_own_and_a_value_that_is_no_json_are_refused(tmp_path):
    with pytest.raises(StateError, match=r"\['n'\] are the log's own names"):
        audit_log.append_entry(tmp_path / "log.jsonl", "sent", {"n": 3})
    with pytest.raises(ValueError, match="JSON"):
        audit_log.append_entry(tmp_path / "log.jsonl", "sent", {"loss": float("nan")})
    assert audit_log.verify_log(tmp_path / "log.jsonl") == LogHead()


def test_what_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot write the audit log"):
        audit_log.append_entry(tmp_path / "file" / "log.jsonl", "sent", {})
    with pytest.raises(StateError, match="cannot read an audit log"):
        audit_log.verify_log(tmp_path / "none.jsonl")


@pytest.mark.long
def test_several_processes_write_one_chain(tmp_path):
    file = tmp_path / "log.jsonl"
    gate, append = tmp_path / "gate", f"audit_log.append_entry(Path({str(file)!r}), 'sent', {{'i': i}})"
    code = (
        "import time; from pathlib import Path; from fedveil.records import audit_log; print('ready', flush=True)\n"
        f"while not Path({str(gate)!r}).exists(): time.sleep(0.001)\nfor i in range(500): {append}"
    )
    command = [sys.executable, "-c", code]
    with ExitStack() as stack:
        workers = [stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(4)]
        for worker in workers:
            worker.stdout.readline()
        gate.touch()
        assert [worker.wait(60) for worker in workers] == [0] * 4
    assert audit_log.verify_log(file).lines == 2000


@pytest.mark.parametrize(
    "text", ["", "3", "3:ab", "-1:" + "a" * 64, "03:" + "a" * 64, "3:" + "A" * 64, "3:" + "a" * 65]
)
def test_an_anchor_that_is_not_one_is_refused(text):
    with pytest.raises(StateError, match="anchor: expected"):
        LogHead.parse(text)


def test_an_anchor_is_its_own_text():
    assert LogHead.parse(str(LogHead(17, "ab" * 32))) == LogHead(17, "ab" * 32)
