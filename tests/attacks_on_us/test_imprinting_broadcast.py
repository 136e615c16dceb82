"""A server that broadcasts adapters made to spell out rows (NeuroImprint and its like), against a site's check."""

from __future__ import annotations

import pytest

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


@pytest.mark.long
def test_a_site_with_a_bound_of_one_refuses_it_before_it_looks_at_a_row(tmp_path):
    server = Server(tmp_path, "max-broadcast-change = 1.0", **LORA)
    sent = hostile(server)
    with pytest.raises(PolicyError, match="max-broadcast-change"):
        server.send(sent)
    assert server.looked == 0
    assert server.send(server.initial)


@pytest.mark.long
def test_a_site_without_a_bound_of_its_own_refuses_it_too(tmp_path):
    server = Server(tmp_path, **LORA)
    with pytest.raises(PolicyError, match="max-broadcast-change"):
        server.send(hostile(server))
    assert server.looked == 0


@pytest.mark.long
@pytest.mark.parametrize("steps", [8, 16])
def test_a_ramp_is_refused_once_it_is_too_far_from_the_first_weights(steps, tmp_path):
    """Every step is below the bound of a change."""
    server = Server(tmp_path, "max-broadcast-change = 5.0\nmax-broadcast-drift = 1.5", **LORA)
    sent = hostile(server)

    def ramp(part: float) -> dict:
        return {n: w + part * (sent[n] - w) for n, w in server.initial.items()}

    permitted = steps // 8  # an eighth of the whole pair, whose drift is about 5.8
    for round_ in range(permitted + 1):
        assert server.send(ramp(round_ / steps), round_)
    with pytest.raises(PolicyError, match="max-broadcast-drift"):
        server.send(ramp((permitted + 1) / steps + 0.25), permitted + 1)
    assert server.send(ramp(permitted / steps), permitted + 1)


@pytest.mark.long
def test_a_site_that_bounds_nothing_trains_from_it(tmp_path):
    server = Server(tmp_path, "max-broadcast-change = 1e9\nmax-broadcast-drift = 1e9", **LORA)
    assert server.send(hostile(server))
