"""A server that broadcasts what no run would, and a site that looks before it trains."""

from __future__ import annotations

import pytest
import torch

from fedveil.client_app.app import public_reason
from fedveil.client_app.guards.broadcast_guard import BroadcastReference, BroadcastReferenceStore
from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.contract.method import FederatedState
from fedveil.errors import PolicyError, StateError, WireError
from tests.client_app.one_site import Server

GRADIENT = {"method.name": "random_binary", "method.params": 'rate = 0.0\nadapter = {kind = "lora"}'}
ROWS = {"method.name": "fedavg", "dp.clip-norm": 1.0, "dp.noise-multiplier": 0.0, "train.max-steps": 1}


def times(weights, factor: float) -> dict:
    return {name: factor * w for name, w in weights.items()}


def test_the_first_broadcast_is_judged_against_what_the_seed_says(tmp_path):
    server = Server(tmp_path, "max-broadcast-change = 0.01")
    assert server.send(server.initial)
    (tmp_path / "other").mkdir()
    other = Server(tmp_path / "other", "max-broadcast-change = 0.01")
    with pytest.raises(PolicyError, match="broadcast: this site permits a change of at most 0.01 .* found more"):
        other.send(times(other.initial, 1.1))
    assert (other.looked, other.kept) == (0, None)
    assert not list(ClientStateStore.open(other.at, "r", "s").folder.glob("turn-*"))


@pytest.mark.long
@pytest.mark.parametrize("config", [{}, GRADIENT, ROWS, {"method.name": "fedrand"}])
def test_whatever_asks_for_the_rows_the_weights_are_judged_before(config, tmp_path):
    server = Server(tmp_path, **config)
    with pytest.raises(PolicyError, match="max-broadcast-change"):
        server.send(times(server.initial, 1e3))
    assert server.looked == 0
    assert server.send(server.initial)


def test_a_later_broadcast_is_judged_against_the_last_that_was_trained_from(tmp_path):
    server = Server(tmp_path, "max-broadcast-change = 0.3")
    for round_, factor in enumerate((1.0, 1.2, 1.45)):
        assert server.send(times(server.initial, factor), round_)
    with pytest.raises(PolicyError, match="change"):
        server.send(times(server.initial, 2.5), 3)
    assert server.send(times(server.initial, 1.75), 3)  # what was refused does not count
    norm = sum(float(w.square().sum()) for w in server.initial.values()) ** 0.5
    assert sum(n * n for n in server.kept.norms.values()) ** 0.5 == pytest.approx(1.75 * norm)


def test_one_layer_among_many_does_not_drown(tmp_path):
    """The change of one B among 32 tensors: a sixth of the norm of all together."""
    server = Server(tmp_path, "max-broadcast-change = 1.0")
    name = next(n for n in server.initial if n.endswith("lora_B"))
    hostile = {**server.initial, name: torch.zeros_like(server.initial[name])}
    hostile[name][0, 0] = 1.0
    assert sum(float(w.square().sum()) for w in server.initial.values()) > 36.0
    with pytest.raises(PolicyError, match="change"):
        server.send({**hostile, name: hostile[name].index_fill(0, torch.arange(3), 0.8)})
    assert server.send(server.initial)


def test_zeros_in_between_do_not_open_the_bound(tmp_path):
    server = Server(tmp_path, "max-broadcast-change = 2.0")
    assert server.send(server.initial)
    assert server.send(times(server.initial, 0.0), 1)
    with pytest.raises(PolicyError, match="change"):
        server.send(times(server.initial, 5.0), 2)


def test_a_norm_is_bounded_where_the_site_says_so(tmp_path):
    server = Server(tmp_path, "max-broadcast-norm = 3.0")
    with pytest.raises(PolicyError, match="a norm of at most 3 .max-broadcast-norm., found more"):
        server.send(server.initial)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_value_that_is_not_finite_is_refused(value, tmp_path):
    server = Server(tmp_path)
    name = next(iter(server.initial))
    bad = {**server.initial, name: torch.full_like(server.initial[name], value)}
    with pytest.raises((WireError, PolicyError), match="finite|change") as caught:
        server.send(bad)
    assert server.looked == 0
    assert public_reason(caught.value).startswith(("WireError", "PolicyError"))


def test_the_server_learns_neither_norm_nor_change(tmp_path):
    server = Server(tmp_path)
    with pytest.raises(PolicyError) as caught:
        server.send(times(server.initial, 1234.5))
    assert "123" not in str(caught.value)


def test_a_turn_that_fails_afterwards_leaves_the_reference(tmp_path):
    server = Server(tmp_path, "min-examples = 100")
    with pytest.raises(PolicyError, match="examples"):
        server.send(server.initial)
    assert server.kept is None


@pytest.mark.parametrize(
    "damage", ["{", '{"key": "00", "tensors": {"a": [1.0, "AAAA"]}}', '{"key": "", "tensors": []}', "[]"]
)
def test_a_damaged_file_refuses(damage, tmp_path):
    server = Server(tmp_path)
    file = tmp_path / "r" / "s" / "received.json"
    file.parent.mkdir(parents=True)
    file.write_text(damage)
    with pytest.raises(StateError, match="restore it from a backup"):
        server.send(server.initial)


def test_the_reference_is_kept_as_it_was(tmp_path):
    weights = FederatedState({"a": torch.arange(5.0)}).tensors
    made = BroadcastReference.from_weights(weights)
    store = BroadcastReferenceStore(tmp_path / "r" / "s")
    store.save(made)
    reference = store.load()
    assert (reference.key, reference.norms) == (made.key, made.norms)
    assert torch.equal(reference.sketches["a"], made.sketches["a"])
    assert (tmp_path / "r" / "s" / "received.json").stat().st_mode & 0o077 == 0
    assert (tmp_path / "r" / "s" / "received.json").stat().st_size < 12_000
