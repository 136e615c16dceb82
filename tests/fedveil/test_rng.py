from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil.federation import aggregation_rules
from fedveil.rng import RandomStream, derive_secret, initial_stream

SECRET = bytes(range(32))


def test_bytes_are_aes_ctr_of_the_blake2b_key():
    """The stream by its definition, written out once more."""
    h = hashlib.blake2b(digest_size=32)
    for part in (SECRET, b"3", b"site", b"mask"):
        h.update(len(part).to_bytes(8, "little") + part)
    expected = Cipher(algorithms.AES(h.digest()), modes.CTR(bytes(16))).encryptor().update(bytes(40))
    stream = RandomStream.derive(SECRET, 3, "site", "mask")
    assert stream.bytes(16) + stream.bytes(24) == expected


@pytest.mark.parametrize(
    "other",
    [
        (SECRET[::-1], 3, "a", "p"),
        (SECRET, 4, "a", "p"),
        (SECRET, 3, "b", "p"),
        (SECRET, 3, "a", "q"),
        (SECRET, 3, "ap", ""),
    ],
)
def test_every_part_of_the_name_matters(other):
    assert RandomStream.derive(*other).bytes(32) != RandomStream.derive(SECRET, 3, "a", "p").bytes(32)


def test_bernoulli_at_its_ends_and_in_between():
    stream = RandomStream(SECRET)
    assert stream.bernoulli(1.0, (1000,)).all()
    assert not stream.bernoulli(0.0, (1000,)).any()
    assert stream.bernoulli(0.5, (2, 0)).shape == (2, 0)
    mean = float(stream.bernoulli(0.271, (1_000_000,)).float().mean())  # 5 sigma; fixed key
    assert abs(mean - 0.271) < 5 * (0.271 * 0.729 / 1e6) ** 0.5
    with pytest.raises(ValueError, match="probability: expected 0 to 1"):
        stream.bernoulli(1.1, (1,))


def test_ties_are_decided_by_a_stream_of_their_own():
    """Some 80 of 20,000 bytes tie with the threshold's first, in two blocks of draws that go on as one."""
    keep = 0.7312345
    digest = hashlib.blake2b(b"".join(len(p).to_bytes(8, "little") + p for p in (SECRET, b"ties")), digest_size=32)
    drawn = naive_mask(counter_bytes(SECRET, 20_000), counter_bytes(digest.digest(), 80_000), keep)
    stream = RandomStream(SECRET)
    parts = [stream.bernoulli(keep, (n,)).tolist() for n in (7_001, 12_999)]
    assert parts[0] + parts[1] == drawn
    assert drawn != [byte < 0.7312345 * 256 for byte in counter_bytes(SECRET, 20_000)]


def counter_bytes(key, count):
    ecb = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return b"".join(ecb.update(i.to_bytes(16, "big")) for i in range(count // 16 + 1))[:count]


def naive_mask(entries, words, keep):
    """A byte decides an entry; if it is the threshold's first byte, the next three bytes of `words` decide."""
    threshold, at, mask = round(keep * 2**32), 0, []
    for byte in entries:
        value = byte << 24
        if byte == threshold >> 24 and threshold % 2**24:
            value |= int.from_bytes(words[at : at + 4], "little") >> 8
            at += 4
        mask.append(value < threshold)
    return mask


def test_choice_is_uniform_without_replacement():
    """Each of 6 sites is in 2,000 of 4,000 draws of 3, within 5 sigma; and no draw repeats a site."""
    counts = [0] * 6
    stream = RandomStream(SECRET)
    for _ in range(4000):
        drawn = stream.choice(6, 3)
        assert len(set(drawn)) == 3
        for i in drawn:
            counts[i] += 1
    assert all(abs(c - 2000) < 5 * 1000**0.5 for c in counts)
    assert sorted(stream.choice(5, 5)) == [0, 1, 2, 3, 4]
    assert stream.choice(5, 0) == []


def test_secrets_repeat_only_where_asked():
    assert derive_secret("server", 1, True) == derive_secret("server", 1, True) != derive_secret("client:a", 1, True)
    assert derive_secret("server", 1, True) != derive_secret("server", 2, True)
    assert derive_secret("server", 1, False) != derive_secret("server", 1, False)
    assert initial_stream(1, "w").bytes(8) == initial_stream(1, "w").bytes(8) != initial_stream(2, "w").bytes(8)


def test_a_secret_does_not_show_in_a_repr():
    assert "00010203" not in repr(RandomStream(SECRET))
    assert repr(SECRET) not in repr(RandomStream(SECRET))


@pytest.mark.parametrize("sites,fraction,size", [(12, 0.3, 4), (10, 0.3, 3), (4, 1.0, 4), (3, 0.01, 1), (0, 0.5, 0)])
def test_cohort_size_is_the_ceiling(sites, fraction, size):
    names = [f"s{i}" for i in range(sites)]
    drawn = aggregation_rules.draw_cohort(names, fraction, SECRET, 0)
    assert len(drawn) == len(set(drawn)) == size
    assert drawn == sorted(drawn) == aggregation_rules.draw_cohort(names[::-1], fraction, SECRET, 0)


def test_cohorts_differ_by_round_and_attempt():
    names = [f"s{i}" for i in range(30)]
    draws = {tuple(aggregation_rules.draw_cohort(names, 0.3, SECRET, r, a)) for r in range(4) for a in range(3)}
    assert len(draws) == 12
