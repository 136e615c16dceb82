"""The whole protocol once more with Python's integers, entry by entry, from what the sites and their holders know."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest
from Crypto.Cipher import AES
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.state import MemorySecAggStore
from tests.fedveil.federation.secagg.sites import add, names, run, unmasked

SITES = names(4)


class Remembers(MemorySecAggStore):
    """Every seed that a site has had, by number."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: dict[int, bytes] = {}

    def save(self, kept) -> None:
        if kept.seed:
            self.seeds[kept.prekeys - 1] = bytes.fromhex(kept.seed)
        super().save(kept)


def stream(key: bytes, length: int, bits: int) -> list[int]:
    """Integers of AES-256 in counter mode, little endian."""
    size = bits // 8
    text = AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=0).encrypt(bytes(length * size))
    return [int.from_bytes(text[i * size : (i + 1) * size], "little") for i in range(length)]


def naive_upload(plan, site: str, vector: list[int], seeds: dict[str, bytes], secret: bytes) -> list[int]:
    """y_i, from the private prekey of one end of each pair and the public one of the other."""
    modulus, context, length = 1 << plan.bits, bytes.fromhex(plan.digest), len(vector)
    own = crypto.derive_key(secret, crypto.context_bytes("own mask", site), context)
    masked_vector = [x + m for x, m in zip(vector, stream(own, length, plan.bits), strict=True)]
    for other in plan.cohort:
        if other != site:
            first, second = min(site, other), max(site, other)
            public = bytes.fromhex(plan.prekey_of(second).key)
            key = crypto.agree_secret(
                crypto.private_key_from(seeds[first]), public, crypto.context_bytes("pair mask", first, second), context
            )
            sign = 1 if site < other else -1
            masked_vector = [y + sign * m for y, m in zip(masked_vector, stream(key, length, plan.bits), strict=True)]
    return [y % modulus for y in masked_vector]


@settings(max_examples=12, deadline=None)
@given(
    bits=st.sampled_from([32, 64]),
    length=st.integers(1, 9),
    silent=st.sets(st.sampled_from(SITES), max_size=1),
    deaf=st.sampled_from(["", *SITES]),
    data=st.data(),
)
def test_uploads_and_sum_are_those_of_python_integers(bits, length, silent, deaf, data):
    local = run(SITES, bits=bits)
    local.sites |= {name: replace(site, store=Remembers()) for name, site in local.sites.items()}
    attempt = local.begin(0, 0, SITES)
    plan, secrets = attempt.plan, {}
    seeds = {name: local.sites[name].store.seeds[plan.prekey_of(name).number] for name in SITES}
    entry = st.integers(0, (1 << bits) - 1)
    vectors = {s: data.draw(st.lists(entry, min_size=length, max_size=length)) for s in SITES if s not in silent}
    uploads = {}
    for name, vector in vectors.items():
        hidden = np.array(vector, f"<u{bits // 8}")
        drawn = []
        uploads[name] = (hidden, _masked(local.sites[name], plan, hidden, drawn))
        secrets[name] = next(s for s in drawn if hashlib.sha256(s).hexdigest() == uploads[name][1].mask)
        assert hidden.tolist() == naive_upload(plan, name, vector, seeds, secrets[name])
    add(attempt, uploads)
    total = unmasked(local, attempt, deaf=[deaf])
    assert total.tolist() == [sum(column) % (1 << bits) for column in zip(*vectors.values(), strict=True)]


def _masked(site, plan, hidden, drawn):
    """Masks, and notes what the site has drawn from the operating system."""
    real = os.urandom
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", lambda count: drawn.append(real(count)) or drawn[-1])
        return site.mask(plan, hidden)
