"""The signed bytes of instructions and replies: their one form, and that no field and no kind can be exchanged."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedveil.errors import WireError
from fedveil.federation.message_signatures import claims
from fedveil.federation.message_signatures.claims import InstructionClaims, ReplyClaims, answer_claims
from fedveil.federation.secagg import crypto

PRIVATE, OTHER = bytes(range(32)), bytes(range(1, 33))
PUBLIC = crypto.verifying_key(PRIVATE).hex()
ASKED = InstructionClaims(
    federation="0a" * 16, flower_run="11", node="7", run="r-0a1b2c3d", round=3, attempt=1, site="north", kind="train",
    app="5f" * 32, config="01" * 32, order="02" * 32, settings="03" * 32, content="04" * 32, issued=1_790_000_000,
    until=1_790_003_600, nonce="ab" * 16,
)  # fmt: skip
ANSWER = answer_claims(ASKED, "05" * 32, f"4:{'cd' * 32}")
# As they stand in the specification of the wire: a change of a byte is a new version.
GOLDEN_ASKED = (
    b'fedveil instruction 1\n{"app":"' + b"5f" * 32 + b'","attempt":1,"config":"' + b"01" * 32 + b'","content":"'
    + b"04" * 32 + b'","federation":"' + b"0a" * 16 + b'","flower_run":"11","issued":1790000000,"kind":"train","node":'
    b'"7","nonce":"' + b"ab" * 16 + b'","order":"' + b"02" * 32 + b'","round":3,"run":"r-0a1b2c3d","settings":"'
    + b"03" * 32 + b'","site":"north","until":1790003600}'
)  # fmt: skip
GOLDEN_ANSWER = (
    b'fedveil reply 1\n{"app":"' + b"5f" * 32 + b'","attempt":1,"content":"' + b"05" * 32 + b'",'
    b'"federation":"' + b"0a" * 16 + b'","flower_run":"11","instruction":"'
    + ASKED.digest.encode() + b'","kind":"train","log":"4:' + b"cd" * 32
    + b'","node":"7","round":3,"run":"r-0a1b2c3d","site":"north"}'
)  # fmt: skip
# y = 0, 1, -1, the two of order 8, p and p + 1, which are 0 and 1 again; each with both signs.
_PRIME = 2**255 - 19
_ORDER_8 = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")
SMALL_ORDER = [
    (y | sign << 255).to_bytes(32, "little")
    for y in (0, 1, _PRIME - 1, _ORDER_8, _PRIME - _ORDER_8, _PRIME, _PRIME + 1)
    for sign in (0, 1)
]


def other_value(value: object) -> object:
    return value + 1 if isinstance(value, int) else f"{value}0"


@pytest.mark.parametrize(("signed", "golden"), [(ASKED, GOLDEN_ASKED), (ANSWER, GOLDEN_ANSWER)], ids=["down", "up"])
def test_the_signed_bytes_are_those_of_version_1(signed, golden):
    assert signed.signed_bytes() == golden


@pytest.mark.parametrize("signed", [ASKED, ANSWER], ids=["down", "up"])
def test_a_signature_holds_for_these_claims_and_for_none_with_another_field(signed):
    record = claims.sign(signed, PRIVATE)
    assert claims.is_signed(signed, PUBLIC, record)
    for field in fields(signed):
        changed = replace(signed, **{field.name: other_value(getattr(signed, field.name))})
        assert not claims.is_signed(changed, PUBLIC, record), field.name


def test_a_signature_of_one_kind_is_none_of_the_other_and_of_no_other_key():
    down, up = claims.sign(ASKED, PRIVATE), claims.sign(ANSWER, PRIVATE)
    assert not claims.is_signed(ANSWER, PUBLIC, down)
    assert not claims.is_signed(ASKED, PUBLIC, up)
    assert not claims.is_signed(ASKED, crypto.verifying_key(OTHER).hex(), down)
    assert not claims.is_signed(ASKED, PUBLIC, {**down, "key": claims.key_id(crypto.verifying_key(OTHER).hex())})


def test_no_two_texts_that_fedveil_signs_begin_alike():
    beginnings = [
        InstructionClaims.PURPOSE.encode(), ReplyClaims.PURPOSE.encode(), b"fedveil run 2\n", b"FedVeil relay 1",
        crypto.context_bytes("x")[:30], b'{"ca":',
    ]  # fmt: skip
    for one in beginnings:
        assert [other for other in beginnings if other.startswith(one)] == [one]


@pytest.mark.parametrize("public", SMALL_ORDER, ids=bytes.hex)
def test_nothing_is_signed_by_a_key_of_small_order(public):
    # R = A and S = 0: what the library takes for any text where the key is the identity.
    forged = {"key": claims.key_id(public.hex()), "signature": (public + bytes(32)).hex()}
    assert not claims.is_signed(ASKED, public.hex(), forged)
    assert not claims.is_signed(ANSWER, public.hex(), forged | {"signature": bytes(64).hex()})


def test_the_library_takes_a_signature_by_a_key_of_small_order_for_any_text():
    """The control: without the check above, the owner of such a key could deny every signature."""
    identity = (1).to_bytes(32, "little")
    signature = identity + bytes(32)
    for text in (b"any text", b"another"):
        assert Ed25519PublicKey.from_public_bytes(identity).verify(signature, text) is None  # else it raises
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(PUBLIC)).verify(signature, b"any text")


@pytest.mark.parametrize(("name", "value"), [("run", "\ud800"), ("round", 1 << 53), ("round", -1)])
def test_a_value_without_a_canonical_form_is_never_signed(name, value):
    with pytest.raises(WireError, match=name):
        claims.sign(replace(ASKED, **{name: value}), PRIVATE)


def test_a_bool_is_no_number():
    with pytest.raises(WireError, match="attempt"):
        replace(ASKED, attempt=True).signed_bytes()


DOWN = {**claims.sign(ASKED, PRIVATE), "issued": 1, "until": 2, "nonce": "ab" * 16}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"version": True}, {"key": "g" * 16}, {"key": "a" * 15}, {"signature": "00" * 63},
        {"signature": "AB" * 64}, {"nonce": "ab" * 15}, {"issued": 1.0}, {"until": "2"}, {"more": 1},
    ],
)  # fmt: skip
def test_a_signature_record_has_one_form(change):
    assert claims.read_signature(DOWN, is_instruction=True) == DOWN
    with pytest.raises(WireError, match="signature"):
        claims.read_signature(DOWN | change, is_instruction=True)


def test_a_signature_record_lacks_nothing_and_has_the_form_of_its_direction():
    for name in DOWN:
        with pytest.raises(WireError, match="signature: (the record does not consist|key, signature and nonce)"):
            claims.read_signature({key: value for key, value in DOWN.items() if key != name}, is_instruction=True)
    with pytest.raises(WireError, match="signature: (the record does not consist|key, signature and nonce)"):
        claims.read_signature(DOWN, is_instruction=False)


def test_the_evidence_of_a_log_gives_the_claims_again():
    assert InstructionClaims(**ASKED.as_evidence()) == ASKED  # type: ignore[arg-type]
    assert all(len(str(value)) < 1000 for value in ASKED.as_evidence().values())  # the log cuts longer texts
