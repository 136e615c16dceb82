"""What the gate bounds is what is added to the sums, in whatever form it came."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedveil import rng, strategies
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.errors import UploadRefused
from fedveil.federation.exchange import MessageExchange
from fedveil.server_app.upload_limits import UploadLimits
from fedveil.server_app.upload_validation import judge_upload
from fedveil.wire.envelope import EnvelopeStamp, pack_message
from tests.conftest import ToyTrainer

CODED = {"fedrand": "upload_bits = 4", "fedqsn": "upload_bits = 4"}
CTX = RoundContext(0, "east", True, bytes(32))


@pytest.mark.parametrize("scale", [3.4e38, 1e20, 1e7])
@pytest.mark.parametrize("name", CODED)
def test_scales_of_codes_cannot_move_the_weights_further_than_dense_values(name, scale, random_weights):
    method = strategies.create_method(name, CODED[name])
    exchange = MessageExchange(method, name, dict(method.adapter.example_spec()))
    server = method.init(exchange.spec, random_weights(exchange.spec, 1), rng.initial_stream(0, "method init"))
    _, parts = exchange.participate(exchange.broadcast(server, CTX), None, ToyTrainer(exchange.spec), CTX)
    sound = exchange.receive(b"".join(parts), 0)
    assert judge_upload(exchange, sound, CTX, UploadLimits())[0].num_examples == 3

    fields = {
        n: replace(v, scales=torch.full_like(v.scales, scale), codes=torch.zeros_like(v.codes))
        if isinstance(v, QuantizedTensor)
        else v
        for n, v in sound.payload.fields.items()
    }
    payload = replace(sound.payload, fields=fields)
    forged = exchange.receive(
        pack_message(exchange.layout, EnvelopeStamp.from_exchange(method, name, 0, "up"), payload, 3), 0
    )
    with pytest.raises(UploadRefused, match=r"expected (a norm of at most 1e\+06|finite values), found"):
        judge_upload(exchange, forged, CTX, UploadLimits())
    moved = exchange.aggregate(server, [AcceptedUpload(forged.payload, 3, CTX)])  # what it would have done
    assert max(float(w.abs().max()) for w in moved.tensors.values() if w.is_floating_point()) > 1e6
