"""Masks from a key, against RFC 8439, pycryptodome, and the two ways to compute them against each other."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from Crypto.Cipher import ChaCha20
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import rng
from fedveil.ops import chacha20, random_masks, triton_available
from tests.fedveil.test_rng import naive_mask
from tests.pretend import DEVICE, Pretended

KEY = bytes(range(7, 39))
CPU = torch.device("cpu")
examples = settings(max_examples=60, deadline=None)
keys = st.binary(min_size=32, max_size=32)
numbers = st.integers(0, 2**64 - 1)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def theirs(key, number, stream, count) -> bytes:
    nonce = number.to_bytes(8, "little") + stream.to_bytes(4, "little")
    return ChaCha20.new(key=key, nonce=nonce).encrypt(bytes(count))


def there(key, number, keep, shape) -> torch.Tensor:
    """As on a device that is not the CPU and has no kernels."""
    with Pretended() as pretended:
        mask = chacha20.draw_mask(key, number, keep, shape, DEVICE)
    assert not pretended.back
    return mask.values


def test_a_block_is_that_of_rfc_8439():
    """Section 2.3.2: the first words of a block, in hex."""
    nonce = bytes.fromhex("000000090000004a00000000")
    state = torch.frombuffer(
        bytearray(b"expand 32-byte k" + bytes(range(32)) + (1).to_bytes(4, "little") + nonce), dtype=torch.int32
    )
    block = bytes(chacha20.key_stream(state, 64).numpy())
    assert block.hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4")
    assert block.hex().endswith("b5129cd1de164eb9cbd083e8a2503c4e")


@examples
@given(keys, numbers, st.integers(0, 1), st.integers(0, 700))
def test_the_keystream_is_pycryptodomes(key, number, stream, count):
    state = chacha20.cipher_states(key, number)[stream]
    assert bytes(chacha20.key_stream(state, count).numpy()) == theirs(key, number, stream, count)


def test_pieces_of_a_keystream_go_on_as_one(monkeypatch):
    monkeypatch.setattr(chacha20, "_PIECE", 3)
    assert bytes(chacha20.key_stream(chacha20.cipher_states(KEY, 5)[1], 1000).numpy()) == theirs(KEY, 5, 1, 1000)


@pytest.mark.long
@examples
@given(keys, st.integers(0, 99), st.floats(0, 1), shapes)
def test_a_mask_is_that_of_the_naive_twin_on_either_device(key, number, keep, shape):
    mask = random_masks.expand_mask(key, keep, shape, number)
    assert (mask.dtype, mask.shape) == (torch.bool, shape)
    count = math.prod(shape)
    twin = naive_mask(theirs(key, number, 0, count), theirs(key, number, 1, 4 * count), keep)
    assert mask.flatten().tolist() == twin
    assert torch.equal(there(key, number, keep, shape), mask)


@pytest.mark.parametrize("keep", [0.5, 0.2, 0.7312345, 1 / 256 + 1e-9, 255.5 / 256, 1 - 1e-12, 1e-12])
def test_many_ties_are_decided_in_their_order(keep):
    """Some 80 of 20,000 bytes tie with the threshold's first."""
    mask = chacha20.draw_mask(KEY, 3, keep, (20_001,), CPU)
    assert mask.tolist() == naive_mask(theirs(KEY, 3, 0, 20_001), theirs(KEY, 3, 1, 80_004), keep)
    assert torch.equal(there(KEY, 3, keep, (20_001,)), mask)
    assert torch.equal(random_masks.expand_mask(KEY, keep, (5000,), 3), mask[:5000])


@pytest.mark.parametrize("keep", [0.2, 0.7312345])
def test_a_large_tensors_blocks_of_draws_go_on_as_one(monkeypatch, keep):
    """A tie of a later block takes the next word, not the first one again."""
    whole = chacha20.draw_mask(KEY, 3, keep, (20_001,), CPU)
    monkeypatch.setattr(rng, "_BLOCK", 4096)
    assert torch.equal(chacha20.draw_mask(KEY, 3, keep, (20_001,), CPU), whole)
    monkeypatch.undo()
    large = chacha20.draw_mask(KEY, 3, keep, (rng._BLOCK + 70_001,), CPU)
    assert torch.equal(there(KEY, 3, keep, tuple(large.shape)), large)


@pytest.mark.parametrize("keep", [0.0271828, 0.314159, 0.5, 0.99])
def test_the_share_kept_is_within_five_sigma(keep):
    """One million draws under a fixed key; a right implementation fails for fewer than 1 key in 10^6."""
    count = 1_000_000
    mask = random_masks.expand_mask(KEY, keep, (1000, 1000))
    sigma = math.sqrt(keep * (1 - keep) / count)
    assert abs(mask.double().mean().item() - keep) < 5 * sigma
    assert not torch.equal(mask, random_masks.expand_mask(KEY[::-1], keep, (1000, 1000)))


@pytest.mark.parametrize("device", [CPU, DEVICE])
def test_keep_none_or_all(device):
    with Pretended():
        assert not random_masks.expand_mask(KEY, 0.0, (999,), 0, device).any()
        assert random_masks.expand_mask(KEY, 1.0, (999,), 0, device).all()


def test_more_entries_than_a_keystream_has_bytes_are_refused():
    with pytest.raises(
        ValueError, match="shape: expected at most 274877906944 entries in a tensor, found 27487790694[5]"
    ):
        random_masks.expand_mask(KEY, 0.5, (chacha20.LARGEST + 1,))
    with pytest.raises(ValueError, match="probability: expected 0 to 1, found 1.1"):
        random_masks.expand_mask(KEY, 1.1, (3,))
    assert rng.probability_threshold(1.0) == (256, 0)


def test_kernels_that_do_not_work_are_named_once_in_the_log(monkeypatch, caplog):
    """Here Triton is missing, or there is no device: either is a reason."""
    if torch.cuda.is_available():
        pytest.skip("here they work")
    triton_available._tried.cache_clear()
    with caplog.at_level(logging.WARNING, "fedveil"):
        assert [triton_available.load_kernels(torch.device("cuda")) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "GPU kernels: Triton or the C compiler does not work here (" in caplog.text
    assert triton_available.load_kernels(CPU) is None
    assert triton_available.load_kernels(DEVICE) is None
