"""A server that broadcasts adapters made to spell out rows (NeuroImprint and its like), against a site's check."""

from __future__ import annotations

import pytest
import torch

from fedveil import paths
from fedveil.attacks.reconstruction import imprint
from fedveil.errors import PolicyError
from tests.client_app.one_site import Server

LAYER = "transformer.h.0.mlp.c_fc"
LORA = {"method.params": 'adapter = {kind = "lora", rank = 16}'}


def hostile(server: Server) -> dict:
    public = server.task.encode(server.task.examples(paths.find_folder("data") / "e2e", "test"))[:60]
    gate = imprint.gate_direction(server.task, server.initial, LAYER, range(2, 5), public)
    return dict(imprint.craft_broadcast(server.task, server.initial, LAYER, gate, 20.0))


def test_a_site_with_a_bound_of_one_refuses_it_before_it_looks_at_a_row(tmp_path):
    server = Server(tmp_path, "max-broadcast-change = 1.0", **LORA)
    sent = hostile(server)
    with pytest.raises(PolicyError, match="max-broadcast-change"):
        server.send(sent)
    assert server.looked == 0
    assert server.send(server.initial)


@pytest.mark.long
def test_what_the_check_does_not_stop_a_site_that_sets_no_bound_and_a_ramp(tmp_path):
    """Not defended, and said so in docs/pitfalls.md: it fails on the day when it is."""
    server = Server(tmp_path, "max-broadcast-change = 1.0", **LORA, **{"run.rounds": 40})
    sent = hostile(server)
    parts = torch.linspace(0, 1, 17).tolist()
    for round_, part in enumerate(parts):
        assert server.send({n: w + part * (sent[n] - w) for n, w in server.initial.items()}, round_)
    unbounded = tmp_path / "unbounded"
    unbounded.mkdir()
    assert Server(unbounded, **LORA).send(sent)
