"""Masks from a key with ChaCha20 (RFC 8439), with the same bits on the CPU and on a GPU.

A key's tensor number t has two keystreams, each starting at block 0:

    key    = the mask's 32 bytes
    nonce  = t (8 bytes, little endian) | stream (4 bytes, little endian): 0 for entries, 1 for ties

Byte i of the entry keystream decides entry i, in row-major order. The ties, in order, use the words of the
other keystream, as in `fedveil.rng.draw_booleans`. A block depends only on its number, so a GPU computes all
blocks at once. (AES, which the other streams use, needs table lookups.) A tensor's keystreams are independent
of other tensors' keystreams.

| device | implementation |
|---|---|
| CPU | OpenSSL, through `cryptography` |
| CUDA | `triton_kernels`; if they do not work (`triton_available`), torch, operation by operation |
| any other | torch |
"""

from __future__ import annotations

import math

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from jaxtyping import Bool, Int32, UInt8
from torch import Tensor

from fedveil import rng
from fedveil.ops import triton_available

BLOCK_BYTES = 64
LARGEST = 2**32 * BLOCK_BYTES  # maximum entries in a tensor: the block counter has 32 bits
_ENTRIES, _TIES = 0, 1
_CONSTANT = b"expand 32-byte k"
_PIECE = 1 << 19  # blocks computed at a time: torch needs 64 bytes per block, which stay in a GPU's cache


def draw_mask(
    key: bytes, number: int, keep: float, shape: tuple[int, ...], device: torch.device
) -> Bool[Tensor, "..."]:
    """Return the mask for a key's tensor `number` on `device`; each entry is True with probability `keep`.

    Raises:
        ValueError: the shape has more entries than a keystream has bytes, or `keep` is not a probability.
    """
    if (count := math.prod(shape)) > LARGEST:
        raise ValueError(f"shape: expected at most {LARGEST} entries in a tensor, found {count}; split it")
    if device.type == "cpu":
        return rng.draw_booleans(_context(key, number, _ENTRIES), lambda: _context(key, number, _TIES), keep, shape)
    first, rest = rng.probability_threshold(keep)
    both = cipher_states(key, number).to(device)
    kernels = triton_available.load_kernels(device)
    if kernels and first < 256 and count:
        return kernels.draw_mask(both, first, rest, count).view(shape)
    return decide_bits(both[0], both[1], first, rest, count).view(shape)


def _context(key: bytes, number: int, stream: int) -> CipherContext:
    return Cipher(algorithms.ChaCha20(key, bytes(4) + _nonce(number, stream)), None).encryptor()


def _nonce(number: int, stream: int) -> bytes:
    return number.to_bytes(8, "little") + stream.to_bytes(4, "little")


def cipher_states(key: bytes, number: int) -> Int32[Tensor, "2 16"]:
    """Return the initial states of both keystreams, on the CPU: constant, key, block number 0, nonce."""
    blocks = [_CONSTANT + key + bytes(4) + _nonce(number, stream) for stream in (_ENTRIES, _TIES)]
    return torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.int32).view(2, 16)


def decide_bits(
    entries: Int32[Tensor, "16"], ties: Int32[Tensor, "16"], first: int, rest: int, count: int
) -> Bool[Tensor, " n"]:
    """Compute `fedveil.rng.draw_booleans` with torch operations, on the states' device."""
    drawn = key_stream(entries, count)
    bits = drawn.to(torch.int16) < first  # which may be 256
    if rest:
        tied = (drawn == first).nonzero().squeeze(1)
        words = key_stream(ties, 4 * len(tied)).view(torch.int32)
        bits[tied] = ((words >> 8) & 0xFFFFFF) < rest
    return bits


def key_stream(state: Int32[Tensor, "16"], count: int) -> UInt8[Tensor, " n"]:
    """Return the first `count` bytes, on the state's device."""
    blocks = -(-count // BLOCK_BYTES)
    out = torch.empty(blocks, 16, dtype=torch.int32, device=state.device)
    for start in range(0, blocks, _PIECE):
        piece = out[start : start + _PIECE]
        before = state[:, None].repeat(1, len(piece))
        before[12] += torch.arange(start, start + len(piece), device=state.device).to(torch.int32)
        piece.copy_((before + _rounds(before)).T)
    return out.view(torch.uint8).view(-1)[:count]


def _rounds(state: Int32[Tensor, "16 n"]) -> Int32[Tensor, "16 n"]:
    a, b, c, d = state.view(4, 4, -1)
    for _ in range(10):
        a, b, c, d = _quarters(a, b, c, d)
        a, b, c, d = _quarters(a, b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0))
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a, b, c, d])


def _quarters(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply four quarter rounds, one per column. Sums of int32 wrap around."""
    a = a + b
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 12)
    a = a + b
    d = _turned(d ^ a, 8)
    c = c + d
    return a, _turned(b ^ c, 7), c, d


def _turned(x: Tensor, by: int) -> Tensor:
    return (x << by) | ((x >> (32 - by)) & ((1 << by) - 1))  # the right shift copies the sign bit
