"""The whole protocol once more from its description, with Python's integers and other libraries' primitives."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest
from Crypto.Cipher import AES
from Crypto.Hash import SHA256
from Crypto.Protocol.DH import import_x25519_private_key, import_x25519_public_key, key_agreement
from Crypto.Protocol.KDF import HKDF
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedveil.errors import QuorumError
from tests.fedveil.federation.secagg.sites import add, agree_request, names, open_request, run
from tests.fedveil.federation.secagg.test_shamir import naive as naive_secret
from tests.fedveil.federation.secagg.test_shamir import share_at

SITES = names(4)  # q = t = 3


def about(purpose: str, *parts) -> bytes:
    return json.dumps(["fedveil secure aggregation 2", purpose, *parts], separators=(",", ":")).encode()


def derived(secret: bytes, plan: str, size: int, *info) -> bytes:
    return HKDF(secret, size, bytes.fromhex(plan), SHA256, context=about(*info))


def shared(private: bytes, public: str) -> bytes:
    """X25519, of another library."""
    return key_agreement(
        static_priv=import_x25519_private_key(private),
        static_pub=import_x25519_public_key(bytes.fromhex(public)),
        kdf=lambda agreed: agreed,
    )


def stream(key: bytes, length: int, bits: int) -> list[int]:
    """Integers of AES-256 in counter mode, little endian."""
    size = bits // 8
    text = AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=0).encrypt(bytes(length * size))
    return [int.from_bytes(text[i * size : (i + 1) * size], "little") for i in range(length)]


def pair_secret(plan, site: str, other: str, private: bytes) -> bytes:
    keys = {member.site: member.key for member in plan.members}
    return derived(shared(private, keys[other]), plan.digest, 16, "pair", min(site, other), max(site, other))


def own_mask(plan, site: str, secret: bytes, length: int) -> list[int]:
    return stream(derived(secret, plan.digest, 32, "own mask", site), length, plan.bits)


def pair_mask(plan, site: str, other: str, secret: bytes, length: int) -> list[int]:
    """What `site` adds."""
    first, second = min(site, other), max(site, other)
    mask = stream(derived(secret, plan.digest, 32, "pair mask", first, second), length, plan.bits)
    return mask if site == first else [-m for m in mask]


def naive_upload(plan, site: str, vector: list[int], private: bytes, secret: bytes) -> list[int]:
    """y_i, from the site's private prekey, its own secret and the public prekeys of the others."""
    columns = [vector, own_mask(plan, site, secret, len(vector))]
    for member in plan.members:
        if member.site != site:
            pair = pair_secret(plan, site, member.site, private)
            columns.append(pair_mask(plan, site, member.site, pair, len(vector)))
    return [sum(column) % (1 << plan.bits) for column in zip(*columns, strict=True)]


def naive_row(plan, site: str, holder: str, row: str, private: bytes) -> list[bytes]:
    """The shares in a row, as `holder` decrypts it with its private prekey."""
    keys, data = {member.site: member.key for member in plan.members}, bytes.fromhex(row)
    key = derived(shared(private, keys[site]), plan.digest, 32, "row", site, holder)
    cipher = AES.new(key, AES.MODE_GCM, nonce=data[:12])
    cipher.update(about("row", plan.digest, site, holder))
    text = cipher.decrypt_and_verify(data[12:-16], data[-16:])
    return [text[start : start + 16] for start in range(0, len(text), 16)]


def naive_attachment(plan, site: str, private: dict[str, bytes], secret: bytes, coefficients: bytes, attached) -> None:
    """Compares what goes beside the vector: the secrets' digests, each holder's row, and the shares' digests."""
    p, others = plan.digest, [member.site for member in plan.members if member.site != site]
    pairs = {other: pair_secret(plan, site, other, private[site]) for other in others}
    assert attached.plan == p
    assert attached.own == hashlib.sha256(about("own secret", p, site) + secret).hexdigest()
    assert attached.pairs == {
        other: hashlib.sha256(about("pair secret", p, min(site, other), max(site, other)) + u).hexdigest()
        for other, u in pairs.items()
    }
    secrets = [secret, *pairs.values()]
    size = 16 * len(secrets)
    for place, holder in enumerate((member.site for member in plan.members), start=1):
        shares = [
            share_at(place, s, [coefficients[d * size + 16 * i :][:16] for d in range(plan.threshold - 1)])
            for i, s in enumerate(secrets)
        ]
        assert naive_row(plan, site, holder, attached.rows[holder], private[holder]) == shares
        contexts = [about("own share", p, site, holder), *(about("pair share", p, site, holder, o) for o in others)]
        digests = [hashlib.sha256(c + share).hexdigest()[:32] for c, share in zip(contexts, shares, strict=True)]
        assert list(attached.shares[holder]) == digests


