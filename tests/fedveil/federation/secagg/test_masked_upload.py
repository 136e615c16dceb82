"""An upload as a message: what is in it, what is refused, and what a site does not train for."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import PolicyError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.federation.secagg.messages import UploadAttachment
from fedveil.federation.secagg.plan import Prekey
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.federation.secagg.schema import MOST_HOLDERS, MOST_ROW_BYTES
from fedveil.rng import initial_stream
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire.envelope import EnvelopeStamp, pack_message
from tests.conftest import ToyTrainer
from tests.fedveil.federation.secagg.sites import changed, names, run

SPEC, SITES, SECRET = {"w": ParamSpec((5, 7))}, names(3), bytes(32)


def _exchange() -> MessageExchange:
    return MessageExchange(FedAvg(), "fedavg", SPEC)


@pytest.fixture
def turn():
    """What one site needs for its turn, and what it is asked. The site counts on one that works with the server."""
    exchange = _exchange()
    local = run(SITES, SiteRequirements(colluding=1), most_weight=10, bound=4.0)
    attempt = local.begin(0, 0, SITES)
    server = exchange.method.init(SPEC, {"w": torch.zeros(5, 7)}, initial_stream(0, "method init"))
    down = exchange.broadcast(server, RoundContext(0, "s00", True, SECRET))
    return exchange, local, attempt, down


def upload(turn, step: float = 0.5, trainer=None, **update):
    """`update`: other numbers, in the plan and in the run config alike."""
    exchange, local, attempt, down = turn
    summed, ctx = MaskedUploadCodec.from_exchange(exchange, 0, 32), RoundContext(0, "s00", True, SECRET)
    trainer = trainer or ToyTrainer(SPEC, 3, step)
    plan, terms = changed(attempt.plan, **update), replace(local.terms(attempt.plan), **update)
    _, parts = summed.of_site(local.sites["s00"], plan, terms)(down, None, trainer, ctx, "")
    return summed, b"".join(parts)


def test_an_upload_is_one_vector_and_what_is_attached(turn, caplog):
    caplog.set_level("INFO", "fedveil.secure")
    summed, data = upload(turn)
    assert "masked; 0 entries were clipped" in caplog.text
    assert len(data) <= summed.largest_upload
    message, vector, attached = summed.receive(data)
    assert set(message.payload.fields) == {"sum", "attached"}
    assert len(vector) == 5 * 7 + 1 + 1
    assert attached.next.number == 1
    assert attached.rows.keys() == set(SITES)
    assert attached.vector == hashlib.sha256(vector.tobytes()).hexdigest()


def test_entries_beyond_the_bound_are_counted_in_the_site_s_log(turn, caplog):
    upload(turn, step=4.5)
    assert "masked; 35 entries were clipped to +-4" in caplog.text
    assert caplog.records[-1].levelname == "WARNING"


def test_sums_of_so_many_that_no_scale_fits_are_not_trained_for(turn):
    update = {"most_weight": 100_000_000, "bits": 64}
    assert FixedPointRing.from_plan(changed(turn[2].plan, **update)).most_weight == 100_000_000
    with pytest.raises(WireError, match="bound"):
        upload(turn, trainer=object(), **update, bound=1e-300)


def test_a_plan_that_is_refused_is_not_trained_for(turn):
    trainer = ToyTrainer(SPEC)
    with pytest.raises(PolicyError, match="max-colluders"):
        upload(turn, trainer=trainer, colluding=0)
    assert trainer.started_from == []


def test_the_largest_upload_has_room_for_as_many_rows_and_digests_as_a_site_may_have():
    """254 neighbours, with names of the longest form."""
    name, row = "n" * 61, "ab" * MOST_ROW_BYTES
    sites = [f"{name}{i:03}" for i in range(MOST_HOLDERS)]
    prekey = Prekey(site=sites[0], signing_key="ab" * 32, number=2**53 - 1, key="ab" * 32, signature="ab" * 64)
    attached = UploadAttachment(
        plan="ab" * 32, own="ab" * 32, pairs=dict.fromkeys(sites, "ab" * 32), rows=dict.fromkeys(sites, row),
        shares=dict.fromkeys(sites, ("ab" * 16,) * (1 + MOST_HOLDERS)), vector="ab" * 32, next=prekey,
        signature="ab" * 64,
    )  # fmt: skip
    field = next(f for f in MaskedUploadCodec.from_exchange(_exchange(), 0, 32).layout.fields if f.name == "attached")
    assert field.most[0] - 100_000 < len(attached.to_bytes()) <= field.most[0]


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
