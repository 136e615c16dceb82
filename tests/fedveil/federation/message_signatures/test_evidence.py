"""A signed message taken out of an audit log: who can check it, and that no other text passes for it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.console.main import main
from fedveil.errors import WireError
from fedveil.federation.message_signatures import claims
from fedveil.federation.message_signatures.evidence import MOST_BYTES, Evidence, EvidenceError
from fedveil.federation.secagg import crypto
from fedveil.records import audit_log
from tests.fedveil.federation.message_signatures.test_claims import ANSWER, ASKED, PRIVATE, PUBLIC, SMALL_ORDER

OTHER = crypto.verifying_key(bytes(range(1, 33))).hex()
FIELDS = {"instruction": ASKED, "signed": ANSWER}


def line(field: str) -> dict:
    """Return a line as a site ("instruction") or a server ("signed") writes it."""
    about, record = FIELDS[field], claims.sign(FIELDS[field], PRIVATE)
    return {field: {**about.as_evidence(), "key": record["key"], "signature": record["signature"]}}


def signed_text(text: str) -> bytes:
    """Return a file with another text that the same key signed."""
    return json.dumps({"signature": crypto.sign_bytes(PRIVATE, text.encode()).hex(), "statement": text}).encode()


@pytest.mark.parametrize("field", FIELDS)
def test_a_line_becomes_a_file_that_its_signers_key_alone_verifies(field):
    evidence = Evidence.from_line(line(field))
    read = Evidence.from_json(evidence.to_json().encode() + b"\n")
    assert read == evidence
    assert read.claims == FIELDS[field]
    read.require_signer(PUBLIC)
    for other in (OTHER, *(key.hex() for key in SMALL_ORDER)):
        with pytest.raises(EvidenceError, match="did not sign this message"):
            read.require_signer(other)
    with pytest.raises(EvidenceError, match="64 hex digits"):
        read.require_signer(PUBLIC[:16])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), field=st.sampled_from(sorted(FIELDS)))
def test_no_changed_byte_of_a_file_passes(data, field):
    text = bytearray(Evidence.from_line(line(field)).to_json().encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError):
        Evidence.from_json(bytes(text)).require_signer(PUBLIC)


def test_other_texts_of_the_same_key_are_no_evidence():
    right = ANSWER.signed_bytes().decode()
    body = json.loads(right.removeprefix(ANSWER.PURPOSE))
    texts = {
        "another purpose": "fedveil run 2\n{}",
        "a field too many": ANSWER.PURPOSE + json.dumps({**body, "z": 1}, sort_keys=True, separators=(",", ":")),
        "a field too few": ANSWER.PURPOSE + json.dumps({"app": "x"}, separators=(",", ":")),
        "blanks": ANSWER.PURPOSE + json.dumps(body, sort_keys=True),
        "another order": ANSWER.PURPOSE + json.dumps(dict(reversed(body.items())), separators=(",", ":")),
        "a name twice": right.replace('"attempt":1', '"attempt":2,"attempt":1'),
        "another type": right.replace('"round":3', '"round":"3"'),
        "a truth value": right.replace('"round":3', '"round":true'),
        "an instruction's claims as a reply's": ANSWER.PURPOSE
        + ASKED.signed_bytes().decode().removeprefix(ASKED.PURPOSE),
        "deep": ANSWER.PURPOSE + "[" * 30_000,
    }
    for name, text in texts.items():
        with pytest.raises(EvidenceError, match="this is not a file written by"):
            print(name, Evidence.from_json(signed_text(text)))
    for content in (b"", b"[]", b"{}", b"\xff", b" " * (MOST_BYTES + 1), b'{"statement":1,"signature":2}'):
        with pytest.raises(EvidenceError, match="this is not a file written by"):
            Evidence.from_json(content)


def test_the_longest_claims_that_a_log_does_not_cut_fit_into_a_file():
    longest = dataclasses.replace(ASKED, run="\N{SNOWMAN}" * 1000, site="\N{SNOWMAN}" * 1000)
    record = claims.sign(longest, PRIVATE)
    about = {**longest.as_evidence(), "key": record["key"], "signature": record["signature"]}
    read = Evidence.from_json(Evidence.from_line({"instruction": about}).to_json().encode())
    read.require_signer(PUBLIC)
    assert read.claims == longest


@pytest.fixture
def log(tmp_path):
    file = tmp_path / audit_log.NAME
    audit_log.append_entry(file, "sent", {"site": "north"})
    audit_log.append_entry(file, "accepted", {"site": "north", **line("signed")})
    return file


def test_prove_and_check_walk_from_a_log_to_a_third_party(log, tmp_path, capsys):
    assert main(["log", "prove", str(log), "1"]) == 0
    file = tmp_path / "reply.json"
    file.write_text(capsys.readouterr().out)
    assert main(["log", "check", str(file), "--key", PUBLIC]) == 0
    said = capsys.readouterr().out
    assert "signed a reply of site north: run r-0a1b2c3d, round 4, attempt 2" in said
    assert f"content = {'05' * 32}" in said
    assert "it does not show that the message arrived or counted" in said
    assert main(["log", "check", str(file), "--key", OTHER]) == 2
    assert "the message was changed, or another key signed it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("0", "line 0, sent: it has no signed message"),
        ("2", "a line from 0 to 1"),
        ("-1", "a line from 0"),
    ],
)
def test_a_line_that_holds_no_signed_message_is_named(log, capsys, number, words):
    assert main(["log", "prove", str(log), number]) == 2
    assert words in capsys.readouterr().err


def test_a_changed_log_proves_nothing(log, tmp_path, capsys):
    log.write_bytes(log.read_bytes().replace(b'"round":3', b'"round":4'))
    assert main(["log", "prove", str(log), "1"]) == 2
    assert "expected a whole line with its own hash" in capsys.readouterr().err
    assert main(["log", "check", str(tmp_path / "none.json"), "--key", PUBLIC]) == 2
    assert "expected a file of fedveil log prove, found none" in capsys.readouterr().err