def naive_sum(plan, uploads: dict[str, list[int]], opened) -> list[int]:
    """The sum, from the masked vectors and the shares that t sites of the list opened."""
    length, cohort = len(next(iter(uploads.values()))), [member.site for member in plan.members]
    place = {name: i for i, name in enumerate(cohort, start=1)}
    columns = list(uploads.values())
    for site in uploads:
        own = naive_secret({place[h]: bytes.fromhex(said.own[site]) for h, said in opened.items()})
        columns.append([-m for m in own_mask(plan, site, own, length)])
        for silent in set(cohort) - uploads.keys():
            pair = naive_secret({place[h]: bytes.fromhex(said.pairs[site][silent]) for h, said in opened.items()})
            columns.append([-m for m in pair_mask(plan, site, silent, pair, length)])
    return [sum(column) % (1 << plan.bits) for column in zip(*columns, strict=True)]


@pytest.mark.long
@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(
    bits=st.sampled_from([32, 64]),
    length=st.integers(1, 9),
    silent=st.sets(st.sampled_from(SITES), max_size=1),
    deaf=st.sampled_from(["", *SITES]),
    data=st.data(),
)
def test_uploads_rows_and_sum_are_those_of_the_description(bits, length, silent, deaf, data):
    local = run(SITES, bits=bits)
    attempt = local.begin(0, 0, SITES)
    plan = attempt.plan
    private = {name: bytes.fromhex(site.store.load().next.private) for name, site in local.sites.items()}
    entry = st.integers(0, (1 << bits) - 1)
    vectors = {s: data.draw(st.lists(entry, min_size=length, max_size=length)) for s in SITES if s not in silent}
    uploads, seen = {}, {}
    for name, vector in vectors.items():
        hidden, drawn = np.array(vector, f"<u{bits // 8}"), []
        attached = _masked(local, name, plan, hidden, drawn)
        secret = next(s for s in drawn if len(s) == 16)
        coefficients = next(s for s in drawn if len(s) == 16 * len(SITES) * (plan.threshold - 1))
        seen[name] = hidden.tolist()
        assert seen[name] == naive_upload(plan, name, vector, private[name], secret)
        assert attached.vector == hashlib.sha256(hidden.tobytes()).hexdigest()
        naive_attachment(plan, name, private, secret, coefficients, attached)
        uploads[name] = (hidden, attached)
    add(attempt, uploads)
    wanted = [sum(column) % (1 << bits) for column in zip(*vectors.values(), strict=True)]
    agreed, asked = {}, agree_request(plan, vectors)
    answering = [name for name in vectors if name != deaf]
    if silent:
        agreed = {name: local.sites[name].agree(asked).signature for name in answering}
    if len(answering) < plan.quorum:  # the sum's sites are as few as q, and one of them is deaf
        with pytest.raises(QuorumError, match=r"secure\.threshold"):
            local.unmask(attempt, deaf=[deaf])
        return
    opened = {n: local.sites[n].open(open_request(plan, n, vectors, uploads, agreed)) for n in answering}
    assert naive_sum(plan, seen, opened) == wanted
    local.unmask(attempt, deaf=[deaf])  # the sites answer as before
    assert attempt.total().tolist() == wanted


def _masked(local, name, plan, hidden, drawn):
    """Masks, and notes what the site has drawn from the operating system."""
    real = os.urandom
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", lambda count: drawn.append(real(count)) or drawn[-1])
        return local.mask(name, plan, hidden)
