"""A view contains exactly what its adversary saw."""

from __future__ import annotations

import pytest
import torch

from fedveil.attacks.base import AdversaryView
from fedveil.errors import StateError, WireError
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.fedrand import FedRand
from fedveil.wire import envelope
from fedveil.wire.capture import MessageCapture
from tests.attacks.toy import federation
from tests.conftest import ToyTrainer


@pytest.fixture
def run(tmp_path, lora_spec, lora_weights):
    """Three sites under FedRand, two of them in each of four rounds."""
    sites = {site: ToyTrainer(lora_spec, 2 + ord(site), ord(site) / 100) for site in "abc"}
    done = federation(FedRand(), "fedrand", tmp_path, sites, lora_weights, rounds=4, fraction=0.5)
    done.run()
    return done


def test_the_server_sees_every_message_in_order(run):
    view = AdversaryView.server(run.tap, run.exchange)
    broadcasts, uploads = list(view.broadcasts()), list(view.uploads())
    assert [u.round for u in uploads] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [(b.round, b.site) for b in broadcasts] == [(u.round, u.site) for u in uploads]
    assert {u.direction for u in uploads} == {"up"}
    assert {b.direction for b in broadcasts} == {"down"}
    assert view.sites == sorted({u.site for u in uploads}) == sorted(run.participated)
    assert all(u.num_examples == 2 + ord(u.site) and u.report["steps"] == 1 for u in uploads)
    assert all(b.num_examples == 0 and not b.report for b in broadcasts)


def test_a_payload_is_what_crossed_the_wire(run):
    view = AdversaryView.server(run.tap, run.exchange)
    for upload, seen in zip(view.uploads(), (s for s in run.tap.messages() if s.direction == "up"), strict=True):
        message = run.exchange.receive(run.tap.read(seen), seen.round)
        assert set(upload.payload.fields) == set(message.payload.fields)
        assert all(torch.equal(upload.payload.fields[n], w) for n, w in message.payload.fields.items())


def test_a_client_sees_its_own_messages_only(run):
    whole = AdversaryView.server(run.tap, run.exchange)
    for site in whole.sites:
        view = AdversaryView.client(run.tap, run.exchange, site)
        assert view.sites == [site]
        assert {s.site for s in [*view.uploads(), *view.broadcasts()]} == {site}
        assert [u.round for u in view.uploads()] == [u.round for u in whole.uploads(site)]
        other = next(s for s in whole.sites if s != site)
        assert not list(view.uploads(other))
        assert not list(view.broadcasts(other))
        assert view.answered(next(whole.uploads(other))) is None


def test_messages_are_read_one_at_a_time(run, monkeypatch):
    read = []
    original = MessageCapture.read
    monkeypatch.setattr(MessageCapture, "read", lambda self, seen: read.append(seen.file) or original(self, seen))
    uploads = AdversaryView.server(run.tap, run.exchange).uploads()
    assert not read
    first = next(uploads)
    assert len(read) == 1
    assert AdversaryView.server(run.tap, run.exchange).answered(first).round == 0
    assert len(read) == 2


@pytest.mark.parametrize("accepted", [False, None])
def test_a_refused_upload_is_no_upload(run, accepted):
    """Refused whether it can be decoded or not; the broadcast it answered stays seen."""
    before = len(list(AdversaryView.server(run.tap, run.exchange).uploads()))
    good = next(s for s in run.tap.messages() if s.direction == "up")
    run.tap.write(run.tap.read(good), 0, 1, good.site, "up", accepted)
    run.tap.write(b"no envelope", 0, 2, "stranger", "up", accepted)
    view = AdversaryView.server(run.tap, run.exchange)
    assert len(list(view.uploads())) == before
    assert "stranger" not in view.sites


def test_an_upload_answers_the_broadcast_of_its_own_attempt(run):
    """A repeated round: the second attempt's upload belongs to the second attempt's broadcast."""
    down = next(s for s in run.tap.messages() if s.direction == "down")
    up = next(s for s in run.tap.messages() if s.direction == "up" and s.site == down.site)
    run.tap.write(run.tap.read(down), 0, 1, down.site, "down")
    run.tap.write(run.tap.read(up), 0, 1, down.site, "up", accepted=True)
    view = AdversaryView.server(run.tap, run.exchange)
    attempts = [(u.attempt, view.answered(u).attempt) for u in view.uploads(down.site) if u.round == 0]
    assert attempts == [(0, 0), (1, 1)]


def test_another_method_s_tap_is_refused_by_file(run, lora_spec):
    wrong = AdversaryView.server(run.tap, type(run.exchange)(FedAvg(), "fedavg", lora_spec))
    with pytest.raises(WireError, match=r"00000\.0\..*\.up: method: expected 'fedavg', found 'fedrand'"):
        list(wrong.uploads())
    assert len(envelope.describe_message(run.tap.read(next(run.tap.messages())))["fields"]) == 4


def test_no_tap_is_an_error(tmp_path, run):
    with pytest.raises(StateError, match=r"run with run\.capture-messages = true"):
        list(AdversaryView.server(MessageCapture(tmp_path / "none"), run.exchange).uploads())
