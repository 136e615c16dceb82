"""A signature of a run: what it names, until when, and that a refusal for its sake is in the site's log."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, date, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedveil.errors import PolicyError
from fedveil.guard import run_signature
from fedveil.records import audit_log
from tests.fedveil.guard.test_clientapp import KEY, PUBLIC, Site, app, fab

__all__ = ["app", "fab"]  # fixtures

DIGEST, DAY = "5f" * 32, date(2026, 3, 31)
TEXT = run_signature.sign_run(KEY, "first", DAY, DIGEST)
TODAY = datetime.now(UTC).date()  # the tests may end tomorrow


def of_version_0_1(digest: str) -> str:
    return f"{PUBLIC} {base64.b64encode(KEY.sign(b'fedveil app 1' + bytes([10]) + digest.encode())).decode()}"


def test_it_is_of_one_key_run_day_and_bundle():
    assert run_signature.verify_signer("", "first", DIGEST, DAY) == ""
    assert run_signature.verify_signer(TEXT, "first", DIGEST, DAY) == PUBLIC
    assert run_signature.verify_signer(TEXT, "first", DIGEST, DAY - timedelta(days=400)) == PUBLIC
    kind, key, day, signed = TEXT.split()
    other = run_signature.sign_run(Ed25519PrivateKey.from_private_bytes(bytes(32)), "first", DAY, DIGEST).split()[1]
    for text, run, digest in (
        (TEXT, "second", DIGEST),
        (TEXT, "first", "5e" * 32),
        (f"{kind} {key} 2027-03-31 {signed}", "first", DIGEST),
        (f"{kind} {other} {day} {signed}", "first", DIGEST),
        (f"{kind} {key[:-4]} {day} {signed}", "first", DIGEST),
        (f"{kind} {key} 2026-02-31 {signed}", "first", DIGEST),
        (f"{kind} {key} {day} {signed[:-6]}", "first", DIGEST),
    ):
        with pytest.raises(PolicyError, match="it is not a valid signature over run"):
            run_signature.verify_signer(text, run, digest, DAY)


def test_its_day_ends():
    with pytest.raises(PolicyError, match="it expired on 2026-03-31; sign it with"):
        run_signature.verify_signer(TEXT, "first", DIGEST, DAY + timedelta(days=1))


def test_the_form_of_version_0_1_is_refused_in_words():
    with pytest.raises(
        PolicyError, match="it is a signature over the bundle only, as made by version 0.1.*; sign it with"
    ):
        run_signature.verify_signer(of_version_0_1(DIGEST), "first", DIGEST, DAY)


@pytest.mark.parametrize("text", ["ssh-ed25519", TEXT + "!", TEXT.replace("ed25519", "rsa"), "ü", "\x1b[2J", "x"])
def test_something_else_is_refused_in_few_words(text):
    text = text * 10**6 if text == "x" else text
    with pytest.raises(PolicyError, match='it must read "ssh-ed25519 KEY DATE SIGNATURE"') as caught:
        run_signature.verify_signer(text, "first", DIGEST, DAY)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text,reason",
    [
        ("ssh-lattice AAAAC3NzaC1sYXR0aWNl c2lnbmF0dXJl", "KEY DATE SIGNATURE"),
        ("ssh-ed25519 AAAAC3NzaC1sYXR0aWNl 2999-12-31 c2lnbmF0dXJl", "it is not a valid signature over run"),
        ("old", "over the bundle only"),
        ("yesterday", "it expired on"),
        ("another name", "it is not a valid signature over run 'r'"),
    ],
)
@pytest.mark.parametrize("policy", ["", f'signers = ["{PUBLIC}"]'])
def test_every_refusal_for_its_sake_has_a_line_in_the_audit_log(tmp_path, monkeypatch, fab, text, reason, policy):
    digest = hashlib.sha256(fab).hexdigest()
    made = {
        "old": of_version_0_1(digest),
        "yesterday": run_signature.sign_run(KEY, "r", TODAY - timedelta(days=1), digest),
        "another name": run_signature.sign_run(KEY, "s", TODAY + timedelta(days=1), digest),
    }
    config = {"run.name": "r", "run.signature": made.get(text, text)}
    Site(tmp_path, monkeypatch, fab, policy, run_config=config).assert_refused(reason)


def test_a_signed_name_is_the_name_by_which_the_site_keeps_the_runs_state(tmp_path, monkeypatch, fab):
    text = run_signature.sign_run(KEY, "r", TODAY + timedelta(days=1), hashlib.sha256(fab).hexdigest())
    config = {"run.name": "r", "run.signature": text}
    Site(tmp_path, monkeypatch, fab, "", run_config=config, order={"run": "other-0a1b2c3d"}).assert_refused(
        "a run named 'r'"
    )


@pytest.mark.parametrize(
    "order,node,reason",
    [
        ({"run": "x" * 20_000_000}, {}, "order: run: expected str of at most 100000"),
        ({"run": "../../x"}, {}, "order: run: expected at most 64 letters"),
        ({"site": "north\n{}"}, {}, "order: site: expected at most 64 letters"),
        ({"method": "\x1b[2J"}, {}, "order: method: expected at most 64 letters"),
        ({"fields": "[" * 1_000_000}, {}, "order: fields: expected str of at most 100000 characters"),
        ({"round": "0"}, {}, "order: round: expected int"),
        ({"log": "\x1b]0;x\x07"}, {}, "order: log: expected an anchor"),
        ({"x" * 100_000: 1}, {}, "the instruction is not in the format of this version"),
        ({}, {"unknown": "x\x1b"}, "ConfigError"),
    ],
)
def test_hostile_orders_are_refused_in_few_words_and_the_log_stays_short(
    tmp_path, monkeypatch, fab, order, node, reason
):
    site = Site(tmp_path, monkeypatch, fab, "", order=order, node=node)
    with pytest.raises(Exception, match="Error"):
        site.install()
    (line,) = audit_log.read_log(site.log)
    assert line["event"] == "refused"
    assert reason in line["reason"]
    assert line["reason"].isprintable()
    assert site.log.stat().st_size < 4000
