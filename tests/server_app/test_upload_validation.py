from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedveil.contract.layout import MessageLayout, Payload, WireField
from fedveil.errors import UploadRefused
from fedveil.server_app.upload_limits import UploadLimits
from fedveil.server_app.upload_validation import check_upload
from fedveil.wire.dense import DenseCodec
from fedveil.wire.envelope import DecodedMessage, EnvelopeStamp, pack_message, unpack_message


def message(value=None, num_examples=5) -> DecodedMessage:
    """As unpack gives it, norms with it."""
    value = torch.ones(2, 3) if value is None else value
    layout = MessageLayout((WireField("h.lora_A", "up", DenseCodec(value.dtype), tuple(value.shape)),))
    stamp = EnvelopeStamp("fedavg", 1, 0, "up")
    data = pack_message(layout, stamp, Payload({"h.lora_A": value}), 5)
    return replace(unpack_message(data, layout, stamp), num_examples=num_examples)


def test_a_sound_upload_passes_with_its_count():
    assert check_upload(message(), UploadLimits()) == 5


@pytest.mark.parametrize("count", [0, -1, float("nan"), 1e12, 10**12, 3.5, "7", None, True, [1]])
def test_num_examples_must_be_a_whole_number_in_range(count):
    with pytest.raises(UploadRefused, match="num_examples: expected a whole number from 1 to 100000000, found"):
        check_upload(message(num_examples=count), UploadLimits())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad,text", [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_values_must_be_finite(dtype, bad, text):
    value = torch.ones(2, 3, dtype=dtype)
    value[1, 2] = bad
    with pytest.raises(
        UploadRefused, match=rf"h.lora_A: expected finite values, found {text} at entry 5 \(1 in total\)"
    ):
        check_upload(message(value), UploadLimits())


def test_a_norm_beyond_the_limit_is_refused_even_where_its_square_overflows():
    with pytest.raises(UploadRefused, match="h.lora_A: expected a norm of at most 1e"):
        check_upload(message(torch.full((4,), 1e30)), UploadLimits())
    with pytest.raises(UploadRefused, match="expected a norm of at most 2, found 2.44949"):
        check_upload(message(), UploadLimits(max_norm=2))
    assert check_upload(message(torch.full((4,), 1e4)), UploadLimits()) == 5


def test_an_empty_field_passes():
    assert check_upload(message(torch.empty(0)), UploadLimits()) == 5


def test_counts_of_rows_that_no_data_can_have_are_refused():
    counts = {"read_rows": 9.0, "cut_rows": 1.0, "dropped_rows": 8.0}
    assert check_upload(replace(message(), report=counts), UploadLimits()) == 5
    with pytest.raises(UploadRefused, match="read_rows: expected at least cut_rows"):
        check_upload(replace(message(), report={**counts, "cut_rows": 2.0}), UploadLimits())
    with pytest.raises(UploadRefused, match="read_rows: expected a whole number from 0 to 8, found 9.0"):
        check_upload(replace(message(), report=counts), UploadLimits(max_examples=8))
