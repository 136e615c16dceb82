"""Fixed inputs and the bytes that every implementation of the protocol makes of them; sites a, b, c."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from fedveil.federation.secagg import crypto, derivations, mask_streams, shamir
from fedveil.federation.secagg.plan import AttemptPlan, Prekey, agreed_text, list_digest

P = "64879f7d6b960a01909762d911a32d4582c20010c5641ee90278b644a9e3b525"
B_A = bytes(range(16))
SHARED = crypto.exchange_keys(b"\x01" * 32, crypto.public_key_of(b"\x02" * 32))
U_AB = derivations.pair_secret(SHARED, P, "a", "b")
PLAN = "ba47f87146bad98f8da07824bb407d55dee1cbc5a847dc707967425fd4d285f5"
LIST = "e0c3725a5fe5cd0df4fe9cbb61205d5f76faad788d3685b86c7b8e7542e8ff91"
AGREED = (
    "300c579865e994a49d8094d3272a71a0188c320f4865b1b065e63eec5850c300"
    "fbfb4b604c1e60a233fabe80b0d3147050b843c42ed0de53514b322a640dab0c"
)


def first_bytes_of(mask: mask_streams.MaskStream) -> str:
    vector = np.zeros(2, "<u4")
    mask_streams.add_masks(vector, [mask])
    return vector.tobytes().hex()


def prekey(site: str, private: int, signing_key: int) -> Prekey:
    unsigned = Prekey(
        site=site,
        signing_key=crypto.verifying_key(bytes([signing_key]) * 32).hex(),
        number=0,
        key=crypto.public_key_of(bytes([private]) * 32).hex(),
        signature="0" * 128,
    )
    signature = crypto.sign_bytes(bytes([signing_key]) * 32, unsigned.text("run-1")).hex()
    return unsigned.model_copy(update={"signature": signature})


def plan() -> AttemptPlan:
    return AttemptPlan(
        run="run-1", round=0, attempt=0, roster="", app="", config="0" * 64, broadcast="1" * 64, entries="", bits=32,
        most_weight=1, bound=64.0, noise="site", least=3, colluding=1, quorum=3, threshold=3, neighbours=0,
        members=(prekey("a", 1, 3), prekey("b", 2, 4), prekey("c", 6, 5)),
    )  # fmt: skip


def test_first_line_is_the_digest_of_plan():
    assert hashlib.sha256(b"plan").hexdigest() == P


def test_pair_secret_and_its_mask():
    assert SHARED.hex() == "2ed76ab549b1e73c031eb49c9448f0798aea81b698279a0c3dc3e49fbfc4b953"
    assert U_AB.hex() == "9795653bad5cf11267992df83aa1bd6a"
    assert derivations.pair_secret(SHARED, P, "b", "a") == U_AB
    mask = derivations.pairwise_mask(U_AB, P, "a", "b")
    assert (first_bytes_of(mask), mask.sign) == ("ef3715229deaf0d7", 1)
    assert derivations.pairwise_mask(U_AB, P, "b", "a") == mask_streams.MaskStream(mask.key, -1)


def test_own_mask():
    assert first_bytes_of(derivations.own_mask(B_A, P, "a")) == "ad375a0dfb6d00ae"


def test_shares_at_given_coefficients():
    coefficients = np.array([list(range(0x10, 0x20)), list(range(0xF0, 0xE0, -1))], np.uint8)
    shares = [row[0] for row in shamir.evaluate_shares(np.frombuffer(B_A, np.uint8), coefficients, 255)]
    assert shares[0].hex() == "e0fffefdfcfbfaf9f8f7f6f5f4f3f2f1"
    assert shares[1].hex() == "cdb2b3bcb1aeafa0b58a8b8489969798"
    assert shares[254].hex() == "fbcfc50ed1565c97f9e6ec27f87f75be"
    assert shamir.combine_shares({1: shares[0], 2: shares[1], 255: shares[254]}) == B_A
    assert shamir.combine_shares({1: shares[0], 255: shares[254]}) != B_A


def test_row_keys_and_a_row(monkeypatch):
    own = crypto.exchange_keys(b"\x01" * 32, crypto.public_key_of(b"\x01" * 32))
    key = derivations.row_key(SHARED, P, "a", "b")
    assert key.hex() == "216709c89cad63247255f1af874939db362a71462c685066000183e8c485d92d"
    assert derivations.row_key(own, P, "a", "a").hex() == (
        "fd6ffac6f3265a350a036b9f05d61b13c40a53b8d058f7107ccbb2126c57f06b"
    )
    monkeypatch.setattr(crypto.os, "urandom", bytes)
    share = bytes.fromhex("cdb2b3bcb1aeafa0b58a8b8489969798")
    row = derivations.encrypt_row(key, [share, U_AB], P, "a", "b")
    assert hashlib.sha256(bytes.fromhex(row)).hexdigest() == (
        "951eb2012a7bcc87b96bb5bbfb949cebeefe36af097f560f21b29345d31d3ac8"
    )
    assert derivations.decrypt_row(key, row, 2, P, "a", "b") == [share, U_AB]


def test_digests_of_secrets_and_shares():
    share = bytes.fromhex("cdb2b3bcb1aeafa0b58a8b8489969798")
    assert derivations.pair_secret_digest(U_AB, P, "b", "a") == (
        "95403e34cb97232deb846ba9ff387659d72372562f3ad81c885acf5993b7f9c6"
    )
    assert derivations.own_secret_digest(B_A, P, "a") == (
        "64c8e817cea1bbb755484520b8b359aaa691d007e542bd8c9ddbf8fbe01464e2"
    )
    assert derivations.share_digest(share, P, "a", "b") == "316af421839e2ea0e09ca4b2bdb500b1"
    assert derivations.share_digest(U_AB, P, "a", "b", "b") == "b01b33fd69b63e97081fdad8f7b2e925"


def test_plan_is_rewritten_before_it_is_hashed():
    text = plan().to_bytes()
    assert (len(text), plan().digest) == (1333, PLAN)
    assert b'"bound":64.0,' in text
    as_integer = text.replace(b'"bound":64.0,', b'"bound":64,')
    assert as_integer != text
    assert AttemptPlan.from_bytes(as_integer).digest == PLAN
    twice = text.replace(b'"round":0', b'"round":7,"round":0')
    assert AttemptPlan.from_bytes(twice).digest == PLAN
    spaced = json.dumps(json.loads(text), indent=1).encode()
    assert AttemptPlan.from_bytes(spaced).digest == PLAN


def test_list_and_the_signature_of_it():
    assert list_digest(P, ["b", "a"]) == LIST
    text = derivations.protocol_context("agreed", "run-1", 0, P, LIST)
    assert crypto.sign_bytes(b"\x03" * 32, text).hex() == AGREED
    assert agreed_text(plan(), LIST) == derivations.protocol_context("agreed", "run-1", 0, PLAN, LIST)


@pytest.mark.parametrize("part", ["ü", 'a"b', "a\\b", "\x7f\x00", "日本", 7, -1])
def test_context_is_the_text_that_json_writes(part):
    expected = json.dumps(["fedveil secure aggregation 2", "purpose", part, "x"], separators=(",", ":")).encode()
    assert derivations.protocol_context("purpose", part, "x") == expected
