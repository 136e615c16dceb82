"""A message's line says what is its own; what messages have in common stands once."""

from __future__ import annotations

import copy
import json

import pytest

from fedveil.errors import StateError
from fedveil.records import atomic_files
from fedveil.records.disclosure_ledger import DisclosureLedger, counted_in, read_messages

FIELDS = [[f"transformer.h.{i}.attn.c_attn.lora_A", "dense float32", [8, 192], 6144] for i in range(24)]


def told(variant="A", fields=FIELDS, total=150_000, figures=None, **scalars) -> dict:
    """As envelope.describe has it."""
    payload = sum(field[3] for field in fields)
    about = {"variant": variant, "bytes": total, "payload_bytes": payload, "fields": fields, "scalars": scalars}
    return about | {"figures": figures or {}}


def where(site="north", round_=0, attempt=0) -> dict:
    return {"round": round_, "attempt": attempt, "site": site}


def test_what_was_appended_is_read_and_fields_stand_once(tmp_path):
    file = tmp_path / "disclosure.jsonl"
    appended, ledger = [], DisclosureLedger(file)
    for round_ in range(20):
        ledger = DisclosureLedger(file) if round_ == 7 else ledger  # a resumed run goes on with the same kinds
        for site in ("north", "south"):
            for direction, message in (("down", told("both", FIELDS * 2)), ("up", told("AB"[round_ % 2]))):
                ledger.append(where(site, round_), direction, message)
                appended.append(where(site, round_) | {"direction": direction} | message)
    messages = read_messages(file)
    assert [{key: value for key, value in row.items() if key != "kind"} for row in messages] == appended
    lines = file.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines if "form" in line] == [0, 1, 2]
    assert len({id(row["fields"]) for row in messages}) == 3


def test_a_message_of_a_thousand_sites_takes_less_than_300_bytes(tmp_path):
    """2.7 kB before: every line had its fields."""
    ledger = DisclosureLedger(tmp_path / "d")
    for i in range(1000):
        ledger.append(where(f"hospital-of-the-town-{i:04}", 99, 3), "up", told(total=10**10, next_factor="B"))
    lines = (tmp_path / "d").read_bytes().splitlines(keepends=True)
    assert max(map(len, lines[1:])) < 160
    assert (tmp_path / "d").stat().st_size / 1000 < 300


def test_figures_of_held_out_rows_stand_in_the_message_s_line_with_their_bytes(tmp_path):
    ledger, figures = DisclosureLedger(tmp_path / "d"), {"loss_held_out": 18, "rows_held_out": 5}
    for each in (figures, {}):
        ledger.append(where(), "up", told(figures=each))
    assert [row["figures"] for row in read_messages(tmp_path / "d")] == [figures, {}]
    assert "figures" not in (tmp_path / "d").read_text().splitlines()[2]
    with (tmp_path / "d").open("a") as file:
        file.write('{"round": 0, "attempt": 0, "site": "s", "kind": 0, "bytes": 1, "figures": {"a": "x"}}\n')
    with pytest.raises(StateError, match="line 4: .*figures: expected bytes by name"):
        read_messages(tmp_path / "d")


def test_an_upload_into_a_buffer_counts_in_the_attempt_that_took_it(tmp_path):
    ledger = DisclosureLedger(tmp_path / "d")
    for more in ({}, {"step": 2}, {"step": 2, "step-attempt": 1}):
        ledger.append(where() | more, "up", told())
    counted = [counted_in(row) for row in read_messages(tmp_path / "d")]
    assert counted == [(where()["round"], where()["attempt"]), (2, 0), (2, 1)]


def test_lengths_that_only_the_sender_knows_stand_in_the_message_s_line(tmp_path):
    fields = [["w", "dense float32", [7], 28], ["b", "bits", [9], 2]]
    other = copy.deepcopy(fields)
    other[0][2:] = [[5], 20]
    ledger = DisclosureLedger(tmp_path / "d")
    for each in (fields, other, fields):
        ledger.append(where(), "up", told(fields=each))
    assert [(row["fields"], row["payload_bytes"]) for row in read_messages(tmp_path / "d")] == [
        (fields, 30), (other, 22), (fields, 30),
    ]  # fmt: skip
    lines = (tmp_path / "d").read_text().splitlines()
    assert ['"others": [[0, [5], 20]]' in line for line in lines] == [False, False, True, False]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_torn_line_of_either_sort_is_cut_off_and_the_file_goes_on(tmp_path, kept):
    file = tmp_path / "d"
    DisclosureLedger(file).append(where(), "up", told())
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:kept]) + (lines[kept][:-9] if kept < 2 else b'{"round": 1, "att'))
    assert len(read_messages(file)) == (kept == 2)  # a reader leaves it out
    assert atomic_files.cut_torn_line(file)
    DisclosureLedger(file).append(where("south", 1), "up", told())
    assert [row["site"] for row in read_messages(file)] == ["north", "south"][kept < 2 :]
    assert file.read_text().count('"form"') == 1


@pytest.mark.parametrize("reader", [read_messages, DisclosureLedger])
def test_the_form_of_0_1_is_named(tmp_path, reader):
    (tmp_path / "d").write_text(json.dumps(where() | {"direction": "up"} | told()) + "\n")
    with pytest.raises(StateError, match=r"d, line 1: expected form 2.*the form of 0\.1; read it with the version"):
        reader(tmp_path / "d")


@pytest.mark.parametrize(
    "line, at, changes, expected",
    [
        (0, "form", 3, "form: expected 2, found 3"),
        (0, "kind", 1, "kind: expected 0, found 1"),
        (0, "kind", False, "kind: expected 0, found False"),
        (0, "direction", "out", 'direction: expected "up" or "down", found \'out\''),
        (0, "variant", None, "variant: expected a text, found None"),
        (0, "fields", [["w", "dense", [-1], 4]], "fields: expected name, codec, shape and bytes of each"),
        (0, "fields", [["w"]], "not enough values"),
        (1, "kind", 1, "kind: expected one of the 1 above, found 1"),
        (1, "kind", -1, "kind: expected a count, found -1"),
        (1, "bytes", 1.5, "bytes: expected a count, found 1.5"),
        (1, "round", "0", "round: expected a count, found '0'"),
        (1, "site", ["north"], "site: expected a text, found"),
        (1, "scalars", [], "scalars: expected words by name"),
        (1, "others", [[24, [8], 32]], "others: expected index, shape and bytes of fields of its kind"),
        (1, "others", [[-1, [8], 32]], "others: expected index, shape and bytes of fields of its kind"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, at, changes, expected):
    file = tmp_path / "d"
    DisclosureLedger(file).append(where(), "up", told())
    rows = [json.loads(text) for text in file.read_text().splitlines()]
    rows[line][at] = changes
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        StateError, match=f"d, line {line + 1}: this is neither a message nor a kind of messages"
    ) as error:
        read_messages(file)
    assert expected in str(error.value)
    assert "restore it, or move the file away" in str(error.value)


@pytest.mark.parametrize("text", ["nonsense\n", "[]\n", '"form"\n', "7\n", "\n"])
def test_a_line_that_is_no_object_is_named(tmp_path, text):
    (tmp_path / "d").write_text(text)
    with pytest.raises(StateError, match="d, line 1: this is neither a message nor a kind of messages"):
        read_messages(tmp_path / "d")
