"""An upload as a message: what is in it, what is refused, and what a site does not train for."""

from __future__ import annotations

import pytest
import torch

from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import PolicyError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.rng import initial_stream
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire.envelope import EnvelopeStamp, pack_message
from tests.conftest import ToyTrainer
from tests.fedveil.federation.secagg.sites import changed, names, run

SPEC, SITES, SECRET = {"w": ParamSpec((5, 7))}, names(3), bytes(32)


@pytest.fixture
def turn():
    """What one site needs for its turn, and what it is asked."""
    exchange = MessageExchange(FedAvg(), "fedavg", SPEC)
    local = run(SITES, most_weight=10, bound=4.0)
    attempt = local.begin(0, 0, SITES)
    server = exchange.method.init(SPEC, {"w": torch.zeros(5, 7)}, initial_stream(0, "method init"))
    down = exchange.broadcast(server, RoundContext(0, "s00", True, SECRET))
    return exchange, local, attempt, down


def upload(turn, step: float = 0.5, plan=None, trainer=None):
    exchange, local, attempt, down = turn
    summed, ctx = MaskedUploadCodec.from_exchange(exchange, 0, 32), RoundContext(0, "s00", True, SECRET)
    trainer = trainer or ToyTrainer(SPEC, 3, step)
    _, parts = summed.of_site(local.sites["s00"], plan or attempt.plan)(down, None, trainer, ctx, "")
    return summed, b"".join(parts)


def test_an_upload_is_one_vector_and_what_is_attached(turn, caplog):
    caplog.set_level("INFO", "fedveil.secure")
    summed, data = upload(turn)
    assert "masked; 0 entries were clipped" in caplog.text
    assert len(data) <= summed.largest_upload
    message, vector, attached = summed.receive(data)
    assert set(message.payload.fields) == {"sum", "attached"}
    assert len(vector) == 5 * 7 + 1 + 1
    assert attached.next.prekey.number == 1
    assert attached.shares.closed.keys() == set(SITES)


def test_entries_beyond_the_bound_are_counted_in_the_site_s_log(turn, caplog):
    upload(turn, step=4.5)
    assert "masked; 35 entries were clipped to +-4" in caplog.text
    assert caplog.records[-1].levelname == "WARNING"


def test_sums_of_so_many_that_no_scale_fits_are_not_trained_for(turn):
    attempt = turn[2]
    plan = changed(attempt.plan, most_weight=100_000_000, bits=64)
    assert FixedPointRing.from_plan(plan).most_weight == 100_000_000
    with pytest.raises(WireError, match="bound"):
        upload(turn, plan=changed(plan, bound=1e-300), trainer=object())


def test_a_plan_that_is_refused_is_not_trained_for(turn):
    trainer = ToyTrainer(SPEC)
    with pytest.raises(PolicyError, match="min-sites"):
        upload(turn, plan=changed(turn[2].plan, least=1), trainer=trainer)
    assert trainer.started_from == []


@pytest.mark.parametrize(
    ("examples", "report"), [(3, {}), (None, {"loss_trained": 0.5})], ids=["num_examples", "report"]
)
def test_figures_beside_the_vector_are_refused(turn, examples, report):
    summed, data = upload(turn)
    message, _, _ = summed.receive(data)
    stamp = EnvelopeStamp.from_exchange(summed.exchange.method, "fedavg", 0, "up")
    again = pack_message(summed.layout, stamp, message.payload, examples, report)
    with pytest.raises(WireError, match="num_examples"):
        summed.receive(again)


def test_a_vector_of_another_length_or_round_or_another_statement_is_refused(turn):
    summed, data = upload(turn)
    fields = summed.receive(data)[0].payload.fields
    stamp = EnvelopeStamp.from_exchange(summed.exchange.method, "fedavg", 0, "up")
    with pytest.raises(WireError):
        MaskedUploadCodec.from_exchange(summed.exchange, 1, 32).receive(data)
    with pytest.raises(WireError, match="attached|UploadAttachment"):
        summed.receive(pack_message(summed.layout, stamp, Payload({**fields, "attached": b"{}"})))
    with pytest.raises(WireError):
        summed.receive(pack_message(summed.layout, stamp, Payload({**fields, "sum": fields["sum"][:-1]})))
    for end in (len(data) // 2, len(data) - 1):
        with pytest.raises(WireError):
            summed.receive(data[:end])
