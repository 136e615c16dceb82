"""The two codecs of secure aggregation: expected bytes by hand, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from fedveil.errors import ConfigError, WireError
from fedveil.wire.integers import IntegerCodec
from fedveil.wire.raw_bytes import RawBytesCodec


@pytest.mark.parametrize(("bits", "dtype"), [(32, torch.int32), (64, torch.int64)])
def test_integers_are_little_endian_and_views(bits, dtype):
    codec, value = IntegerCodec(bits), torch.tensor([[1, -2], [258, 0]], dtype=dtype)
    data = b"".join(codec.encode(value))
    assert data == b"".join((int(x) % (1 << bits)).to_bytes(bits // 8, "little") for x in value.flatten())
    assert len(data) == codec.nbytes(codec.shape(value)) == bits // 8 * 4
    assert torch.equal(codec.decode(memoryview(data), (2, 2)), value)
    assert codec.name == f"integers {bits}"
    assert b"".join(codec.encode(torch.zeros(0, dtype=dtype))) == b""
    with pytest.raises(WireError, match=r"expected \d+ bytes"):
        codec.decode(memoryview(data), (3,))


def test_integers_of_another_width_or_dtype():
    with pytest.raises(ConfigError, match="bits: expected 32 or 64, found 16"):
        IntegerCodec(16)
    for value in (torch.zeros(2), torch.zeros(2, dtype=torch.int64), b"1234"):
        with pytest.raises(WireError, match="expected a tensor of torch.int32"):
            IntegerCodec(32).encode(value)


def test_opaque_bytes_come_back_as_they_are():
    codec = RawBytesCodec()
    for value in (b"", b"\x00\xff{"):
        assert b"".join(codec.encode(value)) == value
        assert codec.decode(memoryview(value), codec.shape(value)) == value
        assert codec.nbytes(codec.shape(value)) == len(value)
    with pytest.raises(WireError, match="expected bytes of shape"):
        codec.decode(memoryview(b"abc"), (2,))
    with pytest.raises(WireError, match="expected bytes, found Tensor"):
        codec.encode(torch.zeros(2))
